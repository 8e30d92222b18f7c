"""TLS of serving's port: certificate and key from files, read anew when they change; client certificates where wanted."""

from __future__ import annotations

import dataclasses
import logging
import ssl
import threading
from pathlib import Path

from roo.config import Refusal
from serving.access.key_file import Watch

log = logging.getLogger("roostream.serving.access")

_LOOK_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files. `client_ca`: authorities of client certificates; who has none of theirs is let in unless `client_required`."""

    certificate: str
    key: str
    client_ca: str = ""
    client_required: bool = False


class Tls:
    """One context for all connections: those that begin after the files changed get what they hold then."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises Refusal: files that can't be read, or don't belong together."""
        self.files = files
        self._watch = Watch(Path(files.certificate), Path(files.key))
        self.context = _context(files)

    def poll(self) -> None:
        """Take new files, if they are whole; else what was stays, and it is told."""
        if not self._watch.changed():
            return
        try:
            _context(self.files)  # a pair that doesn't fit would leave half of it in the one that is in use
            self.context.load_cert_chain(self.files.certificate, self.files.key)
        except (Refusal, OSError) as error:
            log.error("%s; the certificate of before stays in use", error)
        else:
            log.info("%s: new connections get the certificate as it is now", self.files.certificate)

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        while not stop.wait(_LOOK_S):
            self.poll()


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # ssl.SSLError is one
        got = f"{files.certificate!r} and {files.key!r}: {error.strerror or error}"
        raise Refusal("tls_certificate", f"expected PEM files of a certificate chain and its private key, got {got}") from None
    if files.client_ca:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            got = f"{files.client_ca!r}: {error.strerror or error}"
            raise Refusal("tls_client_ca", f"expected a PEM file of authorities, got {got}") from None
        context.verify_mode = ssl.CERT_REQUIRED if files.client_required else ssl.CERT_OPTIONAL
    return context
