"""What stands under a training: the accelerator, and files on disk."""
