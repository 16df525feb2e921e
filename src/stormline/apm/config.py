"""What the APM role is told at its start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stormline.core.values import Secret
from stormline.web.server import TlsFiles


@dataclass(frozen=True, kw_only=True)
class ApmConfig:
    """Settings of the APM role.

    Attributes:
        host: address to listen on.
        port: TCP port, 0 for a free one.
        tls: certificate and key; None serves plain HTTP, right only on loopback or behind a TLS terminator.
        store_path: folder of the embedded store; exactly one of `store_path` and `store_url` is set. One process at
            a time can hold the folder.
        store_url: a ClickHouse server as `clickhouse-connect` DSN (`http://user:password@host:8123/database`).
        token_keys: public keys that sign device tokens, base64url by key id.
        admin_key: bearer key of the admin API (`/v1/top` and so on); at least 16 characters.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    store_path: Path | None = None
    store_url: Secret | None = None
    token_keys: Mapping[str, str]
    admin_key: Secret
