"""Credentials of a secured RPC link: a self-signed certificate for both ends, and a token."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity


@contextlib.contextmanager
def link_key_folder(secured: bool) -> Iterator[str]:
    """Made with openssl, and deleted; "" of a link that asks nobody."""
    if not secured:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        _make(Path(folder))
        yield folder


def read_link_credentials(folder: str) -> LinkCredentials:
    """Of either end."""
    if not folder:
        return LinkCredentials()
    at = Path(folder)
    own = {"certificate": str(at / "own.crt"), "key": str(at / "own.key"), "ca": str(at / "own.crt")}
    return LinkCredentials(LinkSecurity(**own, token_file=str(at / "token")))


def _make(folder: Path) -> None:
    (folder / "token").write_text("0123456789abcdef0123456789abcdef")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "own.key"), "-out", str(folder / "own.crt"))
    subprocess.run(("openssl", "req", "-x509", *curve, *names, *files), check=True, capture_output=True)
