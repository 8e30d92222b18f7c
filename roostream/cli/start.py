"""The console entry point. It imports nothing else before it runs, so that Ctrl-C also ends a command quietly
while its modules are imported."""

from __future__ import annotations

import sys


def start() -> None:
    try:
        from roostream.cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
