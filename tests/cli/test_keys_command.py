"""`roostream keys`: its output, and the key file that it writes."""

from __future__ import annotations

import dataclasses
import stat
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from roostream.cli import keys_command
from roostream.cli.main import cli
from roostream.errors import ConfigError
from serving.access.bearer_keys import Keyring, read_keys, write_keys


def keys(*arguments: str, file: Path) -> Result:
    result = CliRunner().invoke(cli, ["keys", *arguments, "--file", str(file)])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_a_new_key_is_shown_once_and_has_its_scopes(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    text = keys(
        "new", "web", "--scope", "rank", "--scope", "engage", "--expires", "90d", file=file
    ).stdout.strip()
    key = Keyring(file).check(b"Bearer " + text.encode(), "engage")
    assert key.name == "web" and 89 * 86400 < key.expires_s - time.time() <= 90 * 86400
    listed = keys("list", file=file).output
    assert text not in listed and f"{key.id}  web  rank,engage  created " in listed


def test_a_change_keeps_the_mode_and_the_link_of_the_file(tmp_path: Path) -> None:
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    keys("new", "web", "--scope", "rank", file=file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)  # serving reads the file under another account
    link.symlink_to(file)
    keys("new", "app", "--scope", "rank", file=link)
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [key.name for key in read_keys(file)] == ["web", "app"]


@pytest.mark.parametrize("expires", ["-1d", "0s", "999999999999d", "1" + "0" * 400 + "d"])
def test_a_key_does_not_expire_before_it_is_used_or_beyond_the_calendar(expires: str, tmp_path: Path) -> None:
    arguments = ["keys", "new", "web", "--scope", "rank", f"--expires={expires}"]
    result = CliRunner().invoke(cli, [*arguments, "--file", str(tmp_path / "keys.json")])
    assert result.exit_code == 2 and "--expires" in result.output
    assert not (tmp_path / "keys.json").exists()


def test_rotation_lets_old_and_new_work_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    old = b"Bearer " + keys("new", "web", "--scope", "rank", file=file).stdout.strip().encode()
    new = b"Bearer " + keys("rotate", "web", "--overlap", "1h", file=file).stdout.strip().encode()
    ring = Keyring(file)
    assert ring.check(old, "rank").name == ring.check(new, "rank").name == "web"
    assert [bool(key.expires_s) for key in read_keys(file)] == [True, False]
    soon = read_keys(file)[0].expires_s
    keys("rotate", "web", "--overlap", "9d", file=file)
    assert read_keys(file)[0].expires_s == soon, "an earlier expiry is not extended"


def test_rotation_gives_back_no_scope_of_an_expired_key_and_keeps_the_lifetime(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys("new", "web", "--scope", "admin", "--expires", "90d", file=file)
    expired = [dataclasses.replace(key, expires_s=key.created_s) for key in read_keys(file)]
    write_keys(file, expired)
    keys("new", "web", "--scope", "rank", "--expires", "90d", file=file)
    keys("rotate", "web", file=file)
    newest = read_keys(file)[-1]
    assert newest.scopes == ("rank",) and newest.expires_s - newest.created_s == 90 * 86400
    write_keys(file, expired)
    keys("rotate", "web", "--expires", "1d", file=file)
    newest = read_keys(file)[-1]
    assert newest.scopes == ("admin",), "an expired key that is rotated by itself"
    assert newest.expires_s - newest.created_s == 86400


def test_rotation_keeps_the_lifetime_of_the_key_made_last_although_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.json"
    keys("new", "web", "--scope", "rank", file=file)
    keys("rotate", "web", "--overlap", "1h", file=file)
    old, new = read_keys(file)
    write_keys(file, [old, dataclasses.replace(new, created_s=old.created_s - 60)])
    keys("rotate", "web", file=file)
    assert read_keys(file)[-1].expires_s == 0, "that of the old key ends with the overlap"


def test_a_key_is_revoked_by_name_or_id(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for name in ("web", "web", "scraper"):
        keys("new", name, "--scope", "metrics", file=file)
    first, *_ = read_keys(file)
    keys("revoke", first.id, file=file)
    assert [key.name for key in read_keys(file)] == ["web", "scraper"]
    keys("revoke", "web", file=file)
    assert [key.name for key in read_keys(file)] == ["scraper"]
    with pytest.raises(ConfigError, match="did you mean 'scraper'"):
        keys("revoke", "scrape", file=file)


def test_commands_at_the_same_time_lose_no_key_and_undo_no_revocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.json"
    keys("new", "stolen", "--scope", "admin", file=file)

    def write_slowly(*arguments: Any) -> None:
        time.sleep(0.2)  # the other commands read meanwhile, if they may
        write_keys(*arguments)

    monkeypatch.setattr(keys_command, "write_keys", write_slowly)
    new, revoke = keys_command.keys_new.callback, keys_command.keys_revoke.callback
    assert new is not None and revoke is not None
    calls = [partial(new, name, ("rank",), None, file) for name in ("a", "b", "c")]
    threads = [threading.Thread(target=call) for call in (*calls, partial(revoke, "stolen", file))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in read_keys(file)) == ["a", "b", "c"]


@pytest.mark.parametrize("time_s", [-1, 10**18])
def test_times_beyond_the_calendar_are_no_keys(time_s: int, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys("new", "web", "--scope", "rank", file=file)
    (key,) = read_keys(file)
    write_keys(file, [dataclasses.replace(key, created_s=time_s)])
    with pytest.raises(ConfigError, match="created_s"):
        keys("list", file=file)


def test_a_damaged_file_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="expected the JSON"):
        keys("new", "web", "--scope", "rank", file=file)
    assert file.read_text() == "{"
    with pytest.raises(ConfigError, match="make one with"):
        keys("list", file=tmp_path / "none.json")
