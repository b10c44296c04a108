"""DeepSpeed's smaller modules: accelerator, comm, groups, utils, timers, values."""
