"""What adds up the gradients of the ranks: over shared memory, over nodes, over torch.distributed."""
