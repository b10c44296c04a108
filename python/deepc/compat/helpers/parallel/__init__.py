"""What scripts written for DeepSpeed take of its ways to share a model, by its names, over deepc.parallel."""
