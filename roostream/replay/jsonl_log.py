"""Dataset `jsonl`: a log with one impression or engagement per line as JSON (docs/bring-your-own-data.md).

Lines may be in any order and are replayed by time. Each file is read twice: first for the times (32 bytes per
line are kept), then in time order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec
import numpy as np

from roostream.replay.datasets import DatasetOptions, EventLog
from roostream.replay.events import Event
from roostream.replay.file_endings import ending_of
from roostream.replay.input_files import check_files, open_file
from roostream.replay.log_lines import (
    UNREADABLE,
    EngagementLine,
    ImpressionLine,
    LogLineReader,
    json_error,
    without_bom,
)
from roostream.replay.parse_time import parse_time_ms
from roostream.schema.schema import Schema
from roostream.schema.settings import setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DatasetOptions):
    """Settings of the dataset."""

    log: tuple[str, ...] = setting(
        help="files with one impression or engagement per line, in any order; also .gz, .zst and pipes"
    )
    skip_bad: bool = setting(False, "skip and count bad lines instead of stopping at the first")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_files("log", self.log, needed=True)
        for path in self.log:
            if ending_of(path) in (".csv", ".tsv", ".parquet"):
                remedy = "give a table of shown items as --impressions, or convert it with `import table`"
                raise setting_error("log", "files of JSON lines", path, remedy)


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`. Engagements have their own times, so `window_ms` is not used."""
    return JsonlLog(options.log, LogLineReader(schema, skip_bad=options.skip_bad)).open()


class _Timed(msgspec.Struct):
    time: int | str
    type: str = ""


_DECODER = msgspec.json.Decoder(ImpressionLine | EngagementLine)
_TIMES = msgspec.json.Decoder(_Timed)


class JsonlLog:
    """Files of JSON lines, converted by `reader`, which also counts skipped lines."""

    def __init__(self, paths: Sequence[str], reader: LogLineReader) -> None:
        self.paths, self.reader = tuple(paths), reader

    def open(self) -> EventLog:
        """Read the times of all lines. Events follow in event time; at equal times impressions come first,
        then file order.

        Raises:
            LogError: a bad line that is not skipped; also while events are read.
            ConfigError: a file cannot be read.
        """
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(open_file(path)) for path in self.paths]
            times, positions = self._scan(files)
            opened.pop_all()
        return EventLog(
            events=self._events(files, times, positions),
            num_requests=int((times % 2 == 0).sum()),
            refuse=lambda event, error: self.reader.refuse(event.where, error),
            skipped=self.reader.skipped,
        )

    def _events(self, files: Sequence[BinaryIO], times: np.ndarray, positions: array[int]) -> Iterator[Event]:
        try:
            for k in np.argsort(times, kind="stable").tolist():
                number, line, offset = positions[3 * k], positions[3 * k + 1], positions[3 * k + 2]
                if files[number].tell() != offset:
                    files[number].seek(offset)
                event = self._event(files[number].readline(), f"{self.paths[number]}:{line}")
                if event is not None:
                    yield event
        finally:
            for file in files:
                file.close()

    def _scan(self, files: Sequence[BinaryIO]) -> tuple[np.ndarray, array[int]]:
        """Sort keys (twice the time in ms, plus 1 for engagements) and (file, line, offset) of every usable
        line."""
        times, positions = array("q"), array("q")
        for number, file in enumerate(files):
            offset = 0
            for line, raw in enumerate(file, 1):
                if raw.strip():
                    key = self._sort_key(raw, f"{self.paths[number]}:{line}")
                    if key is not None:
                        times.append(key)
                        positions.extend((number, line, offset))
                offset += len(raw)
        return np.array(times, dtype=np.int64), positions

    def _sort_key(self, raw: bytes, where: str) -> int | None:
        raw = without_bom(raw)
        try:
            head = _TIMES.decode(raw)
            return 2 * parse_time_ms(head.time) + (head.type != "impression")
        except UNREADABLE as error:
            is_time = type(error) is ValueError
            self.reader.refuse(where, ValueError(f"time: {error}") if is_time else json_error(error, raw))
            return None

    def _event(self, raw: bytes, where: str) -> Event | None:
        raw = without_bom(raw)
        try:
            return self.reader.event(_DECODER.decode(raw), where)
        except UNREADABLE as error:
            self.reader.refuse(where, json_error(error, raw))
            return None
