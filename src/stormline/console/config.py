"""What the console role is told at its start."""

from dataclasses import dataclass
from pathlib import Path

from stormline.core.values import Secret
from stormline.web.server import TlsFiles


@dataclass(frozen=True, kw_only=True)
class ConsoleConfig:
    """Settings of the console role.

    Attributes:
        host: address to listen on. Beyond loopback give `tls` too: the session cookie is as good as the key.
        port: TCP port, 0 for a free one.
        tls: certificate and key; None serves plain HTTP.
        host_names: names, besides `localhost` and IP literals, by which browsers may address the console. Any other
            name in a `Host` header is refused (DNS rebinding).
        apm_url: base URL of the APM, `https://127.0.0.1:7443`.
        apm_ca: CA file that signed the APM's certificate; None trusts the system's.
        admin_key: bearer key of the APM's admin API.
        access_key: the key in the link that opens the console; at least 16 characters, drawn anew at each start.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    host_names: tuple[str, ...] = ()
    apm_url: str
    apm_ca: Path | None = None
    admin_key: Secret
    access_key: Secret
