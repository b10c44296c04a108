"""What runs on every host of a run, by its path: neither torch nor deepc is imported by these files."""
