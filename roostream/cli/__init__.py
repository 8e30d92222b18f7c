"""The `roostream` command: its sub-commands, and what only they do (status, audit, replay)."""

import os

# Read by libraries of numbers when they are loaded, so it stands before everything else: on small matrices a second thread only
# costs. How many torch uses is a setting of each program (`threads`).
os.environ.setdefault("OMP_NUM_THREADS", "1")
