"""Certificates for tests, by an authority of the test's own."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certified(NamedTuple):
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates that are valid today."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("authority")
        self.certificate = directory / "ca.pem"
        self._write(self.certificate, self._signed(self._name, self._key, authority=True))

    def certify(self, host: str, days: int = 1) -> Certified:
        """A certificate for an address or a name; expired with negative days."""
        key = ec.generate_private_key(ec.SECP256R1())
        paths = Certified(self._directory / f"{host}.pem", self._directory / f"{host}.key")
        self._write(paths.certificate, self._signed(_named(host), key, host=host, days=days))
        pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        paths.key.write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()))
        return paths

    def _signed(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        host: str = "",
        authority: bool = False,
        days: int = 1,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=9))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if host:
            other = (
                x509.IPAddress(ipaddress.ip_address(host))
                if host[0].isdigit()
                else x509.DNSName(host)
            )
            builder = builder.add_extension(x509.SubjectAlternativeName([other]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    @staticmethod
    def _write(path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
