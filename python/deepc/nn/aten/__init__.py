"""Kernels of torch's own operators that deepc replaces on CPUs, below the model: nothing in it has to change."""
