"""Many ranks in one process: every rank's shards, messages and collectives with real numbers, on a tiny model."""
