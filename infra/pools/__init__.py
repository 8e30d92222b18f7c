"""So many copies of one program, on this machine or on others."""
