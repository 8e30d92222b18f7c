"""Sessions of the warehouse: which rows are read, in which order, by whom."""
