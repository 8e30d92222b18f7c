"""How rows lie: what everyone who routes them reads in a manifest."""
