"""A certificate authority for tests."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for tests."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(name, self.key, is_authority=True)
        self.pem = folder / f"{name}.pem"
        self.pem.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *hosts: str, password: str = "", expired: bool = False, local: bool = True
    ) -> tuple[str, str]:
        """Issue a certificate for these hosts and, if `local`, for 127.0.0.1. Returns the paths of the
        certificate and the key, which `password` encrypts; a certificate of the same name is overwritten."""
        key = ec.generate_private_key(ec.SECP256R1())
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        signed = self._sign(name, key, hosts, until=2021 if expired else 2120, local=local)
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        secret: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            secret = serialization.BestAvailableEncryption(password.encode())
        forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret
        files[1].write_bytes(key.private_bytes(*forms))
        return str(files[0]), str(files[1])

    def _sign(
        self,
        name: str,
        key: Any,
        hosts: tuple[str, ...] = (),
        is_authority: bool = False,
        until: int = 2120,
        local: bool = True,
    ) -> x509.Certificate:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, self.name))
        begin = datetime.datetime(2020, 1, 1)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        )
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin)
        builder = builder.not_valid_after(datetime.datetime(until, 1, 1))
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), True)
        address = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if local else []
        names = [*address, *map(x509.DNSName, hosts)]
        return builder.add_extension(x509.SubjectAlternativeName(names), False).sign(
            self.key, hashes.SHA256()
        )


def client_context(authority: Authority, *own: str) -> ssl.SSLContext:
    """A client's TLS context that trusts `authority`. `own`: the client's certificate and key."""
    context = ssl.create_default_context(cafile=str(authority.pem))
    if own:
        context.load_cert_chain(*own)
    return context
