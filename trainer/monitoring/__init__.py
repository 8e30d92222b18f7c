"""Progressive metrics, drift, and whether training has caught up. Nothing here imports the worker or the
loop."""
