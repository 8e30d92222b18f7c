"""What starts and ends every program: logging, signals, and errors told in one line."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, NoReturn

from roostream.errors import ConfigError, HeldError, RoostreamError, UnavailableError, mask_secrets, nearest
from roostream.runtime.thread_group import still_running

log = logging.getLogger("roostream")

STOP_S = 20.0
"""Within this a program of ours has ended after SIGTERM, whoever of its peers is away; whoever stops it waits a little longer."""


REFUSED_CODE = 2
"""What a program ends with whose settings, or what they name, can't be: no start mends that, its last line says what does."""

AWAY_CODE = 69
"""What a program ends with that may do better at its next start: who or what it needs is away, or another one has its place."""

HELD_CODE = 75
"""What a program ends with that is not to be started again before the hold of training is over."""


class Stop(threading.Event):
    """Set on SIGTERM or SIGINT; programs wait on it and end in their own order."""


LogFormat = Literal["text", "json"]


@dataclasses.dataclass(frozen=True, slots=True)
class CallContext:
    """What a call is called: by its client or by us, and by a distributed trace (W3C Trace Context), where it is in one."""

    call_id: str
    trace_id: str = ""  # 32 hexadecimal digits
    span_id: str = ""  # 16, the caller's
    traceparent: str = (
        ""  # of the span that is open here, where it is sampled: what is logged of the call carries it
    )

    def fields(self) -> dict[str, str]:
        """Those that there are."""
        named = {"call_id": self.call_id, "trace_id": self.trace_id, "span_id": self.span_id}
        return {name: value for name, value in named.items() if value}


CURRENT_CALL: ContextVar[CallContext | None] = ContextVar("CURRENT_CALL", default=None)
"""Set while a call is worked on, by whoever serves it; every line that is logged meanwhile in that context names it."""


class MaskingFormatter(logging.Formatter):
    """Lines without a password that came in an address, whoever wrote them; tracebacks too."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        call = CURRENT_CALL.get()
        line = super().formatMessage(record)
        return (
            line
            if call is None
            else f"{line} [{' '.join(f'{name}={value}' for name, value in call.fields().items())}]"
        )

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(super().format(record))


class JsonFormatter(MaskingFormatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, `error` (a traceback), and the call's names."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
        }
        line["message"] = mask_secrets(record.getMessage())
        if record.exc_info:
            line["error"] = mask_secrets(self.formatException(record.exc_info))
        call = CURRENT_CALL.get()
        return json.dumps(line if call is None else line | call.fields(), ensure_ascii=False)


_LINE = "%(asctime)s %(levelname).1s %(name)s %(message)s"


def tune_garbage_collector() -> None:
    """How programs run Python's collector of cycles. They remember many small objects and make few cycles: at the default a
    young collection comes every 700 objects, and the older ones walk over all that is remembered, which is what a processor's
    cache then holds (half of the cache misses of a long stream in the join, docs/decisions/0012)."""
    gc.set_threshold(50_000, 20, 100)


def setup_logging(form: LogFormat = "text", level: str = "") -> None:
    """Raises ConfigError for a level that there isn't, and logs at INFO then."""
    level = (level or os.environ.get("ROOSTREAM_LOG") or "INFO").upper()
    known = logging.getLevelNamesMapping()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else MaskingFormatter(_LINE, "%H:%M:%S"))
    logging.basicConfig(level=level if level in known else "INFO", handlers=[handler], force=True)
    for chatty in ("httpx2", "matplotlib"):  # a line a request; a line a figure
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if level not in known:
        raise ConfigError(
            f"environment ROOSTREAM_LOG: expected one of {', '.join(known)}, got {level!r}{nearest(level, known)}"
        )


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


def run(name: str, body: Callable[[Stop], None], log_format: LogFormat = "text") -> int:
    """Run `body` until it returns or raises; its exit code.

    0 done or stopped by a signal, also while waiting for a peer · 2 refused (ConfigError) and 69 another RoostreamError, told in
    one line; a supervisor tries again what ended with 69 · 75 held: no restart helps, whoever supervises lets it rest · 1 a
    defect of ours, with its traceback in the log.
    """
    faulthandler.enable()
    tune_garbage_collector()
    stop = Stop()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    try:
        setup_logging(log_format)
        _say_when_kernels_compile()
        body(stop)
    except RoostreamError as error:
        if stop.is_set() and isinstance(error, UnavailableError):
            log.info("%s stopped: %s", name, error)
            return 0
        log.error("%s: %s", name, error)
        return _code_of(error)
    except Exception:
        log.exception("%s failed: this is a defect of Roostream, not of your settings", name)
        return 1
    log.info("%s stopped", name)
    return 0


def _code_of(error: RoostreamError) -> int:
    if isinstance(error, HeldError):
        return HELD_CODE
    return REFUSED_CODE if isinstance(error, ConfigError) else AWAY_CODE


def command_exit_code(code: int) -> int:
    """That of a command, of what `run` gave: nobody starts a command again, so whatever it couldn't do is 2."""
    return REFUSED_CODE if code == AWAY_CODE else code


def leave(code: int) -> NoReturn:
    """End the process with a program's exit code, without taking the interpreter apart beneath threads that may still call it:
    that would be a segmentation fault, and another code. Such are a thread of ours that waits inside a library for a peer that is
    away (then what was registered for the end, which may wait for it too, is left out), and the Kafka client's own."""
    if still_running() or "confluent_kafka" in sys.modules:
        if not still_running():
            threading._shutdown()  # type: ignore[attr-defined]  # waits for executors and threads, as a process of multiprocessing does
            atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
