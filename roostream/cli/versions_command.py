"""`roostream versions`: the model versions of a serving process, through its admin interface."""

from __future__ import annotations

import functools
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from roostream.cli.options import CommandGroup, NonEmptyPath, refuse_given, with_options
from roostream.errors import ConfigError, UnavailableError, printable, reason_of
from roostream.runtime.address import check_addresses
from roostream.runtime.direct_http import open_direct
from roostream.runtime.tls import no_password

_TIMEOUT_S = 10.0


@click.group(cls=CommandGroup)
def versions() -> None:
    """List and choose the model versions of a serving process, through its admin interface.

    \b
    Example:
      roostream versions list --admin 127.0.0.1:8081 --token-file token
    """


class AdminInterface(NamedTuple):
    """Address and credentials of an admin interface."""

    address: str  # host:port
    token_file: Path
    ca: str  # "" = HTTP without TLS
    certificate: str

    def context(self) -> ssl.SSLContext | None:
        """The TLS context. Raises ConfigError: a file cannot be used."""
        if not self.ca:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate:
                context.load_cert_chain(self.certificate, password=no_password)
        except OSError as error:
            raise ConfigError(f"--ca, --certificate: expected PEM files: {error.strerror or error}") from None
        return context


def admin_options(command: Any) -> Any:
    """Options of the address and the credentials, which the command receives as an AdminInterface."""

    @functools.wraps(command)
    def call(admin: str, token_file: Path, ca: str, certificate: str, **arguments: Any) -> None:
        if not ca:  # else the token would go over a connection without TLS
            refuse_given(("certificate",), "--ca")
        command(AdminInterface(admin, token_file, ca, certificate), **arguments)

    return with_options(
        click.option("--admin", metavar="HOST:PORT", required=True, help="admin_listen of a serving process"),
        click.option("--ca", default="", help="PEM file with the authorities of its certificate; uses HTTPS"),
        click.option("--certificate", default="", help="PEM file with a client certificate and its key"),
        click.option(
            "--token-file",
            type=NonEmptyPath(path_type=Path),
            required=True,
            help="the file named by its admin_token_file",
        ),
    )(call)


@versions.command("list")
@admin_options
def list_versions(admin: AdminInterface) -> None:
    """List loaded and rejected versions.

    \b
    Example:
      roostream versions list --admin 127.0.0.1:8081 --token-file token
    """
    _print(admin, _call(admin, "GET", "versions"))


@versions.command()
@click.argument("name")
@admin_options
def activate(admin: AdminInterface, name: str) -> None:
    """Serve this loaded version until `resume`.

    \b
    Example:
      roostream versions activate 3-120 --admin 127.0.0.1:8081 --token-file token
    """
    _print(admin, _call(admin, "POST", f"versions/{urllib.parse.quote(name, safe='')}/activate"))


@versions.command()
@admin_options
def resume(admin: AdminInterface) -> None:
    """Serve the newest version again.

    \b
    Example:
      roostream versions resume --admin 127.0.0.1:8081 --token-file token
    """
    _print(admin, _call(admin, "POST", "versions/resume"))


def _call(admin: AdminInterface, method: str, path: str) -> Any:
    """Call the interface.

    Raises:
        ConfigError: the address, token or certificate is not valid, or serving rejected the request.
        UnavailableError: serving does not answer.
    """
    check_addresses("--admin", admin.address)
    try:
        token = admin.token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file: expected a file with a token, got {str(admin.token_file)!r}: {reason_of(error)}"
        ) from None
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"--token-file: expected a token of printable ASCII characters in {str(admin.token_file)!r}, got "
            "others; give the file that serving's admin_token_file names"
        )
    url = f"http{'s' if admin.ca else ''}://{admin.address}/admin/v1/{path}"
    request = urllib.request.Request(url, method=method, headers={"authorization": f"Bearer {token}"})
    context = admin.context()
    try:
        with open_direct(request, _TIMEOUT_S, context) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(_refusal(error)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(
            f"no answer from the admin interface at {request.host} ({reason_of(error)}); check "
            "admin_listen, and --ca for TLS"
        ) from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return printable(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"serving answered {error.code}"


def _print(admin: AdminInterface, answer: Any) -> None:
    try:
        lines = list(_lines(answer))
    except (LookupError, TypeError, ValueError):
        raise UnavailableError(
            f"expected the admin interface of serving at {admin.address}, got the answer of another program; "
            "check admin_listen"
        ) from None
    for line in lines:
        click.echo(line)


def _lines(answer: Any) -> Iterator[str]:
    now_ms = time.time() * 1000
    for version in answer["versions"]:
        age = (
            f"committed {(now_ms - version['committed_ms']) / 1000:.0f} s ago"
            if version["committed_ms"]
            else "initial weights"
        )
        roles = "".join(f", {role}" for role in version["roles"])
        pinned = ", until resume" if version["name"] == answer["activated"] else ""
        yield f"{version['name']}  {version['state']}{pinned}{roles}  {age}"
    for rejected in answer["refused"]:
        yield f"{rejected['name']}  rejected ({rejected['reason']})  {printable(rejected['message'])}"
