"""Who may call shards and the controller: certificates on both ends, a token, or nobody asks (docs/operations/security.md).

    certificate, key, ca   TLS 1.3; each end shows a certificate of `ca` and refuses one that isn't
    token_file             whoever dials says its first line before the first call; whoever listens takes any of its lines

Files are looked at whenever a connection begins, so new ones need no restart; connections that are there go on. Pairs are renewed
in any order: a new `ca` file may hold the old authority too, a new token stands below the old one until everybody has both.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import socket
import ssl
import threading
from pathlib import Path

from roostream.runtime.file_watcher import FileWatcher
from roostream.schema.settings import SettingError, Settings, setting

log = logging.getLogger("roostream.rpc")

MIN_TOKEN = 16
"""Characters; who guesses may try often."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSecurity(Settings):
    """The table `[link]` of a program's TOML; equal in all programs but for each one's own certificate."""

    certificate: str = setting(
        "", "PEM file of this program's certificate chain, shown to whoever calls and is called; '' = no TLS"
    )
    key: str = setting("", "PEM file of its private key")
    ca: str = setting(
        "", "PEM file of the authorities whose certificates may call and be called: this deployment's own"
    )
    name: str = setting("", "that certificates of those called have to have; '' = the host that is dialled")
    token_file: str = setting(
        "", "file of tokens, one a line: the first is told to whoever is called, each is taken of callers"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"certificate": self.certificate, "key": self.key, "ca": self.ca}
        if any(given.values()) and not all(given.values()):
            missing = ", ".join(key for key, value in given.items() if not value)
            raise SettingError(
                missing.split(", ")[0],
                f"expected certificate, key and ca together, got no {missing}; add what is missing",
            )
        if self.name and not self.certificate:
            raise SettingError("name", "expected it with certificate, key and ca, got none of them; add them")

    @property
    def asks(self) -> bool:
        """Whether a caller has to prove who it is, over a line that nobody reads. A token without TLS can be read on its way."""
        return bool(self.certificate)


@dataclasses.dataclass(frozen=True)
class _Files:
    """What they held at one moment."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    tokens: tuple[str, ...]


class LinkCredentials:
    """The certificates and tokens in force. Thread-safe."""

    def __init__(self, security: LinkSecurity | None = None, *, insecure: bool = False) -> None:
        """`insecure`: addresses that others reach may be listened on although nothing asks who they are.

        Raises:
            SettingError: files that can't be read, or don't belong together.
        """
        self.security, self.insecure = security or LinkSecurity(), insecure
        named = (self.security.certificate, self.security.key, self.security.ca, self.security.token_file)
        self._watch = FileWatcher(*(Path(name) for name in named if name))
        self._lock = threading.Lock()
        self._files = _read(self.security)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those that are taken, the one that is told first; () = none is asked for."""
        return self._now().tokens

    def admits(self, token: object) -> bool:
        """In a time that doesn't tell where it differs."""
        told = token.encode() if isinstance(token, str) else b""
        return any([hmac.compare_digest(told, known.encode()) for known in self.tokens]) or not self.tokens

    def accepted(self, connection: socket.socket) -> socket.socket:
        """A connection that was accepted, as it is to be spoken over; nothing is read yet. OSError: it has gone."""
        context = self._now().server
        if context is None:
            return connection
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def dialled(self, connection: socket.socket, host: str) -> socket.socket:
        """A connection that was dialled, once both have shown who they are, within its own time limit.

        OSError: they have not; the connection is closed.
        """
        context = self._now().client
        if context is None:
            return connection
        try:
            return context.wrap_socket(connection, server_hostname=self.security.name or host.strip("[]"))
        except BaseException:
            connection.close()
            raise

    def _now(self) -> _Files:
        """New files, if they are whole; else what was stays, and it is told."""
        with self._lock:
            if self._watch.files and self._watch.changed():
                try:
                    self._files = _read(self.security)
                    log.info("certificates and tokens of the link were renewed")
                except SettingError as error:
                    log.error("link: %s; what was before stays in force", error)
            return self._files


def _read(security: LinkSecurity) -> _Files:
    tokens = _tokens(security.token_file) if security.token_file else ()
    if not security.asks:
        return _Files(None, None, tokens)
    return _Files(
        _context(security, ssl.PROTOCOL_TLS_SERVER), _context(security, ssl.PROTOCOL_TLS_CLIENT), tokens
    )


def _context(security: LinkSecurity, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = (
        ssl.CERT_REQUIRED
    )  # of a client too: the host's name is checked by whoever dials alone
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are kept, not resumed
    try:
        context.load_cert_chain(security.certificate, security.key)
    except OSError as error:  # ssl.SSLError is one
        got = f"{security.certificate!r} and {security.key!r}: {error.strerror or error}"
        raise SettingError(
            "link.certificate", f"expected PEM files of a certificate chain and its private key, got {got}"
        ) from None
    try:
        context.load_verify_locations(security.ca)
    except OSError as error:
        raise SettingError(
            "link.ca", f"expected a PEM file of authorities, got {security.ca!r}: {error.strerror or error}"
        ) from None
    return context


def _tokens(file: str) -> tuple[str, ...]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("link.token_file", f"expected a file of tokens, got {file!r}: {error}") from None
    tokens = tuple(stripped for line in lines if (stripped := line.strip()))
    if not tokens or min(map(len, tokens)) < MIN_TOKEN:
        raise SettingError(
            "link.token_file",
            f"expected tokens of at least {MIN_TOKEN} characters, one a line, in {file!r}; see `openssl rand -hex 32`",
        )
    return tokens
