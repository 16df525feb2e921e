"""What the APM role is told at its start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stormline.core.values import Secret
from stormline.web.server import TlsFiles


class DispatchAdmin(NamedTuple):
    """The admin API of a scheduling centre.

    Attributes:
        url: its base, such as `https://192.0.2.1:8700`.
        admin_key: its bearer key.
        ca: CA file that vouches for it, None for the system's roots.
        server_name: name in its certificate, empty for the host of the URL.
    """

    url: str
    admin_key: Secret
    ca: Path | None = None
    server_name: str = ""


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
        dispatch: whom to tell how roll-outs fare and which addresses are bad; None for nobody.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    store_path: Path | None = None
    store_url: Secret | None = None
    token_keys: Mapping[str, str]
    admin_key: Secret
    dispatch: DispatchAdmin | None = None
