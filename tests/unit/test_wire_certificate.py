"""What is read of a certificate, without trusting it."""

import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_diagnosis as limits
from stormline.wire import certificate

BEGINS = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
KEY = ec.generate_private_key(ec.SECP256R1())


def made(*names: x509.GeneralName, subject: str = "shop", issuer: str = "shop") -> bytes:
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(KEY.public_key())
        .serial_number(1)
        .not_valid_before(BEGINS)
        .not_valid_after(BEGINS + datetime.timedelta(days=10))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_certificate_tells_who_for_whom_and_when() -> None:
    found = certificate.read(made(x509.DNSName("Shop.Test"), issuer="an authority"))
    assert found is not None
    assert (found.subject, found.issuer, found.self_signed) == ("shop", "an authority", False)
    assert (found.not_before, found.not_after) == (BEGINS.timestamp(), BEGINS.timestamp() + 864_000)
    assert len(found.fingerprint) == 64
    assert certificate.read(made()).self_signed  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("host", "covered"),
    [("shop.test", True), ("SHOP.test", True), ("a.wild.test", True), ("a.b.wild.test", False), ("wild.test", False),
     ("192.0.2.1", True), ("2001:db8::1", True), ("192.0.2.2", False), ("", False), ("test", False)],
)  # fmt: skip
def test_hosts_that_a_certificate_covers(host: str, covered: bool) -> None:
    der = made(
        x509.DNSName("shop.test"),
        x509.DNSName("*.wild.test"),
        x509.IPAddress(ipaddress.ip_address("192.0.2.1")),
        x509.IPAddress(ipaddress.ip_address("2001:db8::1")),
    )
    found = certificate.read(der)
    assert found is not None
    assert found.covers(host) is covered


def test_common_name_covers_nothing() -> None:
    found = certificate.read(made(subject="shop.test"))
    assert found is not None
    assert not found.covers("shop.test")


@given(st.binary(max_size=200))
def test_any_bytes_give_none_or_a_certificate(data: bytes) -> None:
    assert certificate.read(data) is None or len(data) > 50


@given(st.integers(0, 400), st.integers(0, 255))
def test_damaged_certificate_is_read_or_not_and_never_an_error(at: int, byte: int) -> None:
    der = bytearray(made(x509.DNSName("shop.test"), subject="x" * 64))
    der[at % len(der)] = byte
    found = certificate.read(bytes(der))
    assert found is None or len(found.subject) <= limits.DIAGNOSIS_TEXT_CHARS_MAX
