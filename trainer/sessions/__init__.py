"""Warehouse sessions as training input."""
