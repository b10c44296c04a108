"""What went wrong, and what this machine can do: flight records, the doctor, the collectives' log, machine benches."""
