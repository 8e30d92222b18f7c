"""Two-tower models (ROO paper §3.1) and the index of their item vectors."""
