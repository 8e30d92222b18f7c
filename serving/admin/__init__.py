"""What operators ask of a serving process, on a port of its own behind a token."""
