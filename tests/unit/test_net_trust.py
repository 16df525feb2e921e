"""Contexts trust whom they say and nobody else."""

import ssl

import pytest

from stormline.core import errors
from stormline.net.trust import foreign_context, roles_context


def test_foreign_context_verifies_names_from_tls_1_2():
    context = foreign_context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("pem", [b"", b"  \n", b"not a certificate", "é".encode(), ""])
def test_roles_context_without_a_ca_is_a_config_error_and_never_the_system_store(pem):
    with pytest.raises(errors.ConfigError, match="CA certificate"):
        roles_context(pem, ["sl/1"])
