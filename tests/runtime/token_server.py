"""An OAuth server for the client-credentials flow on loopback. It signs tokens and publishes the key that a
broker verifies them with."""

from __future__ import annotations

import base64
import json
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from infra.ports import HOST

AUDIENCE = "kafka"
KID = "tests"


class TokenServer(ThreadingHTTPServer):
    """Issues a token to every client that sends an id and a secret. `requests` lists them as "id:secret"."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
        self.signs_with = self.key  # a test may set another key, whose tokens the broker refuses
        super().__init__((HOST, 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/token"

    def write_keys(self, file: Path) -> str:
        """Write the public key as a JSON Web Key Set and return the file's URL."""
        public = self.key.public_key().public_numbers()
        n, e = (
            _base64(number.to_bytes((number.bit_length() + 7) // 8, "big")) for number in (public.n, public.e)
        )
        key = {"kty": "RSA", "kid": KID, "use": "sig", "alg": "RS256", "n": n, "e": e}
        file.write_text(json.dumps({"keys": [key]}), encoding="utf-8")
        return file.as_uri()

    def token(self, subject: str) -> str:
        """A JSON Web Token that is valid for an hour."""
        now_s = int(time.time())
        claims = {"sub": subject, "aud": AUDIENCE, "scope": "all", "iat": now_s, "exp": now_s + 3600}
        head = {"alg": "RS256", "kid": KID, "typ": "JWT"}
        signed_part = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        signature = self.signs_with.sign(signed_part.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed_part}.{_base64(signature)}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, TokenServer)
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        client = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
        self.server.requests.append(client)
        token = self.server.token(client.partition(":")[0])
        body = json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": 3600}).encode()
        self.send_response(200 if form == {"grant_type": ["client_credentials"]} else 400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
