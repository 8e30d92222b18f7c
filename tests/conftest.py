"""What holds for every test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does: small matrices, and one order of their sums
