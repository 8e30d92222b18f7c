"""TLS of ports that speak HTTP: certificate and key from files, read anew when they change; client certificates where wanted."""

from __future__ import annotations

import dataclasses
import logging
import ssl
import threading
from pathlib import Path

from roostream.runtime.file_watcher import FileWatcher
from roostream.schema.settings import SettingError, Settings, setting

log = logging.getLogger("roostream.tls")

_LOOK_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files. `client_ca`: authorities of client certificates; who has none of theirs is let in unless `client_required`."""

    certificate: str
    key: str
    client_ca: str = ""
    client_required: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings(Settings):
    """A program whose HTTP ports are encrypted where it is given a certificate: all of them by the same files."""

    tls_certificate: str = setting(
        "",
        "PEM file of the certificate chain of this program's HTTP ports; read anew when it changes; '' = no TLS",
    )
    tls_key: str = setting("", "PEM file of its private key")
    tls_client_ca: str = setting(
        "", "PEM file of authorities of client certificates; '' = none are asked for"
    )
    tls_client_required: bool = setting(False, "refuse whoever has no certificate of theirs")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.tls_certificate) != bool(self.tls_key) or (
            self.tls_client_ca and not self.tls_certificate
        ):
            raise SettingError(
                "tls_certificate", "expected tls_certificate with tls_key, and tls_client_ca only beside them"
            )
        if self.tls_client_required and not self.tls_client_ca:
            raise SettingError(
                "tls_client_required",
                "expected it with tls_client_ca, got none; who may sign the clients' certificates?",
            )

    @property
    def scheme(self) -> str:
        """Of URLs of its ports."""
        return "https" if self.tls_certificate else "http"

    @property
    def tls(self) -> TlsFiles | None:
        """None without TLS."""
        if not self.tls_certificate:
            return None
        return TlsFiles(
            certificate=self.tls_certificate,
            key=self.tls_key,
            client_ca=self.tls_client_ca,
            client_required=self.tls_client_required,
        )


class TlsContext:
    """One context for all connections: those that begin after the files changed get what they hold then."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises SettingError: files that can't be read, or don't belong together."""
        self.files = files
        self._watch = FileWatcher(Path(files.certificate), Path(files.key))
        self.context = _context(files)

    def poll(self) -> None:
        """Take new files, if they are whole; else what was stays, and it is told."""
        if not self._watch.changed():
            return
        try:
            _context(self.files)  # a pair that doesn't fit would leave half of it in the one that is in use
            self.context.load_cert_chain(self.files.certificate, self.files.key)
        except (SettingError, OSError) as error:
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
        raise SettingError(
            "tls_certificate", f"expected PEM files of a certificate chain and its private key, got {got}"
        ) from None
    if files.client_ca:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            got = f"{files.client_ca!r}: {error.strerror or error}"
            raise SettingError("tls_client_ca", f"expected a PEM file of authorities, got {got}") from None
        context.verify_mode = ssl.CERT_REQUIRED if files.client_required else ssl.CERT_OPTIONAL
    return context
