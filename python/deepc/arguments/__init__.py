"""Command-line arguments of the subcommands whose own modules need torch, which no help should wait for."""
