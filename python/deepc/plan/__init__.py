"""What will be: which part of the model states lies where, in frozen, printable data. No processes, nothing allocated.

`predict` adds what a step takes beyond its states (activations, by a dry run)."""
