"""`roostream keys new | list | rotate | revoke`: manage the file of bearer keys that serving reads
(serving/access)."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from roostream.cli.options import CommandGroup, Duration, NonEmptyPath
from roostream.errors import ConfigError, nearest
from serving.access.bearer_keys import BearerKey, new_key, read_keys, write_keys

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
    _change(file, lambda keys: [*keys, key], may_create=True)
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
    old = _named(read_keys(file), name)
    now_s, ids = int(time.time()), {key.id for key in old}
    valid = [key for key in old if not 0 < key.expires_s <= now_s] or old[-1:]
    scopes = dict.fromkeys(scope for key in valid for scope in key.scopes)
    newest = max(valid, key=lambda key: key.created_s)
    lifetime_s = expires_ms // 1000 if expires_ms else newest.expires_s - newest.created_s
    text, key = new_key(newest.name, scopes, now_s, now_s + lifetime_s if lifetime_s > 0 else 0)
    end_s = now_s + overlap_ms // 1000

    def aged(one: BearerKey) -> BearerKey:
        return (
            dataclasses.replace(one, expires_s=min(one.expires_s or end_s, end_s)) if one.id in ids else one
        )

    _change(file, lambda keys: [*map(aged, keys), key])
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
    gone = {key.id for key in _named(read_keys(file), name)}
    _change(file, lambda keys: [key for key in keys if key.id not in gone])
    click.echo(f"revoked: {', '.join(sorted(gone))}")


def _change(file: Path, change: Callable[[Any], list[BearerKey]], may_create: bool = False) -> None:
    write_keys(file, change(() if may_create and not file.exists() else read_keys(file)))


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
