"""Whom a TLS client trusts: contexts for foreign origins and for our own roles.

Foreign origins are verified against the system's own store, read once per context. (`truststore` reads the bundle
again for every connection on Linux, 10 ms each, and verifies no better there.)
"""

import os
import ssl
from collections.abc import Sequence
from typing import Final

from stormline.core import errors

_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch, Gentoo
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora, RHEL
    "/etc/ssl/cert.pem",  # Alpine, the BSDs
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""Where systems keep their roots, for a Python whose OpenSSL was built to look elsewhere."""
_OUT_OF_TIME: Final = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""


def foreign_context(alpn: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
    """Build the context for origins of others: the system's roots, names checked, TLS 1.2 and up.

    Args:
        alpn: protocols offered, the best first; empty offers none.
    """
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not (paths.cafile or (paths.capath and os.listdir(paths.capath))):
        for bundle in _BUNDLES:
            if os.path.isfile(bundle):
                context.load_verify_locations(cafile=bundle)
                break
    return _finish(context, ssl.TLSVersion.TLSv1_2, alpn)


def roles_context(ca_pem: bytes | str, alpn: Sequence[str]) -> ssl.SSLContext:
    """Build the context for our own roles: only the platform's CA, names checked, TLS 1.3 and nothing older.

    Args:
        ca_pem: one or more CA certificates.
        alpn: protocols offered, the best first; empty offers none.

    Raises:
        ConfigError: `ca_pem` holds no CA certificate.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name; knows no root yet
        context.load_verify_locations(cadata=ca_pem.decode("ascii") if isinstance(ca_pem, bytes) else ca_pem)
    except (ValueError, ssl.SSLError) as error:
        raise errors.ConfigError(f"the CA certificate cannot be read: {error}") from error
    if not context.get_ca_certs():
        raise errors.ConfigError("the CA certificate cannot be read: none of the certificates is a CA's")
    return _finish(context, ssl.TLSVersion.TLSv1_3, alpn)


def is_impostor(error: BaseException) -> bool:
    """Say whether a handshake failed because the peer is somebody else: its certificate is not the name's, or not
    trusted. One that is only too old or too new shows the right server, or a wrong clock of ours.
    """
    return isinstance(error, ssl.SSLCertVerificationError) and getattr(error, "verify_code", 0) not in _OUT_OF_TIME


def _finish(context: ssl.SSLContext, minimum: ssl.TLSVersion, alpn: Sequence[str]) -> ssl.SSLContext:
    context.minimum_version = minimum
    # A renegotiation (TLS 1.2) would need writes in the middle of reads; nobody uses it on purpose.
    context.options |= ssl.OP_NO_RENEGOTIATION
    # A name is in the subject alternative names or nowhere (RFC 9525 section 2): no look at the common name.
    context.hostname_checks_common_name = False
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context
