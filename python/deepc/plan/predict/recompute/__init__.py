"""Recomputation by budget: what of a model repeats (blocks), what of it to keep, recompute or lay on disk (choice), and
the step that measures and does it (recomputation)."""
