"""`roostream replay`: a real log through the whole loop, on a stack of its own or in one process."""
