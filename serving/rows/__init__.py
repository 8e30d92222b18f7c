"""Embedding rows of a serving process: how they are followed, cached and read."""
