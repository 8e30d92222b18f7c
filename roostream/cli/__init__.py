"""The `roostream` command."""

import os
import sys

# Must be set before numerical libraries are imported: a second thread only slows down small matrices. The
# number of torch's threads is a setting of each program (`threads`).
os.environ.setdefault("OMP_NUM_THREADS", "1")


def start() -> None:
    """The console entry point: Ctrl-C ends the command quietly also while its modules are imported."""
    try:
        from roostream.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
