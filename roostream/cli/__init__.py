"""The `roostream` command."""

import os

# Must be set before numerical libraries are imported: a second thread only slows down small matrices. The
# number of torch's threads is a setting of each program (`threads`).
os.environ.setdefault("OMP_NUM_THREADS", "1")
