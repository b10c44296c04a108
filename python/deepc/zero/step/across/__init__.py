"""Updates of optimizers whose step of an element depends on more of its parameter than a rank has."""
