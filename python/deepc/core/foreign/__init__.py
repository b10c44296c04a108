"""Other people's code: what of torch's inside deepc rests on (private.py), and what deepc changes in torch and in other
libraries (patches.py)."""
