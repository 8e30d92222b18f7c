"""Submitting the job with Flink's own client."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import re
import subprocess
import tempfile
import threading
from pathlib import Path

from joiner.config import JoinerConfig
from joiner.entries import VERSION
from roostream.errors import CheckpointError, SetupError, UnavailableError

log = logging.getLogger("roostream.joiner")

# A script's own folder comes first on its path, where joiner/operator.py would hide Python's `operator`.
_SCRIPT = "from joiner.job import main\n\nmain()\n"
_FOREIGN = (
    "Cannot map checkpoint/savepoint state"  # what Flink says of state whose operator the job does not have
)


def submit(config: JoinerConfig, stop: threading.Event) -> str:
    """Start the job, from `config.restore` if that is set; its id. Takes about 15 s.

    Raises:
        SetupError: PyFlink is not installed.
        CheckpointError: `config.restore` is of another version of the joiner's state.
        UnavailableError: Flink's client failed (says with what), or `stop` was set. No job was started, or it is the one
            that `live_job` finds.
    """
    command = [
        str(flink_home() / "bin" / "flink"),
        "run",
        "-d",
        "-m",
        re.sub(r"^https?://", "", config.flink.rstrip("/")),
    ]
    if config.restore:
        command += ["-s", config.restore]
    log.info("submitting the job%s", f" from {config.restore}" if config.restore else "")
    with tempfile.TemporaryDirectory(prefix="roostream-job-") as folder:
        script = Path(folder) / "roostream_joiner.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        settings = Path(folder) / "settings.json"  # a file, since everybody can read a process's arguments
        settings.touch(mode=0o600)
        settings.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
        command += ["-py", str(script), "--settings", str(settings)]
        env = _environment(folder)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        ) as client:
            output = _wait(client, stop)
    found = re.search(r"JobID ([0-9a-f]{32})", output)
    if client.returncode or not found:
        log.debug("flink run printed:\n%s", output)
        if _FOREIGN in output:
            raise CheckpointError(
                f"expected a savepoint with joiner state of version {VERSION}, got {config.restore}, which has another; "
                "go on from it with the build that wrote it, or start without the key 'restore'"
            )
        raise UnavailableError(f"Flink did not take the job: {_why(output)}")
    return found[1]


def flink_home() -> Path:
    """FLINK_HOME, else the Flink inside PyFlink."""
    if home := os.environ.get("FLINK_HOME"):
        return Path(home)
    spec = importlib.util.find_spec("pyflink")
    if spec is None or spec.origin is None:
        raise SetupError("apache-flink is not installed; run `make setup`")
    return Path(spec.origin).parent


def _environment(tmp: str) -> dict[str, str]:
    """The job is built by the `python3` on PATH; it has to find our packages wherever it is started. The client unpacks into
    `tmp`: in a folder that users share, it can't if another user's client was there first."""
    root = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "TMPDIR": tmp,
        "JVM_ARGS": f"{os.environ.get('JVM_ARGS', '')} -Djava.io.tmpdir={tmp}",
    }


def _wait(client: subprocess.Popen[str], stop: threading.Event) -> str:
    while True:
        try:
            return client.communicate(timeout=0.2)[0]
        except subprocess.TimeoutExpired:
            if stop.is_set():
                client.terminate()
                raise UnavailableError("stopped while submitting the job") from None


def _why(output: str) -> str:
    """The most telling lines of what the client printed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    python = [line for line in lines if re.match(r"^(?:\d\S* \w+ +\S+ +)?\w+(?:\.\w+)*Error: ", line)]
    java = [line for line in lines if line.startswith("Caused by")]
    return (python or java or lines or ["no output"])[-1]
