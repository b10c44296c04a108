"""What differs between kinds of training: how micro-batches become a step, and in which precision."""
