"""Reading sessions: which rows of a table version are read, in which order, and the reading itself."""
