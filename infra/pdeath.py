"""`python -I -S pdeath.py PARENT COMMAND…`: become COMMAND, ended by SIGTERM when process PARENT ends.

The request (Linux, prctl) outlives exec, so it holds for a JVM as for our programs. It belongs to the thread that started us:
the supervisor starts every child from one thread that outlives them. Runs before anything of ours can be imported.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request was made
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error.strerror}")
