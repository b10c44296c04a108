"""How much memory a training will take: by arithmetic and by a dry run of the model."""
