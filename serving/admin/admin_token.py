"""The token of the admin port: read from a file, compared in constant time, never shown."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from roostream.schema.settings import SettingError

MIN_BYTES = 16
_SCHEME = "bearer "


class AdminToken:
    """Only its digest is kept."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    def fits(self, authorization: str) -> bool:
        """Whether a header `Authorization: Bearer …` has it."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(_digest(authorization[len(_SCHEME) :].strip()), self._digest)


def read_token(file: str) -> AdminToken:
    """Its first line. Raises SettingError: it can't be read, or is too short to keep anybody out."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            "admin_token_file", f"expected a file with a token, got {file!r}: {error}"
        ) from None
    token = lines[0].strip() if lines else ""
    if len(token.encode()) < MIN_BYTES:
        do = "write one with: openssl rand -hex 32"
        raise SettingError(
            "admin_token_file",
            f"expected a first line of at least {MIN_BYTES} bytes in {file!r}, got fewer; {do}",
        )
    return AdminToken(token)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
