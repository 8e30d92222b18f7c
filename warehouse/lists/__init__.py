"""Columns of one list a row, straight from the pages of a file."""
