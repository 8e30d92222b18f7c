"""Rows as serving has them: where they are kept, how they are followed, how old they are."""
