"""What the drop-in optimizers share: tensors as the kernels take them, and how states are stored."""
