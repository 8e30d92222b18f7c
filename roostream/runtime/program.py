"""Start and end of every program: logging, signals, exit codes."""

from __future__ import annotations

import _thread
import atexit
import dataclasses
import datetime
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NoReturn

from roostream.errors import (
    EXHAUSTED,
    ConfigError,
    HeldError,
    RoostreamError,
    UnavailableError,
    describe_os_error,
    mask_secrets,
    nearest,
    with_advice,
)
from roostream.runtime.thread_group import still_running

log = logging.getLogger("roostream")

STOP_S = 20.0
"""A program ends within this time after SIGTERM, even if its peers are away. Supervisors wait a little
longer."""


REFUSED_CODE = 2
"""Exit code for wrong settings: a restart does not help; the last log line says what to change."""

AWAY_CODE = 69
"""Exit code if a restart may help: a peer is away, or another program has taken over."""

HELD_CODE = 75
"""Exit code while training is on hold: do not restart before the hold is over."""


MAX_OPEN_FILES = 65536
"""As in the systemd units."""

_DEFECT = "%s failed: this is a defect of Roostream, not of your settings"


class Stop(threading.Event):
    """Set on SIGTERM or SIGINT; programs wait for it and shut down in their own order."""


LogFormat = Literal["text", "json"]


@dataclasses.dataclass(frozen=True, slots=True)
class CallContext:
    """Identifies a call in log lines: a call id, and the ids of its distributed trace (W3C Trace Context), if
    there is one."""

    call_id: str
    trace_id: str = ""  # 32 hexadecimal digits
    span_id: str = ""  # 16 hexadecimal digits: the caller's span
    traceparent: str = ""  # of the span that is open here, if it is sampled

    def fields(self) -> dict[str, str]:
        """The fields that are not empty, for log lines."""
        named = {"call_id": self.call_id, "trace_id": self.trace_id, "span_id": self.span_id}
        return {name: value for name, value in named.items() if value}


CURRENT_CALL: ContextVar[CallContext | None] = ContextVar("CURRENT_CALL", default=None)
"""Set by servers while they process a call; log lines of that context contain its ids."""


class MaskingFormatter(logging.Formatter):
    """Masks passwords of URLs in log lines and tracebacks, including those of libraries."""

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
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, `error` (a traceback), and the
    call's ids."""

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
    """Make cycle collections rare. Programs keep many small objects and create few cycles. With Python's
    defaults, collections of older generations traverse all of them, which caused half of the join's cache
    misses (docs/decisions/0012)."""
    gc.set_threshold(50_000, 20, 100)


def raise_open_files_limit() -> None:
    """Let this process open as many files as the machine allows it, at most MAX_OPEN_FILES. The usual limit,
    1024, is less than the connections that serving accepts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def setup_logging(form: LogFormat) -> None:
    """Log to standard error, at the level of the environment variable ROOSTREAM_LOG. Raises ConfigError for
    an unknown level, after setting INFO."""
    level = (os.environ.get("ROOSTREAM_LOG") or "INFO").upper()
    known = logging.getLevelNamesMapping()
    handler = logging.StreamHandler(sys.stderr)
    # TorchRec's fbgemm_gpu logs a line for each of its 15 libraries.
    handler.addFilter(lambda line: line.levelno > logging.INFO or "/fbgemm_gpu/" not in line.pathname)
    handler.setFormatter(JsonFormatter() if form == "json" else MaskingFormatter(_LINE, "%H:%M:%S"))
    logging.basicConfig(level=level if level in known else "INFO", handlers=[handler], force=True)
    for chatty in ("httpx2", "matplotlib"):  # they log one line a request, one line a figure
        logging.getLogger(chatty).setLevel(logging.WARNING)
    check_log_level(level)


def check_log_level(level: str) -> None:
    """Raise ConfigError if `level` is no level of a log; "" is the default."""
    known = logging.getLevelNamesMapping()
    if level and level.upper() not in known:
        raise ConfigError(
            f"environment ROOSTREAM_LOG: expected one of {', '.join(known)}, got "
            f"{level!r}{nearest(level.upper(), known) or '; unset it'}"
        )


_has_logged_compilation = threading.Event()


def log_kernel_compilation() -> None:
    """Log one line before the first kernel that is compiled at run time; otherwise the program seems to hang
    for a minute. Call it after the imports of a program."""
    if "numba" not in sys.modules:
        return
    from numba.core import event

    class Once(event.Listener):  # type: ignore[misc]
        def on_start(self, event: object) -> None:
            if not _has_logged_compilation.is_set():
                _has_logged_compilation.set()
                log.info("compiling kernels once; they are cached for the next start")

        def on_end(self, event: object) -> None:
            """Nothing to log."""

    event.register("numba:compile", Once())


def set_on_signals(
    stop: threading.Event, numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
) -> None:
    """Set `stop` when one of these signals arrives. Call it in the main thread.

    A handler interrupts the main thread anywhere, also inside a method of `stop`, which then holds the
    event's lock. The handler would wait for it forever, so another thread sets the event.
    """
    for number in numbers:
        signal.signal(number, lambda *_: _thread.start_new_thread(stop.set, ()))


def run(
    name: str, body: Callable[[Stop], None], log_format: LogFormat = "text", *, is_command: bool = False
) -> int:
    """Run `body` until it returns or raises. Returns the exit code:

    0: done, or stopped by a signal, also while waiting for a peer. 2: wrong settings (ConfigError). 69:
    another RoostreamError, or no space or file descriptor was left, logged in one line; a supervisor restarts
    the program. 75: training is on hold; a restart does not help. 1: a defect of Roostream, with its
    traceback in the log.

    `is_command`: a person has typed `roostream NAME`. Then an error is a line on standard error, and its code
    is 2, or 75 for a hold. A command that was stopped before its end returns 1.
    """
    faulthandler.enable()
    tune_garbage_collector()
    raise_open_files_limit()
    stop = Stop()
    if threading.current_thread() is threading.main_thread():
        set_on_signals(stop)
    try:
        setup_logging(log_format)
        log_kernel_compilation()
        body(stop)
    except RoostreamError as error:
        if stop.is_set() and isinstance(error, UnavailableError):
            log.info("%s stopped: %s", name, error)
            return 1 if is_command else 0
        if is_command:
            help = f"`roostream {name} --help` describes the command"
            print(f"error: {with_advice(error, help)}", file=sys.stderr, flush=True)
            return HELD_CODE if isinstance(error, HeldError) else REFUSED_CODE
        if isinstance(error, ConfigError):
            help = f"`roostream {name.split()[0]} --show-config` lists the settings"
            log.error("%s: %s", name, with_advice(error, help))
        else:
            log.error("%s: %s", name, error)
        return _exit_code(error)
    except OSError as error:
        text = describe_os_error(error) if is_command or error.errno in EXHAUSTED else ""
        if not text:
            log.exception(_DEFECT, name)
            return 1
        if not is_command:
            log.error("%s: %s", name, text)
            return AWAY_CODE
        print(f"error: {text}", file=sys.stderr, flush=True)
        return REFUSED_CODE
    except Exception:
        log.exception(_DEFECT, name)
        return 1
    if not is_command:
        log.info("%s stopped", name)
    return 0


def _exit_code(error: RoostreamError) -> int:
    if isinstance(error, HeldError):
        return HELD_CODE
    return REFUSED_CODE if isinstance(error, ConfigError) else AWAY_CODE


def leave(code: int) -> NoReturn:
    """End the process with an exit code, without finalizing the interpreter while threads may still use it.

    Finalizing could cause a segmentation fault and another exit code. Such threads are those of the Kafka
    client, and our own that wait inside a library for a peer that is away; in the second case exit handlers,
    which may wait too, are skipped.
    """
    if still_running() or "confluent_kafka" in sys.modules:
        if not still_running():
            # Waits for executors and threads, as multiprocessing does. Neither has a public name.
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
            atexit._run_exitfuncs()  # noqa: SLF001
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
