"""Sizes beyond a machine."""
