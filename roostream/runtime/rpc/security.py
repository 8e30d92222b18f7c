"""Authentication of calls to shards and the controller: mutual TLS and tokens, both optional
(docs/operations/security.md).

    certificate, key, ca   TLS 1.3; both sides present a certificate and require one signed by `ca`
    token_file             a client sends the first line before its first call; a server accepts any line

Files are checked whenever a connection begins, so renewed files need no restart; open connections continue.
Files may be renewed in any order: a new `ca` file can contain the old authority too, and a new token follows
the old one until all programs have both.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import socket
import ssl
import threading
from pathlib import Path

from roostream.errors import reason_of
from roostream.runtime.file_watcher import FileWatcher
from roostream.runtime.tls import load_authorities, load_certificate
from roostream.schema.settings import SettingError, Settings, setting

log = logging.getLogger("roostream.rpc")

MIN_TOKEN_CHARS = 16  # guesses are not rate-limited


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSecurity(Settings):
    """The table `[link]` of a program's TOML. Equal in all programs, except for each program's own
    certificate."""

    certificate: str = setting(
        "", "PEM file of this program's certificate chain, for incoming and outgoing connections; '' = no TLS"
    )
    key: str = setting("", "PEM file of its private key")
    ca: str = setting(
        "", "PEM file of the authorities whose certificates are accepted: this deployment's own"
    )
    name: str = setting("", "host name that a server's certificate must have; '' = the host of its address")
    token_file: str = setting(
        "", "file of tokens, one a line: the first is sent to servers, any of them is accepted from clients"
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
            raise SettingError("name", "expected certificate, key and ca too, got none of them; add them")

    @property
    def is_mutual_tls(self) -> bool:
        """Whether clients must authenticate over an encrypted connection. A token alone is sent
        unencrypted."""
        return bool(self.certificate)


@dataclasses.dataclass(frozen=True)
class _Files:
    """Contents of the files at one moment."""

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    tokens: tuple[str, ...]


class LinkCredentials:
    """The current certificates and tokens. Thread-safe."""

    def __init__(self, security: LinkSecurity | None = None, *, insecure: bool = False) -> None:
        """`insecure`: servers may listen on public addresses without mutual TLS.

        Raises:
            SettingError: a file can't be read, or certificate and key do not match.
        """
        self.security, self.insecure = security or LinkSecurity(), insecure
        named = (self.security.certificate, self.security.key, self.security.ca, self.security.token_file)
        self._watch = FileWatcher(*(Path(name) for name in named if name))
        self._lock = threading.Lock()
        self._files = _read(self.security)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Accepted tokens; the first one is sent to servers. () = no token is required."""
        return self._current().tokens

    def accepts_token(self, token: object) -> bool:
        """Compares in constant time."""
        given = token.encode() if isinstance(token, str) else b""
        return any([hmac.compare_digest(given, known.encode()) for known in self.tokens]) or not self.tokens

    def wrap_accepted(self, connection: socket.socket) -> socket.socket:
        """Wrap an accepted connection in TLS, if configured. Nothing is read yet. Raises OSError: the
        connection was closed."""
        context = self._current().server
        if context is None:
            return connection
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def wrap_connected(self, connection: socket.socket, host: str) -> socket.socket:
        """Wrap an outgoing connection in TLS, if configured, and do the handshake within the connection's
        time limit.

        Raises OSError: the handshake failed; the connection is closed.
        """
        context = self._current().client
        if context is None:
            return connection
        try:
            return context.wrap_socket(connection, server_hostname=self.security.name or host.strip("[]"))
        except BaseException:
            connection.close()
            raise

    def _current(self) -> _Files:
        """Load changed files. If they are invalid, log an error and keep the old contents."""
        with self._lock:
            if self._watch.files and self._watch.changed():
                try:
                    self._files = _read(self.security)
                    log.info("reloaded certificates and tokens of [link]")
                except SettingError as error:
                    log.error("link: %s; the old certificates and tokens stay in use", error)
            return self._files


def _read(security: LinkSecurity) -> _Files:
    tokens = _tokens(security.token_file) if security.token_file else ()
    if not security.is_mutual_tls:
        return _Files(None, None, tokens)
    return _Files(
        _context(security, ssl.PROTOCOL_TLS_SERVER), _context(security, ssl.PROTOCOL_TLS_CLIENT), tokens
    )


def _context(security: LinkSecurity, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED  # of clients too; only clients check the host name
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are long-lived, not resumed
    load_certificate(context, "link.certificate", security.certificate, security.key)
    load_authorities(context, "link.ca", security.ca)
    return context


def _tokens(file: str) -> tuple[str, ...]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            "link.token_file", f"expected a file of tokens, got {file!r}: {reason_of(error)}"
        ) from None
    tokens = tuple(stripped for line in lines if (stripped := line.strip()))
    if not tokens or min(map(len, tokens)) < MIN_TOKEN_CHARS:
        raise SettingError(
            "link.token_file",
            f"expected tokens of at least {MIN_TOKEN_CHARS} characters, one a line, in {file!r}; see "
            "`openssl rand -hex 32`",
        )
    return tokens
