"""How training does: progressive metrics, how live it is, and what a worker tells of itself."""
