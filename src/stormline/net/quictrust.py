"""Whom a QUIC connection believes. Its TLS is not the system's OpenSSL: trust is carried over as certificates.

A context that an application made itself (`verify`) rules alone, and what it says cannot be read out of it (client
certificates, flags, hooks): where there is one, there is no HTTP/3.
"""

import functools
import ssl

from stormline.core import errors
from stormline.net.trust import foreign_context, roles_context


class QuicTrust:
    """Roots, as PEM; names are always checked. Compared by identity, as contexts are."""

    __slots__ = ("pem",)

    def __init__(self, pem: bytes) -> None:
        self.pem = pem


@functools.cache
def foreign_trust() -> QuicTrust:
    """Trust the system's roots; read once.

    Raises:
        ConfigError: the system shows none.
    """
    return _of(foreign_context(()))


def roles_trust(ca_pem: bytes | str) -> QuicTrust:
    """Trust the platform's CA alone.

    Raises:
        ConfigError: `ca_pem` holds no CA certificate.
    """
    return _of(roles_context(ca_pem, ()))


def _of(context: ssl.SSLContext) -> QuicTrust:
    roots = context.get_ca_certs(binary_form=True)
    if not roots:
        raise errors.ConfigError("no root certificates: HTTP/3 has nobody to trust")
    return QuicTrust("".join(map(ssl.DER_cert_to_PEM_cert, roots)).encode("ascii"))
