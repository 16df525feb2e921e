"""The platform's authority: made once, found again, renewed in time, and clear about what is broken."""

import datetime
import hashlib
import os
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from stormline.assembly import authority
from stormline.assembly.authority import Authority, ensure_authority, ensure_signing_key
from stormline.core import errors
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles
from stormline.wire import jws

DAY_S = 86400.0


class Shifted:
    """The true clock, moved: `openssl` and `ssl` look at the machine's."""

    def __init__(self, days: float = 0.0) -> None:
        self._shift_s = days * DAY_S

    def monotonic(self) -> float:
        return SystemClock().monotonic()

    def wall(self) -> float:
        return SystemClock().wall() + self._shift_s


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "pki"


def make(folder: Path, days: float = 0.0) -> Authority:
    return ensure_authority(folder, clock=Shifted(days), rng=SystemRng())


def issue(ca: Authority, *names: str) -> TlsFiles:
    return ca.issue("gateway", names=names or ["gateway.internal"], ips=["127.0.0.1", "::1"])


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handshake(ca_pem: str, files: TlsFiles, name: str) -> str | None:
    """Shake hands in memory; give the TLS version."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(files.certificate, files.key)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours.load_verify_locations(cadata=ca_pem)
    ours.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    ours.minimum_version = ssl.TLSVersion.TLSv1_3
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(down, up, server_hostname=name)
    server = theirs.wrap_bio(up, down, server_side=True)
    for _ in range(5):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.version()


class TestAuthority:
    def test_first_start_makes_it_and_the_next_finds_it(self, folder: Path) -> None:
        first = make(folder)
        again = make(folder)
        assert first.ca_pem == again.ca_pem == first.certificate.read_text()
        assert sorted(path.name for path in folder.iterdir()) == ["ca-key.pem", "ca.pem"]

    def test_key_and_folder_are_for_the_owner_alone(self, folder: Path) -> None:
        ca = make(folder)
        files = issue(ca)
        assert mode(folder) == 0o700
        assert [mode(folder / "ca-key.pem"), mode(files.key)] == [0o600, 0o600]

    def test_open_folder_is_closed(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        make(folder)
        assert mode(folder) == 0o700

    def test_certificate_is_a_leaf_signing_authority_for_ten_years(self, folder: Path) -> None:
        cert = certificate(make(folder).certificate)
        constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints)
        usage = cert.extensions.get_extension_for_class(x509.KeyUsage)
        assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)
        assert (usage.critical, usage.value.key_cert_sign, usage.value.digital_signature) == (True, True, False)
        key = cert.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert isinstance(key.curve, ec.SECP256R1)
        assert cert.not_valid_after_utc - cert.not_valid_before_utc > datetime.timedelta(days=3650)

    def test_start_cut_short_after_the_key_is_finished(self, folder: Path) -> None:
        files = issue(make(folder))
        (folder / "ca.pem").unlink()
        again = make(folder)
        assert issue(again) == files
        assert handshake(again.ca_pem, files, "gateway.internal") == "TLSv1.3"

    def test_authority_that_has_ended_is_refused(self, folder: Path) -> None:
        make(folder)
        with pytest.raises(errors.ConfigError, match=r"ca\.pem: the authority ended"):
            make(folder, days=3653)

    def test_authority_near_its_end_does_not_sign(self, folder: Path) -> None:
        make(folder)
        with pytest.raises(errors.ConfigError, match="the authority ends"):
            issue(make(folder, days=3640))

    @pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem"])
    @pytest.mark.parametrize(
        "spoil",
        [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"\x00" * 200, lambda data: data[100:]],
        ids=["empty", "half", "zeros", "tail"],
    )
    def test_spoilt_file_is_refused_by_path(self, folder: Path, name: str, spoil: Callable[[bytes], bytes]) -> None:
        make(folder)
        path = folder / name
        path.write_bytes(spoil(path.read_bytes()))
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        with pytest.raises(errors.ConfigError) as caught:
            make(folder)
        assert str(path) in str(caught.value)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    def test_missing_key_is_refused_by_path(self, folder: Path) -> None:
        make(folder)
        (folder / "ca-key.pem").unlink()
        with pytest.raises(errors.ConfigError, match=r"ca-key\.pem: missing"):
            make(folder)

    def test_key_of_another_authority_is_refused(self, folder: Path, tmp_path: Path) -> None:
        make(folder)
        make(tmp_path / "other")
        (folder / "ca-key.pem").write_bytes((tmp_path / "other" / "ca-key.pem").read_bytes())
        with pytest.raises(errors.ConfigError, match="not the certificate of"):
            make(folder)

    def test_key_others_can_read_is_refused(self, folder: Path) -> None:
        make(folder)
        (folder / "ca-key.pem").chmod(0o640)
        with pytest.raises(errors.ConfigError, match="chmod 600"):
            make(folder)

    def test_leaf_in_place_of_the_authority_is_refused(self, folder: Path) -> None:
        files = issue(make(folder))
        (folder / "ca.pem").write_bytes(files.certificate.read_bytes())
        (folder / "ca-key.pem").write_bytes(files.key.read_bytes())
        with pytest.raises(errors.ConfigError, match="not the certificate of an authority"):
            make(folder)

    def test_folder_that_is_a_file_is_refused_by_path(self, tmp_path: Path) -> None:
        (tmp_path / "pki").write_text("x")
        with pytest.raises(errors.ConfigError, match="pki"):
            make(tmp_path / "pki")

    def test_repr_shows_no_key(self, folder: Path) -> None:
        assert "PRIVATE" not in repr(make(folder))
        assert "_key=" not in repr(make(folder))


class TestIssue:
    def test_leaf_is_what_a_server_needs(self, folder: Path) -> None:
        ca = make(folder)
        files = issue(ca)
        cert = certificate(files.certificate)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["gateway.internal"]
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
        usage = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
        assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert cert.not_valid_after_utc - cert.not_valid_before_utc < datetime.timedelta(days=398)
        assert files.key.read_bytes().startswith(b"-----BEGIN " + b"PRIVATE KEY-----")  # PKCS#8

    def test_openssl_verifies_it_strictly(self, folder: Path) -> None:
        ca = make(folder)
        files = issue(ca)
        done = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-check_ss_sig", "-purpose", "sslserver", "-verify_hostname",
             "gateway.internal", "-CAfile", str(ca.certificate), str(files.certificate)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    def test_tls_1_3_handshake_by_name_and_by_address(self, folder: Path) -> None:
        ca = make(folder)
        files = issue(ca)
        for name in ("gateway.internal", "127.0.0.1", "::1"):
            assert handshake(ca.ca_pem, files, name) == "TLSv1.3"

    def test_handshake_under_another_name_or_authority_fails(self, folder: Path, tmp_path: Path) -> None:
        files = issue(make(folder))
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(make(folder).ca_pem, files, "dispatch.internal")
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(make(tmp_path / "other").ca_pem, files, "gateway.internal")

    def test_same_names_in_another_form_keep_it(self, folder: Path) -> None:
        before = issue(make(folder), "a.internal", "b.internal").certificate.read_bytes()
        again = make(folder).issue("gateway", names=["B.internal.", "a.internal"], ips=["0:0::1", "127.0.0.1"])
        assert again.certificate.read_bytes() == before

    @pytest.mark.parametrize(
        ("days", "kept"), [(0.0, True), (330.0, True), (334.0, True), (336.0, False), (400.0, False)]
    )
    def test_it_is_made_again_within_thirty_days_of_its_end(self, folder: Path, days: float, kept: bool) -> None:
        before = issue(make(folder)).certificate.read_bytes()
        files = issue(make(folder, days=days))
        assert (files.certificate.read_bytes() == before) is kept
        assert certificate(files.certificate).public_key() == read_public(files.key)

    def test_it_is_made_again_for_other_names(self, folder: Path) -> None:
        ca = make(folder)
        before = issue(ca, "a.internal").certificate.read_bytes()
        files = issue(ca, "a.internal", "b.internal")
        assert files.certificate.read_bytes() != before
        assert handshake(ca.ca_pem, files, "b.internal") == "TLSv1.3"

    def test_it_is_made_again_for_a_new_authority(self, folder: Path) -> None:
        issue(make(folder))
        (folder / "ca.pem").unlink()
        (folder / "ca-key.pem").unlink()
        ca = make(folder)
        assert handshake(ca.ca_pem, issue(ca), "gateway.internal") == "TLSv1.3"

    @pytest.mark.parametrize("gone", [("gateway.pem",), ("gateway-key.pem",)])
    def test_half_a_pair_is_made_again(self, folder: Path, gone: tuple[str, ...]) -> None:
        ca = make(folder)
        issue(ca)
        for name in gone:
            (folder / name).unlink()
        assert handshake(ca.ca_pem, issue(ca), "gateway.internal") == "TLSv1.3"

    def test_unequal_pair_is_made_again(self, folder: Path) -> None:
        ca = make(folder)
        issue(ca)
        other = ca.issue("other", names=["other.internal"])
        (folder / "gateway-key.pem").write_bytes(other.key.read_bytes())
        assert handshake(ca.ca_pem, issue(ca), "gateway.internal") == "TLSv1.3"

    @pytest.mark.parametrize("name", ["gateway.pem", "gateway-key.pem"])
    @pytest.mark.parametrize("size", [0, 60, 150])
    def test_spoilt_file_is_refused_by_path(self, folder: Path, name: str, size: int) -> None:
        ca = make(folder)
        issue(ca)
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(errors.ConfigError) as caught:
            issue(ca)
        assert str(path) in str(caught.value)

    def test_left_over_temporary_file_does_not_matter(self, folder: Path) -> None:
        ca = make(folder)
        (folder / f".gateway.pem.{os.getpid()}").write_text("half")
        assert handshake(ca.ca_pem, issue(ca), "gateway.internal") == "TLSv1.3"
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []

    @pytest.mark.parametrize(
        ("role", "names", "ips"),
        [
            ("../x", ["a.internal"], []),
            ("", ["a.internal"], []),
            ("ca", ["a.internal"], []),
            ("gateway", [], []),
            ("gateway", ["*.internal"], []),
            ("gateway", ["127.0.0.1"], []),
            ("gateway", ["a.internal"], ["127.0.0.300"]),
            ("gateway", ["a.internal"], ["localhost"]),
        ],
    )
    def test_malformed_name_is_refused(self, folder: Path, role: str, names: list[str], ips: list[str]) -> None:
        ca = make(folder)
        with pytest.raises(errors.ConfigError, match="certificate of role"):
            ca.issue(role, names=names, ips=ips)
        assert sorted(path.name for path in folder.iterdir()) == ["ca-key.pem", "ca.pem"]


def read_public(path: Path) -> object:
    return serialization.load_pem_private_key(path.read_bytes(), password=None).public_key()


class TestSigningKey:
    def test_first_start_makes_it_and_the_next_finds_it(self, tmp_path: Path) -> None:
        path = tmp_path / "keys" / "plan-key.pem"
        first, again = ensure_signing_key(path, "plan"), ensure_signing_key(path, "plan")
        assert first.kid == again.kid
        assert first.public_text == again.public_text
        assert mode(path) == 0o600

    def test_kid_is_the_prefix_and_the_hash_of_the_public_key(self, tmp_path: Path) -> None:
        key = ensure_signing_key(tmp_path / "k" / "plan-key.pem", "plan")
        digest = hashlib.sha256(jws.b64url_decode(key.public_text)).digest()
        assert key.kid == f"plan-{jws.b64url(digest)[:8]}"
        assert authority.key_id("token", key.key.public_key()) == f"token-{jws.b64url(digest)[:8]}"

    def test_openssl_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "k" / "plan-key.pem"
        key = ensure_signing_key(path, "plan")
        done = subprocess.run(["openssl", "pkey", "-in", str(path), "-pubout", "-outform", "DER"], capture_output=True)
        assert done.stdout.endswith(key.key.public_key().public_bytes_raw())

    @pytest.mark.parametrize("size", [0, 50])
    def test_spoilt_file_is_refused_by_path_and_left(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / "k" / "plan-key.pem"
        ensure_signing_key(path, "plan")
        data = path.read_bytes()[:size]
        path.write_bytes(data)
        with pytest.raises(errors.ConfigError, match=r"plan-key\.pem: not a private key"):
            ensure_signing_key(path, "plan")
        assert path.read_bytes() == data

    def test_key_others_can_read_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "k" / "plan-key.pem"
        ensure_signing_key(path, "plan")
        path.chmod(0o644)
        with pytest.raises(errors.ConfigError, match="chmod 600"):
            ensure_signing_key(path, "plan")

    def test_dangling_link_is_not_written_through(self, tmp_path: Path) -> None:
        path = tmp_path / "k" / "plan-key.pem"
        path.parent.mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere.pem")
        with pytest.raises(errors.ConfigError, match=r"plan-key\.pem"):
            ensure_signing_key(path, "plan")
        assert not (tmp_path / "elsewhere.pem").exists()

    def test_key_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        files = make(tmp_path / "pki").issue("gateway", names=["gateway.internal"])
        with pytest.raises(errors.ConfigError, match="not an Ed25519 key"):
            ensure_signing_key(files.key, "plan")


def test_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = make(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.ConfigError, match="No space left"):
        issue(ca)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_ed25519_is_not_taken_for_a_certificates_key(folder: Path) -> None:
    ca = make(folder)
    issue(ca)
    raw = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "gateway-key.pem").write_bytes(raw)
    with pytest.raises(errors.ConfigError, match="not a P-256 key"):
        issue(ca)
