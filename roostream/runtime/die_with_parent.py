"""`python -I -S die_with_parent.py PARENT COMMAND…`: run COMMAND, which gets SIGTERM when process PARENT
ends.

The Linux request (prctl) survives exec, so it works for a JVM as for our programs. It is tied to the thread
that started this process, which must outlive it: the supervisor starts every child from one thread, and the
joiner waits for Flink's client. This file is a script that runs before anything of the project can be
imported.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the request took effect
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error.strerror}")
