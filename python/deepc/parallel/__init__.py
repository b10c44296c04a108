"""Ways to share a model among ranks besides data parallelism."""
