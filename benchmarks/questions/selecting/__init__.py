"""Questions about training on less."""
