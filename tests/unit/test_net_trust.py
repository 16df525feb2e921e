"""Contexts trust whom they say and nobody else."""

import ssl

import pytest

from stormline.assembly.authority import ensure_authority
from stormline.core import errors
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.trust import foreign_context, roles_context


def test_foreign_context_verifies_names_from_tls_1_2():
    context = foreign_context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_no_context_takes_a_name_from_the_common_name(tmp_path):
    authority = ensure_authority(tmp_path / "ca", clock=SystemClock(), rng=SystemRng())
    for context in (foreign_context(), roles_context(authority.ca_pem, ["sl/1"])):
        assert context.hostname_checks_common_name is False


@pytest.mark.parametrize("pem", [b"", b"  \n", b"not a certificate", "é".encode(), ""])
def test_roles_context_without_a_ca_is_a_config_error_and_never_the_system_store(pem):
    with pytest.raises(errors.ConfigError, match="CA certificate"):
        roles_context(pem, ["sl/1"])
