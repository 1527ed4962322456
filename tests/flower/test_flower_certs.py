"""Certificates and keys: who is let in, who is not, and who may read them."""

import ssl
import stat
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from tailorfl.errors import UserError
from tailorfl.flower.certs import Certs, make_certs

HOSTS = ("localhost", "fl.example.org", "127.0.0.1", "::1")


def made(folder: Path, *nodes: str) -> Certs:
    make_certs(folder, HOSTS, nodes)
    return Certs(folder)


def shake_hands(server: Certs, ca: Path, host: str) -> None:
    """A TLS handshake in memory: a client that trusts a CA calls a server by a name."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server.server, server.server_key)
    calling = ssl.create_default_context(cafile=ca)
    calling.verify_flags |= ssl.VERIFY_X509_STRICT  # as newer Pythons do
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = calling.wrap_bio(back, there, server_hostname=host)
    called = serving.wrap_bio(there, back, server_side=True)
    waiting = [client, called]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return
    raise AssertionError("the handshake does not end")


def test_server_is_known_by_every_name_it_was_made_for(tmp_path: Path) -> None:
    certs = made(tmp_path)
    for host in HOSTS:
        shake_hands(certs, certs.ca, host)


def test_flowers_own_processes_reach_a_server_that_others_call_by_another_name(tmp_path: Path) -> None:
    """They connect to the loopback address, whatever the server's name is."""
    make_certs(tmp_path, ["fl.example.org"], ())
    for host in ("fl.example.org", "localhost", "127.0.0.1", "::1"):
        shake_hands(Certs(tmp_path), Certs(tmp_path).ca, host)


def test_an_authority_whose_certificate_was_moved_is_not_replaced(tmp_path: Path) -> None:
    certs = made(tmp_path, "north")
    before = {path: path.read_bytes() for path in (certs.ca_key, certs.server, certs.server_key)}
    certs.ca.rename(tmp_path / "elsewhere")
    for hosts in ((), HOSTS):
        with pytest.raises(UserError, match=r"ca\.crt is missing, which sites trust"):
            make_certs(tmp_path, hosts, ["west"])
    assert {path: path.read_bytes() for path in before} == before


def test_a_public_key_that_is_gone_is_made_again_from_the_private_one(tmp_path: Path) -> None:
    certs = made(tmp_path, "north")
    before = certs.node_public("north").read_bytes()
    certs.node_public("north").unlink()
    assert make_certs(tmp_path, (), ["north"]) == [certs.node_public("north")]
    assert certs.node_public("north").read_bytes() == before


def test_files_that_are_no_keys_are_named(tmp_path: Path) -> None:
    certs = made(tmp_path)
    certs.ca_key.write_text("rubbish")
    with pytest.raises(UserError, match=r"ca\.key holds no private key"):
        make_certs(tmp_path, HOSTS, ())
    certs.ca.write_text("rubbish")
    with pytest.raises(UserError, match=r"ca\.crt holds no certificate"):
        make_certs(tmp_path, HOSTS, ())


def test_another_name_is_refused(tmp_path: Path) -> None:
    certs = made(tmp_path)
    for host in ("example.org", "other.example.org", "127.0.0.2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(certs, certs.ca, host)


def test_another_authority_is_refused(tmp_path: Path) -> None:
    certs, other = made(tmp_path / "one"), made(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(certs, other.ca, "localhost")


def test_only_the_owner_reads_private_keys(tmp_path: Path) -> None:
    certs = made(tmp_path, "a")
    for path in (certs.ca_key, certs.server_key, certs.node_key("a")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.rglob(".*"))


def test_a_sites_keys_are_a_pair_on_the_curve_that_flower_wants(tmp_path: Path) -> None:
    certs = made(tmp_path, "hospital-a", "hospital-b")
    private = load_ssh_private_key(certs.node_key("hospital-a").read_bytes(), None)
    public = [load_ssh_public_key(certs.node_public(name).read_bytes()) for name in ("hospital-a", "hospital-b")]
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public[0]
    assert public[0] != public[1]


def test_another_site_later_changes_nothing_else(tmp_path: Path) -> None:
    certs = made(tmp_path, "a")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert make_certs(tmp_path, [], ["a", "b"]) == [certs.node_key("b"), certs.node_public("b")]
    assert {path: path.read_bytes() for path in before} == before


def test_another_host_is_signed_by_the_same_authority(tmp_path: Path) -> None:
    certs = made(tmp_path)
    authority = certs.ca.read_bytes()
    make_certs(tmp_path, ["new.example.org"], [])
    assert certs.ca.read_bytes() == authority
    shake_hands(certs, certs.ca, "new.example.org")


def test_authority_without_its_key_is_never_replaced(tmp_path: Path) -> None:
    certs = made(tmp_path)
    certs.ca_key.unlink()
    with pytest.raises(UserError, match=r"ca\.key is missing"):
        make_certs(tmp_path, ["localhost"], [])


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [(["300.1.1.1"], []), (["a b"], []), (["x..y"], []), (["localhost"], ["../a"]), (["localhost"], [""]), ([], ["a"])],
)
def test_bad_names_are_refused_before_anything_is_written(tmp_path: Path, hosts: list[str], nodes: list[str]) -> None:
    with pytest.raises(UserError, match="allowed"):
        make_certs(tmp_path / "certs", hosts, nodes)
    assert not (tmp_path / "certs").exists()
