"""`roostream keys new | list | rotate | revoke`: manage the file of bearer keys that serving reads
(serving/access)."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

from roostream.cli.options import CommandGroup, Duration, NonEmptyPath
from roostream.errors import ConfigError, nearest
from serving.access.bearer_keys import BearerKey, new_key, read_keys, write_keys

_LOCK_S = 10.0

file_option = click.option(
    "--file",
    type=NonEmptyPath(path_type=Path),
    default="keys.json",
    show_default=True,
    help="the file named by serving's keys_file",
)
expires_option = click.option(
    "--expires",
    "expires_ms",
    type=Duration(min_ms=1000),
    help="lifetime from now, such as 90d; default: unlimited",
)


@click.group(cls=CommandGroup)
def keys() -> None:
    """Manage bearer keys of serving. A running serving process reads a changed file within two seconds.

    \b
    Example:
      roostream keys new web --scope rank --scope engage --expires 90d
    """


@keys.command("new")
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, required=True, help="rank, engage, metrics or admin; may be repeated"
)
@expires_option
@file_option
def keys_new(name: str, scopes: tuple[str, ...], expires_ms: int | None, file: Path) -> None:
    """Create a key and print it. The file keeps only its hash.

    \b
    Example:
      roostream keys new scraper --scope metrics --file /etc/roostream/keys.json
    """
    now_s = int(time.time())
    text, key = new_key(name, scopes, now_s, now_s + expires_ms // 1000 if expires_ms else 0)
    with _locked(file):
        write_keys(file, [*(read_keys(file) if file.exists() else ()), key])
    click.echo(text)
    click.echo(f"{_line(key)}\nin {file}; the key cannot be shown again", err=True)


@keys.command("list")
@file_option
def keys_list(file: Path) -> None:
    """List the keys.

    \b
    Example:
      roostream keys list
    """
    for key in read_keys(file):
        click.echo(_line(key))


@keys.command("rotate")
@click.argument("name")
@click.option(
    "--overlap",
    "overlap_ms",
    type=Duration(min_ms=0),
    default="1d",
    show_default=True,
    help="how long the old keys remain valid",
)
@click.option(
    "--expires",
    "expires_ms",
    type=Duration(min_ms=1000),
    help="lifetime from now, such as 90d; default: that of the newest old key",
)
@file_option
def keys_rotate(name: str, overlap_ms: int, expires_ms: int | None, file: Path) -> None:
    """Create a key with the name, scopes and lifetime of the old keys, and let these expire.

    \b
    Example:
      roostream keys rotate web --overlap 7d
    """
    now_s = int(time.time())
    end_s = now_s + overlap_ms // 1000
    with _locked(file):
        keys = read_keys(file)
        old = _named(keys, name)
        valid = [key for key in old if not 0 < key.expires_s <= now_s] or old[-1:]
        scopes = dict.fromkeys(scope for key in valid for scope in key.scopes)
        newest = valid[-1]  # the file has them in order
        lifetime_s = expires_ms // 1000 if expires_ms else newest.expires_s - newest.created_s
        text, key = new_key(newest.name, scopes, now_s, now_s + lifetime_s if lifetime_s > 0 else 0)
        aged = [
            dataclasses.replace(one, expires_s=min(one.expires_s or end_s, end_s)) if one in old else one
            for one in keys
        ]
        write_keys(file, [*aged, key])
    click.echo(text)
    click.echo(f"{_line(key)}\nthe old keys expire {_day(end_s)}", err=True)


@keys.command("revoke")
@click.argument("name")
@file_option
def keys_revoke(name: str, file: Path) -> None:
    """Remove all keys with a name, or the key with an id.

    \b
    Example:
      roostream keys revoke web
    """
    with _locked(file):
        keys = read_keys(file)
        gone = _named(keys, name)
        write_keys(file, [key for key in keys if key not in gone])
    click.echo(f"revoked: {', '.join(sorted(key.id for key in gone))}")


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock from reading the file until it is replaced, so that no change of another command is lost.
    The lock is that of the folder, because the file itself is replaced.

    Raises:
        ConfigError: there is no folder, or another command has held the lock for _LOCK_S.
    """
    folder = Path(os.path.realpath(file)).parent
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a file in an existing folder ({error.strerror}); check --file"
        ) from None
    try:
        ends_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_s:
                    raise ConfigError(
                        f"{folder}: another command has changed the keys for {_LOCK_S:.0f} s; end it"
                    ) from None
                time.sleep(0.05)
            except OSError:  # this file system has no locks
                break
        yield
    finally:
        os.close(handle)


def _named(keys: tuple[BearerKey, ...], name: str) -> list[BearerKey]:
    found = [key for key in keys if name in (key.name, key.id)]
    if not found:
        raise ConfigError(
            f"expected the name or id of a key, got {name!r}{nearest(name, {key.name for key in keys})}"
        )
    return found


def _line(key: BearerKey) -> str:
    ends = f"expires {_day(key.expires_s)}" if key.expires_s else "never expires"
    return f"{key.id}  {key.name}  {','.join(key.scopes)}  created {_day(key.created_s)}  {ends}"


def _day(time_s: int) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
