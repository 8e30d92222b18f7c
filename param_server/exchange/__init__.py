"""Rows that the workers hold themselves: what each asks of the others goes to all of them at once."""
