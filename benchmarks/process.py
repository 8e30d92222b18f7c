"""Stands in processes of their own: one an environment, all of them fresh in each run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.made import FOLDER
from benchmarks.peers import Place
from benchmarks.stand import Slice
from roostream.errors import RoostreamError

_END_S = 90.0  # a subject may be a whole stack, which stops in its written order


class SubjectError(RoostreamError):
    """A subject could not be opened or timed; its traceback is on stderr."""


class StandProcess:
    """`Stand`'s calls, answered by a process. Close it to end the process."""

    def __init__(self, place: Place, made: str = "") -> None:
        """`made`: the folder for what is the same in every run (benchmarks/made.py); "" = none."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._process = subprocess.Popen(
            [place.python, "-m", "benchmarks.stand"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=place.tree,
            env=environ
            | {
                "PYTHONPATH": str(place.tree),
                "OMP_NUM_THREADS": "1",
                "PATH": _path(place.python),
                FOLDER: made,
            },
        )

    def open(self, opens: str, arguments: list[Any], slice_s: float) -> int:
        return self._call("open", opens, arguments, slice_s)

    def slice(self, number: int) -> Slice:
        return Slice(*self._call("slice", number))

    def keep(self, opens: str) -> None:
        self._call("keep", opens)

    def versions(self) -> dict[str, str]:
        return self._call("versions")

    def close(self) -> None:
        """Close the subjects; the process stays."""
        self._call("close")

    def end(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin and self._process.stdout
        with self._process:
            self._process.stdin.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _call(self, call: str, *arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SubjectError(f"the process that times subjects ended in {call}; its last words are above")
        answer = json.loads(line)
        if "error" in answer:
            raise SubjectError(answer["error"])
        return answer["value"]


def _path(python: str) -> str:
    return f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
