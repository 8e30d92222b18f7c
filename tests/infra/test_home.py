from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner

from infra.home import Home
from infra.stack import Stack
from roostream.cli.stack_commands import down, reset
from roostream.errors import SetupError


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.make()
    yield home
    home.unlock()


def test_two_supervisors_do_not_share_a_home(home: Home) -> None:
    home.lock()
    with pytest.raises(SetupError, match="already runs"):
        Home(home.root).lock()
    assert Home(home.root).is_locked()
    home.unlock()
    assert not Home(home.root).is_locked()


def test_a_damaged_stack_file_counts_as_missing(home: Home) -> None:
    assert home.read_stack() is None
    home.stack_json.write_text("{")
    assert home.read_stack() is None
    home.stack_json.write_text(json.dumps({"format": 99}))
    assert home.read_stack() is None
    home.write_stack({"programs": {}})
    assert home.read_stack() == {"format": 1, "programs": {}}


@pytest.mark.parametrize("make", [True, False])
def test_a_missing_stack_is_reported(tmp_path: Path, make: bool) -> None:
    home = Home(tmp_path / "other")
    if make:
        home.make()
    with pytest.raises(SetupError, match="roostream up"):
        home.running_stack()


def test_a_process_with_the_reused_pid_of_a_supervisor_is_left_alone(home: Home) -> None:
    other = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(60)"))
    try:
        home.write_stack({"programs": {}, "supervisor_pid": other.pid})
        home.lock()  # as `audit` of a stopped stack does, or a new stack before its programs start
        result = CliRunner().invoke(down, ["--home", str(home.root)])
        assert isinstance(result.exception, SetupError) and "no stack runs there" in str(result.exception)
        assert other.poll() is None
        home.write_stack({"programs": {}, "supervisor_pid": os.getpid()})
        assert Home(home.root).running_stack()["supervisor_pid"] == os.getpid()
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("name", ["a:b", "a,b", 'a"b', "a\\b", "a\nb", "a|b", "${x}", "\udcff"])
def test_a_path_that_a_program_would_misread_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="choose another --home"):
        Stack(tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_messages_quote_the_home_for_a_shell(tmp_path: Path) -> None:
    home = Home(tmp_path / "it's a home")
    with pytest.raises(SetupError) as error:
        home.running_stack()
    command = str(error.value).split("`")[1]
    assert shlex.split(command) == ["roostream", "up", "--home", str(home.root)]


def test_a_home_behind_a_loop_of_links_is_missing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SetupError, match="does not exist"):
        Home(tmp_path / "loop" / "home").running_stack()


def test_only_leftover_processes_of_this_home_are_stopped(home: Home) -> None:
    sleep = "import time; time.sleep(60)"
    ours = subprocess.Popen((sys.executable, "-c", sleep, f"{home.root}/conf/x.toml"))
    others = subprocess.Popen((sys.executable, "-c", sleep))
    try:
        home.write_stack({"programs": {"a": {"pid": ours.pid}, "b": {"pid": others.pid}, "c": {"pid": None}}})
        assert home.end_leftovers(timeout_s=5.0) == [ours.pid]
        assert ours.wait(5) != 0
        assert others.poll() is None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


def test_only_a_home_folder_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    result = CliRunner().invoke(reset, ["--home", str(tmp_path), "--yes"])
    assert isinstance(result.exception, SetupError) and "home" in str(result.exception)
    assert (tmp_path / "precious").exists()


def test_an_interrupted_reset_can_be_repeated(home: Home) -> None:
    home.write_stack({"programs": {}})
    (home.root / "shard-1" / "segments").mkdir(parents=True)
    (home.root / "warehouse").symlink_to(home.root.parent)
    home.run.rmdir()
    assert CliRunner().invoke(reset, ["--home", str(home.root), "--yes"]).exit_code == 0
    assert not home.root.exists() and home.root.parent.exists()


def test_a_home_that_is_a_mount_point_can_be_reset(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_stack({"programs": {}})
    rmdir = Path.rmdir

    def refuse(path: Path) -> None:
        if path == home.root:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", refuse)
    assert CliRunner().invoke(reset, ["--home", str(home.root), "--yes"]).exit_code == 0
    assert list(home.root.iterdir()) == []


def test_a_home_with_a_mounted_store_can_be_reset(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_stack({"programs": {}})
    for name in ("store/manifests", "worker"):
        (home.root / name).mkdir(parents=True)
    rmdir = os.rmdir

    def refuse(path: str, **options: Any) -> None:
        if Path(path) == home.store:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == home.store)
    result = CliRunner().invoke(reset, ["--home", str(home.root), "--yes"])
    assert result.exception is None and result.output == f"deleted {home.root}\n"
    assert list(home.root.iterdir()) == [home.store] and list(home.store.iterdir()) == []


def test_files_that_no_stack_has_written_are_kept(home: Home) -> None:
    home.write_stack({"programs": {}})
    programs = ("shard-0", "worker", "worker-1", "serving-1", "joiner", "auditor", "archiver")
    for name in (*programs, "kafka", "redis", "flink", "warehouse", "store"):
        (home.root / name / "data").mkdir(parents=True)
    own = ("log.jsonl", "schema.toml", "model.toml", "shards", "worker.py", "serving-one")
    for name in own:
        (home.root / name).write_text("of the user")
    result = CliRunner().invoke(reset, ["--home", str(home.root), "--yes"])
    assert result.exit_code == 0 and "log.jsonl" in result.output
    assert sorted(path.name for path in home.root.iterdir()) == sorted(own)


def test_a_full_disk_can_be_cleared(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_stack({"programs": {}})

    def write(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    result = CliRunner().invoke(reset, ["--home", str(home.root), "--yes"])
    assert result.exception is None and not home.root.exists()


def test_a_running_home_is_not_deleted(home: Home) -> None:
    home.write_stack({"programs": {}})
    home.lock()
    command = ["--home", str(home.root), "--yes"]
    result = CliRunner().invoke(reset, command)
    assert isinstance(result.exception, SetupError) and "already runs" in str(result.exception)
    home.unlock()
    assert CliRunner().invoke(reset, command).exit_code == 0
    assert not home.root.exists()
    assert CliRunner().invoke(reset, command).exit_code == 0


def test_a_status_at_the_same_moment_does_not_keep_a_stack_from_starting(home: Home) -> None:
    (home.run / "lock").touch()
    with (home.run / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `is_locked` does, for longer
        threading.Timer(0.02, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        home.lock()
    assert Home(home.root).is_locked()
    home.unlock()


def test_a_stack_that_waited_for_the_end_of_a_reset_has_the_lock_that_others_see(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_stack({"programs": {}})
    flock, has_begun = fcntl.flock, False

    def reset_first(file: IO[str], operation: int) -> None:
        """The file is open, and a reset deletes it before it can be locked."""
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            assert CliRunner().invoke(reset, ["--home", str(home.root), "--yes"]).exit_code == 0
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", reset_first)
    home.lock()
    assert Home(home.root).is_locked()
    with pytest.raises(SetupError, match="already runs"):
        Home(home.root).lock()


def test_a_home_whose_stack_cannot_be_seen_is_not_one_without_a_stack(home: Home) -> None:
    assert home.read_stack() is None
    home.stack_json.mkdir()  # as for an account that may not read it
    for call in (home.read_stack, home.running_stack, home.end_leftovers):
        with pytest.raises(SetupError, match="a stack may run there"):
            call()


def test_a_home_with_an_unreadable_lock_does_not_count_as_free(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert not home.is_locked(), "no stack was ever started there"
    (home.run / "lock").mkdir(parents=True)
    with pytest.raises(SetupError, match="may run there"):
        home.is_locked()


def add_rows(home: Home) -> Path:
    """Create the folder of a shard's rows in the home and return it."""
    rows = home.root / "shard-0" / "segments"
    rows.mkdir(parents=True)
    return rows


def test_the_first_use_of_a_home_creates_its_store(home: Home) -> None:
    assert not home.store.exists()
    identity = home.open_store().verify()
    add_rows(home)
    assert home.open_store().verify() == identity


@pytest.mark.parametrize("has_mount_point", [True, False])
def test_a_home_with_rows_does_not_get_a_new_store(home: Home, has_mount_point: bool) -> None:
    add_rows(home)
    if has_mount_point:
        home.store.mkdir()
    with pytest.raises(SetupError, match="mount its volume"):
        home.open_store()
    assert not home.store.exists() or not any(home.store.iterdir())


def test_the_store_of_a_home_of_an_older_version_gets_an_identity(home: Home) -> None:
    add_rows(home)
    (home.store / "schemas").mkdir(parents=True)
    assert len(home.open_store().verify()) == 32
