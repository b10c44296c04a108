"""Layers and losses on the fused kernels, and matrix products where torch's are slow."""
