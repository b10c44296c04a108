"""Parameters as users meet them: their classes and the state machine of those that come and go (param.py), whole for a
while (gathered.py), whose they are (owners.py), and what happens to writes into them (guard.py)."""
