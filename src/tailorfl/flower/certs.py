"""Who may talk to whom: a certificate authority, the server's certificate, and a key for every site."""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import import_extra
from tailorfl.errors import UserError
from tailorfl.flower.project import check_name

CA_YEARS, SERVER_DAYS = 10, 825
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(rf"(?=.{{1,253}}$)(?!.*\.\d+$){LABEL}(\.{LABEL})*")  # no number last: that is a broken IP address


@dataclass(frozen=True)
class Certs:
    """The files in a folder of certificates and keys."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate: everybody gets a copy."""
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """The authority's key: stays where certificates are made."""
        return self.folder / "ca.key"

    @property
    def server(self) -> Path:
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    def node_key(self, name: str) -> Path:
        """A site's private key, for that site alone."""
        return self.folder / "nodes" / name / f"{name}.key"

    def node_public(self, name: str) -> Path:
        """A site's public key, for the server to know it by."""
        return self.folder / "nodes" / name / f"{name}.pub"


def make_certs(folder: Path, hosts: Sequence[str], nodes: Sequence[str]) -> list[Path]:
    """Write what is missing, and return what was written.

    The authority and the sites' keys stay as they are where they are there: a site that has its key keeps it.
    The server's certificate is made anew whenever hosts are named. It is for this machine's own names too: Flower's
    processes at the server call each other by those.
    """
    names = [check_name(name) for name in nodes]
    alternatives = [_host(host) for host in dict.fromkeys((*hosts, *LOOPBACK))] if hosts else []
    certs, written = Certs(folder), []
    if certs.server.exists() and not certs.ca.exists():
        raise UserError(f"{certs.ca} is missing, which sites trust; allowed: put it back, or a new folder")
    if alternatives and certs.ca.exists() and not certs.ca_key.exists():
        raise UserError(f"{certs.ca_key} is missing, which signs certificates; allowed: put it back, or a new folder")
    if not alternatives and not certs.server.exists():
        raise UserError("the server's certificate needs the names that it is called by; allowed: --host NAME or IP")
    if not certs.ca.exists():
        written += _make_ca(certs)
    if alternatives:
        written += _make_server(certs, alternatives)
    for name in dict.fromkeys(names):
        if not certs.node_key(name).exists():
            written += _make_node(certs, name)
        elif not certs.node_public(name).exists():
            written += _write_public(certs, name, _load_key(certs.node_key(name)))
    return written


def _make_ca(certs: Certs) -> list[Path]:
    x509, key = _extra("x509"), _new_key("SECP384R1")
    name = _subject("tailorfl federation")
    ends = _now() + datetime.timedelta(days=365 * CA_YEARS)
    builder = _certificate(name, name, key.public_key(), ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    # The certificate last: a key without one has signed nothing, and is made again.
    _write_private(certs.ca_key, _private_pem(key))
    _write(certs.ca, _pem(_signed(builder, key)))
    return [certs.ca, certs.ca_key]


def _make_server(certs: Certs, alternatives: Sequence[Any]) -> list[Path]:
    x509 = _extra("x509")
    try:
        authority = x509.load_pem_x509_certificate(certs.ca.read_bytes())
    except ValueError as error:
        raise UserError(f"{certs.ca} holds no certificate; allowed: the file as it was, or a new folder") from error
    authority_key, key = _load_key(certs.ca_key), _new_key("SECP256R1")
    ends = min(_now() + datetime.timedelta(days=SERVER_DAYS), authority.not_valid_after_utc)
    builder = _certificate(_subject("tailorfl server"), authority.subject, key.public_key(), ends)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    purposes = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    builder = builder.add_extension(purposes, critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    _write_private(certs.server_key, _private_pem(key))
    _write(certs.server, _pem(_signed(builder, authority_key)))
    return [certs.server, certs.server_key]


def _make_node(certs: Certs, name: str) -> list[Path]:
    """A key on the curve that SuperNodes sign with, in the formats of OpenSSH."""
    serialization, key = _extra("hazmat.primitives.serialization"), _new_key("SECP384R1")
    encoding, nothing = serialization.Encoding, serialization.NoEncryption()
    private = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, nothing)
    # The private key last: it says that the pair is there.
    public = _write_public(certs, name, key)
    _write_private(certs.node_key(name), private)
    return [certs.node_key(name), *public]


def _write_public(certs: Certs, name: str, key: Any) -> list[Path]:
    serialization = _extra("hazmat.primitives.serialization")
    encoded = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(certs.node_public(name), encoded + f" {name}\n".encode())
    return [certs.node_public(name)]


def _load_key(path: Path) -> Any:
    serialization, content = _extra("hazmat.primitives.serialization"), path.read_bytes()
    ours = b"OPENSSH" in content.partition(b"\n")[0]
    try:
        load = serialization.load_ssh_private_key if ours else serialization.load_pem_private_key
        return load(content, None)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds no private key; allowed: the file as it was, or a new folder") from error


def _host(host: str) -> Any:
    x509 = _extra("x509")
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not HOST.fullmatch(host):
        raise UserError(f"--host {host}: not a machine's name; allowed: names such as fl.example.org, IP addresses")
    return x509.DNSName(host)


def _certificate(subject: Any, issuer: Any, public: Any, ends: datetime.datetime) -> Any:
    x509 = _extra("x509")
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    # Clocks differ a little: it is valid since an hour ago.
    builder = builder.not_valid_before(_now() - datetime.timedelta(hours=1)).not_valid_after(ends)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _usage(**granted: bool) -> Any:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    return _extra("x509").KeyUsage(**{name: granted.get(name, False) for name in every.split()})


def _subject(name: str) -> Any:
    x509 = _extra("x509")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _signed(builder: Any, key: Any) -> Any:
    return builder.sign(key, _extra("hazmat.primitives.hashes").SHA384())


def _new_key(curve: str) -> Any:
    ec = _extra("hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(getattr(ec, curve)())


def _private_pem(key: Any) -> bytes:
    serialization = _extra("hazmat.primitives.serialization")
    plain = serialization.NoEncryption()
    found: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return found


def _pem(certificate: Any) -> bytes:
    found: bytes = certificate.public_bytes(_extra("hazmat.primitives.serialization").Encoding.PEM)
    return found


def _write(path: Path, content: bytes) -> None:
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def _write_private(path: Path, content: bytes) -> None:
    """A file that nobody else can read, at no moment."""
    with whole_file(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _extra(module: str) -> Any:
    return import_extra(f"cryptography.{module}", "flower", "making certificates")
