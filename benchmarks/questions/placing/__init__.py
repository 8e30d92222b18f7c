"""Questions about where rows live."""
