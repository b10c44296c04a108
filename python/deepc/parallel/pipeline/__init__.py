"""Pipeline parallelism: a model in stages, and micro-batches through them by a schedule (plan/schedule.py)."""
