"""An engine's states from outside the loop: parameters whole and by part (access.py), averaged (averages.py), saved and
loaded (saving.py)."""
