"""Bearer keys and the file that knows them: pure, no clock and no I/O.

A key is `roo_<id>_<secret>`. The secret is 256 random bits, made here and never chosen, so one round of salted SHA-256 keeps it:
slow hashes (scrypt, Argon2) protect what can be guessed, and cost each request milliseconds. The id finds the entry at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from roostream.errors import ConfigError, nearest
from roostream.schema.settings import check_name

SCOPES = {
    "rank": "rank, retrieve, recommend, infer and explain",
    "engage": "tell engagements",
    "metrics": "read /metrics",
    "admin": "the admin port",
}
FORMAT = 1
_SECRET_BYTES, _SALT_BYTES, _ID_BYTES = 32, 16, 6
_TEXT = re.compile(rb"roo_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BearerKey:
    """One entry of the file: everything about a key but the key."""

    id: str
    name: str
    scopes: tuple[str, ...]
    salt: bytes
    digest: bytes  # SHA-256 of salt and secret
    created_s: int  # seconds since 1970
    expires_s: int = 0  # from then on it is refused; 0 = never

    def fits(self, secret: bytes) -> bool:
        """In a time that doesn't depend on where it differs."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest)


def new_key(name: str, scopes: Iterable[str], now_s: int, expires_s: int = 0) -> tuple[str, BearerKey]:
    """(the key, which is shown once and kept nowhere; its entry). Raises ConfigError: a name or scope that can't be."""
    check_name("key", name)
    wanted = tuple(dict.fromkeys(scopes))
    if not wanted:
        raise ConfigError(f"expected at least one scope of {', '.join(SCOPES)}, got none")
    _check_scopes(wanted)
    secret, salt = secrets.token_urlsafe(_SECRET_BYTES), secrets.token_bytes(_SALT_BYTES)
    id_ = secrets.token_hex(_ID_BYTES)
    digest = _digest(salt, secret.encode())
    key = BearerKey(
        id=id_, name=name, scopes=wanted, salt=salt, digest=digest, created_s=now_s, expires_s=expires_s
    )
    return f"roo_{id_}_{secret}", key


def id_and_secret(text: bytes) -> tuple[str, bytes] | None:
    """Of a key as it is sent; None for what isn't one."""
    found = _TEXT.fullmatch(text)
    return (found[1].decode(), found[2]) if found else None


def file_of(keys: Iterable[BearerKey]) -> bytes:
    """What is written."""
    entries = [
        {
            "id": key.id,
            "name": key.name,
            "scopes": list(key.scopes),
            "salt": key.salt.hex(),
            "sha256": key.digest.hex(),
            "created_s": key.created_s,
            "expires_s": key.expires_s,
        }
        for key in keys
    ]
    return json.dumps({"format": FORMAT, "keys": entries}, indent=1).encode() + b"\n"


def keys_of(data: bytes) -> tuple[BearerKey, ...]:
    """What was written. Raises ConfigError: it is something else, in one sentence."""
    try:
        told = json.loads(data)
        if (
            not isinstance(told, dict)
            or told.get("format") != FORMAT
            or not isinstance(told.get("keys"), list)
        ):
            raise ConfigError(f"expected an object with format {FORMAT} and a list of keys")
        keys = tuple(_key(entry) for entry in told["keys"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"expected the JSON that `roostream keys new` writes: {error!r}") from None
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError("expected each id once")
    return keys


def _key(entry: dict[str, Any]) -> BearerKey:
    salt, digest = entry["salt"], entry["sha256"]
    if (
        not (_HEX.fullmatch(salt) and _HEX.fullmatch(digest))
        or len(digest) != 64
        or len(salt) < 2 * _SALT_BYTES
    ):
        raise ValueError(f"key {entry['id']!r}: salt or sha256")
    _check_scopes(entry["scopes"])
    check_name("key", entry["name"])
    times = entry["created_s"], entry.get("expires_s", 0)
    if not re.fullmatch(r"[0-9a-f]{12}", entry["id"]) or any(type(t) is not int for t in times):
        raise ValueError(f"key {entry['id']!r}: id, created_s or expires_s")
    return BearerKey(
        id=entry["id"],
        name=entry["name"],
        scopes=tuple(entry["scopes"]),
        salt=bytes.fromhex(salt),
        digest=bytes.fromhex(digest),
        created_s=times[0],
        expires_s=times[1],
    )


def _check_scopes(scopes: Iterable[str]) -> None:
    for scope in scopes:
        if scope not in SCOPES:
            raise ConfigError(
                f"expected a scope of {', '.join(SCOPES)}, got {scope!r}{nearest(str(scope), SCOPES)}"
            )


def _digest(salt: bytes, secret: bytes) -> bytes:
    return hashlib.sha256(salt + secret).digest()
