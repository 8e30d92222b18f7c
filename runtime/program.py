"""What starts and ends every program: logging, signals, and errors told in one line."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from roo.errors import ConfigError, HeldError, RoostreamError, UnavailableError, nearest, shown

log = logging.getLogger("roostream")

STOP_S = 20.0
"""Within this a program of ours has ended after SIGTERM, whoever of its peers is away; whoever stops it waits a little longer."""


HELD_CODE = 75
"""What a program ends with that is not to be started again before the hold of training is over."""


class Stop(threading.Event):
    """Set on SIGTERM or SIGINT; programs wait on it and end in their own order."""


class MaskingFormatter(logging.Formatter):
    """Lines without a password that came in an address, whoever wrote them; tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def collect_rarely() -> None:
    """How programs run Python's collector of cycles. They remember many small objects and make few cycles: at the default a
    young collection comes every 700 objects, and the older ones walk over all that is remembered, which is what a processor's
    cache then holds (half of the cache misses of a long stream in the join, docs/decisions/0012)."""
    gc.set_threshold(50_000, 20, 100)


def setup_logging(level: str = "") -> None:
    """Raises ConfigError for a level that there isn't, and logs at INFO then."""
    level = (level or os.environ.get("ROOSTREAM_LOG") or "INFO").upper()
    known = logging.getLevelNamesMapping()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname).1s %(name)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level if level in known else "INFO", handlers=[handler], force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line a request
    if level not in known:
        raise ConfigError(f"environment ROOSTREAM_LOG: expected one of {', '.join(known)}, got {level!r}{nearest(level, known)}")


def _say_when_kernels_compile() -> None:
    """One line before the first kernel that no set-up has compiled; without it a program seems to hang for a minute."""
    if "numba" not in sys.modules:
        return
    from numba.core import event

    class Once(event.Listener):  # type: ignore[misc]
        told = False

        def on_start(self, event: object) -> None:
            if not self.told:
                self.told = True
                log.info("compiling kernels, once: they are kept for the next start")

        def on_end(self, event: object) -> None:
            """Nothing is to be said."""

    event.register("numba:compile", Once())


def run(name: str, body: Callable[[Stop], None]) -> int:
    """Run `body` until it returns or raises; its exit code.

    0 done or stopped by a signal, also while waiting for a peer · 2 a RoostreamError, told in one line · 75 held: no restart
    helps, whoever supervises lets it rest · 1 a defect of ours, with its traceback in the log.
    """
    faulthandler.enable()
    collect_rarely()
    stop = Stop()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    try:
        setup_logging()
        _say_when_kernels_compile()
        body(stop)
    except RoostreamError as error:
        if stop.is_set() and isinstance(error, UnavailableError):
            log.info("%s stopped: %s", name, error)
            return 0
        log.error("%s: %s", name, error)
        return HELD_CODE if isinstance(error, HeldError) else 2
    except Exception:
        log.exception("%s failed: this is a defect of Roostream, not of your settings", name)
        return 1
    log.info("%s stopped", name)
    return 0
