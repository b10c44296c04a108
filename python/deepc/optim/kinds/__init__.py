"""Drop-in optimizers other than Adam and AdamW."""
