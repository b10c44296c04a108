"""The configuration as DeepSpeed's classes, and what it says of a model before there is an engine."""
