"""The controller: commits, rollback, incarnations, who trains what, and the program around it."""
