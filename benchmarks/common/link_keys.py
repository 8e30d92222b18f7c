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
    """A temporary folder with keys made by openssl; "" for a link without security."""
    if not secured:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "token").write_text("0123456789abcdef0123456789abcdef")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        names = ("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1")
        files = ("-keyout", f"{folder}/own.key", "-out", f"{folder}/own.crt")
        subprocess.run(("openssl", "req", "-x509", *curve, *names, *files), check=True, capture_output=True)
        yield folder


def read_link_credentials(folder: str) -> LinkCredentials:
    if not folder:
        return LinkCredentials()
    certificate, key, token = (f"{folder}/{name}" for name in ("own.crt", "own.key", "token"))
    return LinkCredentials(LinkSecurity(certificate=certificate, key=key, ca=certificate, token_file=token))
