"""Tensor parallelism: weights cut over ranks that compute one layer together."""
