"""Every tutorial works as printed: each `console` block is executed and its output compared with the page.

A line that begins with `$ ` is a command, one with `> ` continues it, and the lines below are its output.
Any number matches any other, `…` matches any text, and a line `...` matches any lines.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LIMIT_S = 1500
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MARK = "@@@ "


@dataclasses.dataclass
class Step:
    """A command of a tutorial, and the output lines that the page shows for it."""

    command: str
    expected: list[str]


def parse_steps(page: str) -> list[Step]:
    found: list[Step] = []
    for block in _BLOCK.findall(page):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], []))
            elif line.startswith("> "):
                found[-1].command += "\n" + line[2:]
            else:
                found[-1].expected.append(line)
    return found


def compile_pattern(line: str) -> re.Pattern[str]:
    """Compile `line` to a pattern in which a number matches any number, `…` any text, a space any width."""
    parts = re.split(r"(…|\d[\d,.]*|\s+)", line.strip())
    patterns = {"…": ".*"}
    text = "".join(
        patterns.get(part)
        or (r"\s+" if part.isspace() else r"\d[\d,.]*" if part[:1].isdigit() else re.escape(part))
        for part in parts
        if part
    )
    return re.compile(text)


def first_missing_line(step: Step, output: str) -> str | None:
    """Return the first expected line that is not in the output after the lines before it, or None."""
    lines = iter(output.splitlines())
    for expected in step.expected:
        if expected.strip() == "...":
            continue
        wanted = compile_pattern(expected)
        if not any(wanted.search(line) for line in lines):
            return expected
    return None


@pytest.mark.parametrize(
    ("expected", "printed", "found"),
    [
        (["a 1", "...", "c…"], "a 22\nb\ncc", True),
        (["1,024 rows  in …"], "17 rows in 3 s", True),
        (["b", "a"], "a\nb", False),  # order counts
        (["a (x)"], "a x", False),  # no regular expressions
    ],
)
def test_comparison_ignores_numbers_gaps_and_ellipses(expected: list[str], printed: str, found: bool) -> None:
    assert (first_missing_line(Step("", expected), printed) is None) is found


def test_commands_span_lines_and_have_their_own_output() -> None:
    page = "text\n```console\n$ one '\n> two'\nout\n$ three\n```\n```\n$ not run\n```\n"
    assert parse_steps(page) == [Step("one '\ntwo'", ["out"]), Step("three", [])]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_commands_succeed_and_print_the_documented_output(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    steps = parse_steps(page.read_text(encoding="utf-8"))
    script = "\n".join(
        f"printf '\\n%s\\n' '{_MARK}{number}'\n{step.command}\nprintf '\\n%s\\n' '{_MARK}status '$?"
        for number, step in enumerate(steps)
    )
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    shell = subprocess.Popen(
        ("bash", "-c", script),
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=LIMIT_S)
    finally:
        _stop(shell, tmp_path)
    outputs = re.split(rf"^{_MARK}\d+\n", printed, flags=re.MULTILINE)[1:]
    assert len(outputs) == len(steps), printed[-3000:]
    problems = []
    for step, output in zip(steps, outputs, strict=True):
        text, _, status = output.rpartition(f"{_MARK}status ")
        if status.strip() != "0":
            problems.append(f"$ {step.command}\nexit code {status.strip()}:\n{text}")
        if (line := first_missing_line(step, text)) is not None:
            problems.append(f"$ {step.command}\nexpected {line!r} in:\n{text}")
    assert not problems, "\n\n".join(problems)


def _stop(shell: subprocess.Popen[str], folder: Path) -> None:
    """Stop the stacks that the page started, then every process left in the shell's session."""
    for stack in folder.glob("*/stack.json"):
        command = (shutil.which("roostream") or "roostream", "down", "--home", str(stack.parent))
        subprocess.run(command, capture_output=True, timeout=120, check=False)
    try:
        os.killpg(shell.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    shell.wait(30)
