"""The planner: a cluster's description and a model's sizes in, the layout that is predicted fastest out. The arithmetic
is C's (zero/planner.h); docs/planner.md has the formulas."""
