"""What a server's certificate says of itself, read without judging it (RFC 5280)."""

import hashlib
import ipaddress
import warnings
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.x509.oid import NameOID

from stormline.core import limits_diagnosis as limits

_MALFORMED: Final = (
    ValueError,
    TypeError,
    ArithmeticError,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


class Certificate(NamedTuple):
    """A certificate.

    Attributes:
        subject: whom it is for, its common name or all of it.
        issuer: who gave it, likewise.
        names: the names and addresses that it holds for.
        not_before: from when, seconds since 1970.
        not_after: until when.
        fingerprint: SHA-256 of all of it, hexadecimal.
        self_signed: issuer and subject are the same.
    """

    subject: str
    issuer: str
    names: tuple[str, ...]
    not_before: float
    not_after: float
    fingerprint: str
    self_signed: bool

    def covers(self, host: str) -> bool:
        """Say whether it is for a host: by its subject alternative names, a `*` for one label (RFC 9525 section 6)."""
        host = host.lower().rstrip(".")
        try:
            return str(ipaddress.ip_address(host.partition("%")[0])) in self.names
        except ValueError:
            above = host.partition(".")[2]
            return host in self.names or bool(above and f"*.{above}" in self.names)


def read(der: bytes) -> Certificate | None:
    """Read a certificate; None for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of oddities in a stranger's certificate
            found = x509.load_der_x509_certificate(der)
            return Certificate(
                subject=_shown(found.subject),
                issuer=_shown(found.issuer),
                names=_names(found),
                not_before=found.not_valid_before_utc.timestamp(),
                not_after=found.not_valid_after_utc.timestamp(),
                fingerprint=hashlib.sha256(der).hexdigest(),
                self_signed=found.subject == found.issuer,
            )
    except _MALFORMED:
        return None


def _shown(name: x509.Name) -> str:
    common = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    text = str(common[0].value) if common else name.rfc4514_string()
    return text[: limits.DIAGNOSIS_TEXT_CHARS_MAX]


def _names(found: x509.Certificate) -> tuple[str, ...]:
    try:
        told = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    names = [each.lower() for each in told.get_values_for_type(x509.DNSName)]
    names += [str(each) for each in told.get_values_for_type(x509.IPAddress)]
    return tuple(names)
