"""The platform's own certificate authority and signing keys: made at first start, kept in one folder.

It signs certificates of the platform's roles only. Clients know it from their bundle; it never belongs in a system's
trust store. Everything lies in plain PEM files, so `openssl` can look at it:

    FOLDER/            0700
    ├── ca.pem         certificate authority, public
    ├── ca-key.pem     0600
    ├── ROLE.pem       certificate of a role
    └── ROLE-key.pem   0600

One process at a time may call these functions on one folder (assembly holds the state folder's lock). A crash at any
moment leaves each file old or new, never half; a pair of files that a crash left unequal is made again.
"""

import datetime
import hashlib
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock, Rng
from stormline.dispatch.signer import read_signing_key
from stormline.net.files import write_atomic
from stormline.web.server import TlsFiles
from stormline.wire import hostname, jws

AUTHORITY_LIFE: Final = datetime.timedelta(days=3652)
LEAF_LIFE: Final = datetime.timedelta(days=365)
RENEW_BEFORE: Final = datetime.timedelta(days=30)
"""A role's certificate is made again at a start this near to its end."""
BACKDATE: Final = datetime.timedelta(days=1)
"""How far before now a certificate begins: devices' clocks are slow by hours now and then."""


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A certificate authority that is ready to sign.

    Attributes:
        folder: where everything lies.
        certificate: path of the authority's certificate.
        ca_pem: its text, for bundles.
    """

    folder: Path
    certificate: Path
    ca_pem: str
    _certificate: x509.Certificate = field(repr=False)
    _key: ec.EllipticCurvePrivateKey = field(repr=False)
    _clock: Clock = field(repr=False)
    _rng: Rng = field(repr=False)

    def issue(self, role: str, *, names: Sequence[str], ips: Sequence[str] = ()) -> TlsFiles:
        """Give a role's certificate and key, made again where that is needed.

        It is made again where there is none, within `RENEW_BEFORE` of its end, and where it is not for exactly
        these names and addresses, not of this authority or not of the key beside it.

        Args:
            role: label of the role, also the files' name.
            names: DNS names clients check it against.
            ips: IP addresses clients may check it against.

        Raises:
            ConfigError: a name or address is malformed, none is given, the authority is near its end, or a file is
                corrupt or cannot be written; the message names it.
        """
        ids.check_label(role, "certificate of role")
        if role == "ca":
            raise errors.ConfigError("certificate of role 'ca': that name is the authority's own")
        san = _alternative_names(role, names, ips)
        files = TlsFiles(self.folder / f"{role}.pem", self.folder / f"{role}-key.pem")
        now = _now(self._clock)
        if self._is_current(files, san, now):
            return files
        if now + RENEW_BEFORE >= self._certificate.not_valid_after_utc:
            raise errors.ConfigError(
                f"{self.certificate}: the authority ends {self._certificate.not_valid_after_utc:%Y-%m-%d}; "
                f"remove {self.folder} for a new one, and give clients a new bundle"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(role, key.public_key(), san, now)
        # The key first: the certificate that counts is never without its key.
        _write(files.key, _key_pem(key), mode=0o600)
        _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
        return files

    def _is_current(self, files: TlsFiles, san: x509.SubjectAlternativeName, now: datetime.datetime) -> bool:
        certificate = _read_certificate(files.certificate)
        key = _read_key(files.key)
        if certificate is None or key is None or certificate.public_key() != key.public_key():
            return False
        if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc - RENEW_BEFORE:
            return False
        try:
            certificate.verify_directly_issued_by(self._certificate)
            held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
            return False
        return held == san

    def _sign(
        self, role: str, key: ec.EllipticCurvePublicKey, san: x509.SubjectAlternativeName, now: datetime.datetime
    ) -> x509.Certificate:
        issuer_id = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"stormline {role}")]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(_serial(self._rng))
            .not_valid_before(max(now - BACKDATE, self._certificate.not_valid_before_utc))
            .not_valid_after(min(now + LEAF_LIFE, self._certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(san, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def ensure_authority(folder: Path, *, clock: Clock, rng: Rng) -> Authority:
    """Read the authority in `folder`, or make it where there is none.

    A key without a certificate is a first start that was cut short: the certificate is made for it.

    Raises:
        ConfigError: a file is corrupt, half-written, open to other users or of another pair, the authority has
            ended, or the folder cannot be used; the message names the path.
    """
    make_folder(folder)
    certificate_path, key_path = folder / "ca.pem", folder / "ca-key.pem"
    key = _read_key(key_path)
    certificate = _read_certificate(certificate_path)
    now = _now(clock)
    if certificate is not None and key is None:
        raise errors.ConfigError(f"{key_path}: missing, while {certificate_path} is there; restore it, or remove both")
    if key is None:
        key = ec.generate_private_key(ec.SECP256R1())
        _write(key_path, _key_pem(key), mode=0o600)
    if certificate is None:
        certificate = _make_authority(key, now=now, rng=rng)
        _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    if certificate.public_key() != key.public_key():
        raise errors.ConfigError(f"{certificate_path}: not the certificate of {key_path}")
    _check_is_authority(certificate, certificate_path)
    if now >= certificate.not_valid_after_utc:
        raise errors.ConfigError(f"{certificate_path}: the authority ended {certificate.not_valid_after_utc:%Y-%m-%d}")
    return Authority(
        folder=folder,
        certificate=certificate_path,
        ca_pem=certificate.public_bytes(serialization.Encoding.PEM).decode("ascii"),
        _certificate=certificate,
        _key=key,
        _clock=clock,
        _rng=rng,
    )


def key_id(kid_prefix: str, key: Ed25519PublicKey) -> str:
    """Give the id of a signing key: the prefix, and the first 8 base64url characters of its SHA-256."""
    return f"{kid_prefix}-{jws.b64url(hashlib.sha256(key.public_bytes_raw()).digest())[:8]}"


def ensure_signing_key(path: Path, kid_prefix: str) -> jws.SigningKey:
    """Read an Ed25519 signing key, or make it where there is none (PEM PKCS#8, 0600).

    Args:
        path: the file.
        kid_prefix: what the key is for; the first part of its id.

    Raises:
        ConfigError: the file is corrupt, of another kind, open to other users, or cannot be written.
    """
    make_folder(path.parent)
    if _is_there(path):
        _check_private(path)
        key = read_signing_key(path)
    else:
        key = Ed25519PrivateKey.generate()
        _write(path, _key_pem(key), mode=0o600)
    return jws.SigningKey(key, key_id(kid_prefix, key.public_key()))


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, or close one that others can.

    Raises:
        ConfigError: it cannot be made or is not ours.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise errors.ConfigError(f"{folder}: cannot be used as a folder for keys: {error.strerror}") from error


def _now(clock: Clock) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(clock.wall()), datetime.UTC)


def _serial(rng: Rng) -> int:
    # Positive, at most 20 octets, unpredictable (RFC 5280 section 4.1.2.2).
    return int.from_bytes(b"\x01" + rng.token_bytes(18), "big")


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _make_authority(key: ec.EllipticCurvePrivateKey, *, now: datetime.datetime, rng: Rng) -> x509.Certificate:
    # The key's id in the name keeps two platforms' authorities apart, and a certificate that was lost and made again
    # for the same key still fits what clients hold and what was signed before.
    subject_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "stormline"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"stormline platform {subject_id.digest.hex()[:8]}"),
        ]
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(_serial(rng))
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + AUTHORITY_LIFE)
        # It signs leafs only. Names are not constrained: an operator's own addresses are not known here, and no
        # system trusts this authority, only bundles do.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(subject_id, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_id), critical=False)
        .sign(key, hashes.SHA256())
    )


def _check_is_authority(certificate: x509.Certificate, path: Path) -> None:
    try:
        certificate.verify_directly_issued_by(certificate)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise errors.ConfigError(f"{path}: not the certificate of an authority of ours") from error
    if not constraints.ca:
        raise errors.ConfigError(f"{path}: not the certificate of an authority")


def _alternative_names(role: str, names: Sequence[str], ips: Sequence[str]) -> x509.SubjectAlternativeName:
    try:
        hosts = sorted({hostname.normalise(name) for name in names})
        addresses = sorted({ipaddress.ip_address(ip) for ip in ips}, key=lambda ip: (ip.version, int(ip)))
    except (errors.ConfigError, ValueError) as error:
        raise errors.ConfigError(f"certificate of role {role!r}: {error}") from error
    for host in hosts:
        if hostname.is_address(host):
            raise errors.ConfigError(f"certificate of role {role!r}: {host!r} is an address, not a name")
    if not hosts and not addresses:
        raise errors.ConfigError(f"certificate of role {role!r}: no name and no address to be known by")
    return x509.SubjectAlternativeName([*map(x509.DNSName, hosts), *map(x509.IPAddress, addresses)])


# -- files ------------------------------------------------------------------------------------------------------------


def _key_pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _check_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise errors.ConfigError(f"{path}: a key that other users can read; 'chmod 600' it, or remove it")


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(limits.PLATFORM_FILE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _read_certificate(path: Path) -> x509.Certificate | None:
    data = _read(path)
    if data is None:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(data)
        certificate.public_key()
        _ = certificate.extensions
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise errors.ConfigError(
            f"{path}: not a certificate, or half of one; remove it to have it made again"
        ) from error
    return certificate


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    data = _read(path)
    if data is None:
        return None
    _check_private(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise errors.ConfigError(f"{path}: not a private key, or half of one") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise errors.ConfigError(f"{path}: not a P-256 key")
    return key


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Put `data` at `path` in one step that outlives a power cut."""
    try:
        write_atomic(path, data, mode=mode)
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot be written: {error.strerror}") from error
