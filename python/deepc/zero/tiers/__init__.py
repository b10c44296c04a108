"""States of a rank that do not lie in its memory: the optimizer's, on disk (zero_optimization.offload_optimizer.device
nvme). windows.py: how they are read and written from outside of a step; disk.py: the rank's scratch file, and a step
over its cells."""
