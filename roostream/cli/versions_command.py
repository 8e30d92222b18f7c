"""`roostream versions`: what a serving process holds, and which version it serves, by its admin interface."""

from __future__ import annotations

import functools
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import click

from roostream.errors import ConfigError, UnavailableError, printable
from roostream.runtime.address import check_addresses

_PATIENCE_S = 10.0


@click.group()
def versions() -> None:
    """Versions of the model in a serving process, by its admin interface.

    \b
    Example:
      roostream versions list --admin 127.0.0.1:8081 --token-file token
    """


class AdminDoor(NamedTuple):
    """An admin interface, and how one is let in."""

    admin: str  # host:port
    token_file: Path
    ca: str  # "" = http
    certificate: str

    def context(self) -> ssl.SSLContext | None:
        """Raises ConfigError: a file can't be used."""
        if not self.ca:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate:
                context.load_cert_chain(self.certificate)
        except OSError as error:
            raise ConfigError(f"--ca, --certificate: expected PEM files: {error.strerror or error}") from None
        return context


def admin_options(command: Any) -> Any:
    """The options of all of them, which a command is given as an AdminDoor."""

    @functools.wraps(command)
    def asks(admin: str, token_file: Path, ca: str, certificate: str, **own: Any) -> None:
        command(AdminDoor(admin, token_file, ca, certificate), **own)

    bundled: Any = asks
    for option in (
        click.option(
            "--token-file", type=click.Path(path_type=Path), required=True, help="its admin_token_file"
        ),
        click.option(
            "--certificate",
            default="",
            help="PEM file of a certificate and its key, where clients are asked for one",
        ),
        click.option(
            "--ca", default="", help="PEM file of the authorities of its certificate: asks by https"
        ),
        click.option("--admin", metavar="HOST:PORT", required=True, help="admin_listen of a serving process"),
    ):
        bundled = option(bundled)
    return bundled


@versions.command("list")
@admin_options
def list_versions(door: AdminDoor) -> None:
    """What is held, and what was refused.

    \b
    Example:
      roostream versions list --admin 127.0.0.1:8081 --token-file token
    """
    _show(_asked(door, "GET", "versions"))


@versions.command()
@click.argument("name")
@admin_options
def activate(door: AdminDoor, name: str) -> None:
    """Serve this held version until `resume`.

    \b
    Example:
      roostream versions activate 3-120 --admin 127.0.0.1:8081 --token-file token
    """
    _show(_asked(door, "POST", f"versions/{urllib.parse.quote(name, safe='')}/activate"))


@versions.command()
@admin_options
def resume(door: AdminDoor) -> None:
    """Serve the newest version again.

    \b
    Example:
      roostream versions resume --admin 127.0.0.1:8081 --token-file token
    """
    _show(_asked(door, "POST", "versions/resume"))


def _asked(door: AdminDoor, method: str, path: str) -> Any:
    """Raises as `_answer`; ConfigError: the address is none, or the token or a certificate can't be read."""
    check_addresses("--admin", door.admin)
    try:
        token = door.token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file: expected a file with a token, got {str(door.token_file)!r}: {error}"
        ) from None
    url = f"http{'s' if door.ca else ''}://{door.admin}/admin/v1/{path}"
    request = urllib.request.Request(url, method=method, headers={"authorization": f"Bearer {token}"})
    return _answer(request, door.context())


def _answer(request: urllib.request.Request, context: ssl.SSLContext | None) -> Any:
    """Raises ConfigError: what serving refused, in its words; UnavailableError: it can't be asked."""
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S, context=context) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(_refusal(error)) from None
    except (OSError, ValueError) as error:
        do = "is admin_listen set, and --ca given where it speaks TLS?"
        raise UnavailableError(f"serving's admin interface at {request.host}: {error}; {do}") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return printable(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"serving answered {error.code}"


def _show(told: dict[str, Any]) -> None:
    now_ms = time.time() * 1000
    for version in told["versions"]:
        age = (
            f"committed {(now_ms - version['committed_ms']) / 1000:.0f} s ago"
            if version["committed_ms"]
            else "initial weights"
        )
        roles = "".join(f", {role}" for role in version["roles"])
        pinned = ", until resume" if version["name"] == told["activated"] else ""
        click.echo(f"{version['name']}  {version['state']}{pinned}{roles}  {age}")
    for refused in told["refused"]:
        click.echo(f"{refused['name']}  refused ({refused['reason']})  {printable(refused['message'])}")
