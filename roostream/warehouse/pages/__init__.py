"""Columns straight from the pages of a file."""
