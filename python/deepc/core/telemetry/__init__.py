"""What is told of a run from below: whose line called (caller.py), messages to people (speak.py), seconds waited by
lane (waits.py)."""
