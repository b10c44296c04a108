"""DeepSpeed's engine, configuration, zero, checkpointing and inference names, over deepc's."""
