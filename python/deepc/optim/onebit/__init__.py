"""1-bit Adam, 1-bit LAMB and 0/1 Adam: optimizers whose ranks exchange momentum in 1 bit an element."""
