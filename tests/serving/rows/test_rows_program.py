"""The program that keeps rows for several processes, with Kafka and the shards away."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from serving_cases import SCHEMA

from param_server.replica.shared_files import SharedFolder
from param_server.replica.shared_reader import SharedReader
from roostream.errors import SetupError
from roostream.runtime.clock import SystemClock
from roostream.schema.registry import to_toml
from serving.rows.config import RowsConfig
from serving.rows.main import keep_rows

ROOT = Path(__file__).parents[3]


def config_of(place: Path) -> RowsConfig:
    (place / "schema.toml").write_text(to_toml(SCHEMA))
    return RowsConfig(
        bootstrap="127.0.0.1:1",
        schema=str(place / "schema.toml"),
        shards=("127.0.0.1:1",),
        rows_home=str(place / "rows"),
    )


def test_it_waits_for_its_peers_stops_when_told_and_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    for _ in range(2):
        folder, stop = SharedFolder(tmp_path / "rows", SCHEMA, 0), threading.Event()
        before = folder.newest_generation()
        thread = threading.Thread(target=keep_rows, args=(config_of(tmp_path), stop))
        thread.start()
        try:
            while thread.is_alive() and folder.newest_generation() == before:  # it made none yet
                stop.wait(0.01)
            reader = SharedReader(folder, SCHEMA, 0, SystemClock())
            reader.look()
            assert not reader.ready and reader.age_s() is None, "nothing is complete yet"
            with pytest.raises(SetupError, match="is written by another program"):
                keep_rows(config_of(tmp_path), stopped)
        finally:
            stop.set()
            thread.join(20)
        assert not thread.is_alive()


def test_it_does_without_torch() -> None:
    code = "import sys, serving.rows.main; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
