"""What only other hosts need: which they are, how a command starts there, and which environment it gets."""
