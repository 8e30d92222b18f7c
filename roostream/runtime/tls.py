"""TLS for HTTP ports: certificate and key files are reloaded when they change; client certificates are
optional."""

from __future__ import annotations

import dataclasses
import logging
import ssl
import threading
import time
from pathlib import Path

from roostream.runtime.file_watcher import FileWatcher
from roostream.schema.settings import SettingError, Settings, setting

log = logging.getLogger("roostream.tls")

_CHECK_EVERY_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsSettings(Settings):
    """TLS settings of a program: if it has a certificate, all its HTTP ports use it."""

    tls_certificate: str = setting(
        "",
        "PEM file of the certificate chain of this program's HTTP ports; reloaded when it changes; '' = "
        "no TLS",
    )
    tls_key: str = setting("", "PEM file of its private key")
    tls_client_ca: str = setting(
        "", "PEM file of authorities of client certificates; '' = no client certificates"
    )
    tls_client_required: bool = setting(False, "refuse clients without a certificate of these authorities")

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
                "expected tls_client_ca too, got none; set it to the authorities of the clients' "
                "certificates",
            )

    @property
    def scheme(self) -> str:
        """URL scheme of the program's ports."""
        return "https" if self.tls_certificate else "http"


class TlsContext:
    """One SSL context for all connections. Handshakes that begin after a change of the files use the new
    ones."""

    def __init__(self, settings: TlsSettings) -> None:
        """`settings` have a certificate. Raises SettingError: a file can't be read, or certificate and key do
        not match."""
        self.settings = settings
        named = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
        self._watch = FileWatcher(*(Path(name) for name in named if name))
        self._changed_s = 0.0  # when changed files were loaded, as Unix time
        self.context = self._newest = _context(settings)
        self.context.sni_callback = self._use_newest

    def poll(self) -> None:
        """Load changed files. If they are invalid, log an error and keep the old ones."""
        if not self._watch.changed():
            return
        try:
            self._newest, self._changed_s = _context(self.settings), time.time()
        except SettingError as error:
            log.error("%s; the old files stay in use", error)
        else:
            log.info("%s changed: new connections use the new files", ", ".join(map(str, self._watch.files)))

    def run(self, stop: threading.Event) -> None:
        """Check the files until `stop` is set."""
        while not stop.wait(_CHECK_EVERY_S):
            self.poll()

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
        """OpenSSL calls it at the beginning of every handshake, also without a server name. Returns the alert
        that ends the handshake, or None."""
        if connection.session_reused and connection.session.time <= self._changed_s:  # type: ignore[union-attr]
            return ssl.ALERT_DESCRIPTION_CERTIFICATE_UNKNOWN  # its client was checked by the old authorities
        connection.context = self._newest
        return None


def no_password() -> str:
    """The password of a key for `load_cert_chain`. Without it, OpenSSL asks for one at the terminal.

    Raises OSError: the key is encrypted.
    """
    raise OSError("the key is encrypted; write it without a password")


def load_certificate(context: ssl.SSLContext, key: str, certificate: str, private_key: str) -> None:
    """Raises SettingError, with the name of the setting `key`: a file can't be read, or both do not match."""
    try:
        context.load_cert_chain(certificate, private_key, no_password)
    except OSError as error:  # ssl.SSLError is one
        got = f"{certificate!r} and {private_key!r}: {error.strerror or error}"
        raise SettingError(
            key, f"expected PEM files of a certificate chain and its private key, got {got}"
        ) from None


def load_authorities(context: ssl.SSLContext, key: str, file: str) -> None:
    """Raises SettingError, with the name of the setting `key`: the file can't be read."""
    try:
        context.load_verify_locations(file)
    except OSError as error:
        got = f"{file!r}: {error.strerror or error}"
        raise SettingError(key, f"expected a PEM file of authorities, got {got}") from None


def _context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, "tls_certificate", settings.tls_certificate, settings.tls_key)
    if settings.tls_client_ca:
        # With a ticket a client would skip the check of its certificate, also by changed authorities.
        context.num_tickets, context.options = 0, context.options | ssl.OP_NO_TICKET
        load_authorities(context, "tls_client_ca", settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if settings.tls_client_required else ssl.CERT_OPTIONAL
    return context
