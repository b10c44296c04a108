"""Trained weights put to use: inference engines and exported models."""
