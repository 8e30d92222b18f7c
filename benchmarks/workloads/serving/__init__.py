"""Serving as a program of its own: how it is started, swapped and restarted under load."""
