"""The torch.distributed backend "deepc", and compressed communication for torch's DDP and FSDP2."""
