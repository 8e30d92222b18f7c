"""`roostream versions`: what a serving process holds, and which version it serves, by its admin interface."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import click

from roo.errors import ConfigError, UnavailableError, printable
from runtime.address import check_addresses

_PATIENCE_S = 10.0


@click.group()
def versions() -> None:
    """Versions of the model in a serving process, by its admin interface.

    \b
    Example:
      roostream versions list --admin 127.0.0.1:8081 --token-file token
    """


def admin_options(command: Any) -> Any:
    """The options of all of them."""
    for option in (
        click.option("--token-file", type=click.Path(path_type=Path), required=True, help="its admin_token_file"),
        click.option("--admin", metavar="HOST:PORT", required=True, help="admin_listen of a serving process"),
    ):
        command = option(command)
    return command


@versions.command("list")
@admin_options
def list_versions(admin: str, token_file: Path) -> None:
    """What is held, and what was refused.

    \b
    Example:
      roostream versions list --admin 127.0.0.1:8081 --token-file token
    """
    _show(_asked(admin, token_file, "GET", "versions"))


@versions.command()
@click.argument("name")
@admin_options
def activate(name: str, admin: str, token_file: Path) -> None:
    """Serve this held version until `resume`.

    \b
    Example:
      roostream versions activate 3-120 --admin 127.0.0.1:8081 --token-file token
    """
    _show(_asked(admin, token_file, "POST", f"versions/{urllib.parse.quote(name, safe='')}/activate"))


@versions.command()
@admin_options
def resume(admin: str, token_file: Path) -> None:
    """Serve the newest version again.

    \b
    Example:
      roostream versions resume --admin 127.0.0.1:8081 --token-file token
    """
    _show(_asked(admin, token_file, "POST", "versions/resume"))


def _asked(admin: str, token_file: Path, method: str, path: str) -> Any:
    """Raises as `_answer`; ConfigError: the address is none, or the token can't be read."""
    check_addresses("--admin", admin)
    try:
        token = token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: expected a file with a token, got {str(token_file)!r}: {error}") from None
    url = f"http://{admin}/admin/v1/{path}"
    return _answer(urllib.request.Request(url, method=method, headers={"authorization": f"Bearer {token}"}))


def _answer(request: urllib.request.Request) -> Any:
    """Raises ConfigError: what serving refused, in its words; UnavailableError: it can't be asked."""
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(_refusal(error)) from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"serving's admin interface at {request.host}: {error}; is admin_listen set?") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return printable(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"serving answered {error.code}"


def _show(told: dict[str, Any]) -> None:
    now_ms = time.time() * 1000
    for version in told["versions"]:
        age = f"committed {(now_ms - version['committed_ms']) / 1000:.0f} s ago" if version["committed_ms"] else "initial weights"
        roles = "".join(f", {role}" for role in version["roles"])
        pinned = ", until resume" if version["name"] == told["activated"] else ""
        click.echo(f"{version['name']}  {version['state']}{pinned}{roles}  {age}")
    for refused in told["refused"]:
        click.echo(f"{refused['name']}  refused ({refused['reason']})  {printable(refused['message'])}")
