"""`roostream status`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console

from infra.home import Home
from roostream.cli import control
from roostream.cli import status_table as table
from roostream.cli.status import Watcher

_BETWEEN_LOOKS_S = 1.0


def run(home: Path, as_json: bool) -> int:
    """Print what the stack of `home` does; 0, or 1 if a program is not ready.

    Raises:
        SetupError: no stack runs there.
    """
    stack = Home(home).running_stack()
    watcher = Watcher(stack)
    try:
        watcher.look(stack["programs"])
        time.sleep(_BETWEEN_LOOKS_S)  # rates are between two looks
        status = watcher.look(stack["programs"])
    finally:
        watcher.close()
    if as_json:
        print(json.dumps({"home": stack["home"], **status}, indent=2))
    else:
        Console().print(table.render(status, f"Roostream in {stack['home']}", control.about(stack)))
    return 0 if all(p["state"] in ("ready", "ended") for p in stack["programs"].values()) else 1
