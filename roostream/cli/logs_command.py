"""`roostream logs`: the log files of a stack's programs, also while they grow."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from infra.child_logs import last_lines
from infra.home import Home
from roostream.cli.options import home_option
from roostream.errors import ConfigError, SetupError, nearest, printable

_POLL_S = 0.5


@click.command()
@click.argument("names", nargs=-1, metavar="[PROGRAM]...")
@home_option
@click.option("-f", "--follow", is_flag=True, help="print new lines until Ctrl-C")
@click.option(
    "-n",
    "--lines",
    "count",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="last lines of each log",
)
def logs(names: tuple[str, ...], home: Path, follow: bool, count: int) -> None:
    """Print the last lines of programs' logs, also after the stack has stopped. Without a name: list them.

    PROGRAM is a name as `roostream status` prints it (shard-0), or a kind of program (shard). With several
    logs, each line begins with the name of its program.

    \b
    Example:
      roostream logs
      roostream logs trainer -f
      roostream logs shard joiner -n 100
    """
    place = Home(home)
    folder = place.logs
    try:
        files = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix == ".log"}
    except (FileNotFoundError, NotADirectoryError):
        files = {}
    if not files:
        raise SetupError(
            f"{folder} has no logs; `roostream up {place.option}` starts a stack that writes them"
        )
    if not names:
        for name, path in files.items():
            click.echo(f"{name:20} {path.stat().st_size:>12,} bytes  {path}")
        return
    chosen = _choose(names, list(files))
    tails = [
        LogTail(files[name], f"{name:{max(map(len, chosen))}} | " if len(chosen) > 1 else "")
        for name in chosen
    ]
    for tail in tails:
        tail.path.open("rb").close()  # an error if it cannot be read; else the log would seem to be empty
        for line in tail.last(count):
            click.echo(line)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            time.sleep(_POLL_S)
            for tail in tails:
                for line in tail.new_lines():
                    click.echo(line)


def _choose(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The logs of the named programs and kinds of programs, each once. Raises ConfigError: unknown name."""
    chosen: dict[str, None] = {}
    for name in names:
        found = [log for log in known if log == name or log.rpartition("-")[0] == name]
        if not found:
            raise ConfigError(
                f"expected a program with a log ({', '.join(known)}), got {name!r}{nearest(name, known)}"
            )
        chosen.update(dict.fromkeys(found))
    return list(chosen)


class LogTail:
    """Reads complete lines that are appended to one log file.

    A rotation truncates the file in place (infra/child_logs.py); reading then continues at its beginning. A
    missing file has no new lines until it is there again.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        self._position = 0
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def last(self, count: int) -> Iterator[str]:
        """The last `count` lines; `new_lines` continues at the present end of the file."""
        self._position = self._size()
        for line in last_lines(self.path, count, max_bytes=1 << 20) if count else ():
            yield self.prefix + printable(line)

    def new_lines(self) -> Iterator[str]:
        """The lines that were completed since the last call."""
        size = self._size()
        if size < self._position:
            self._position, self._rest = 0, ""
            self._decoder.reset()
        if size == self._position:
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            yield self.prefix + printable(line)

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0
