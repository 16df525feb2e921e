"""Commands talking to the running platform of this machine: through its public HTTP APIs, as any program would."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from stormline.assembly import layout, lock
from stormline.assembly.names import SERVER_NAMES
from stormline.core import errors, limits, limits_platform
from stormline.core.values import Secret
from stormline.settings import load


def place(environ: Mapping[str, str], state: Path | None) -> layout.Layout:
    """Give the state folder a command means."""
    return layout.Layout(load.state_folder(environ, state))


def running(where: layout.Layout) -> layout.Admin:
    """Give what is needed to reach the platform that runs on a state folder.

    Raises:
        PlatformError: none runs there.
    """
    admin = layout.read(where.admin, layout.Admin)
    if admin is None or lock.holder(where.lock) is None:
        raise errors.PlatformError(
            f"no platform runs on {where.state}: start one with 'stormline up --demo', "
            "or name its folder with --state or STORMLINE_STATE"
        )
    return admin


class AdminApi:
    """HTTP client of one part's admin API. Use as a context manager."""

    def __init__(
        self, admin: layout.Admin, part: str, key: Secret, *, timeout_s: float = limits_platform.ADMIN_TIMEOUT_S
    ) -> None:
        import httpx2

        if part not in admin.addresses:
            raise errors.PlatformError(f"{part} is not part of the running platform (it was started with --only)")
        self._part = part
        self._address = admin.addresses[part]
        self._name = SERVER_NAMES.get(part)
        verify: ssl.SSLContext | bool = True
        if self._name:
            verify = ssl.create_default_context(cafile=admin.ca_file)
        self._http = httpx2.Client(
            base_url=f"{'https' if self._name else 'http'}://{self._address}",
            headers={"authorization": f"Bearer {key.reveal()}"},
            timeout=timeout_s,
            verify=verify,
            trust_env=False,  # a proxy for the internet is no way to this machine
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str | int | float] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Make one request and give the JSON of its answer.

        Args:
            method: of HTTP.
            path: with the leading `/`.
            body: sent as JSON.
            query: parameters.
            content: JSON as it is, instead of `body`.
            headers: more of them.

        Raises:
            PlatformError: the part does not answer, refuses, or answers something else than JSON.
        """
        import httpx2

        extensions = {"sni_hostname": self._name} if self._name else {}
        try:
            answer = self._http.request(
                method,
                path,
                json=body,
                content=content,
                params=dict(query) if query else None,
                headers={**({} if content is None else {"content-type": "application/json"}), **(headers or {})},
                extensions=extensions,
            )
        except httpx2.HTTPError as error:
            raise errors.PlatformError(f"{self._part} at {self._address} does not answer: {error}") from error
        if answer.is_error:
            raise errors.PlatformError(f"{self._part}: HTTP {answer.status_code}: {_reason(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise errors.PlatformError(f"{self._part}: {path} gave no JSON") from error


def _reason(answer: Any) -> str:
    """Read why not: every API here says `{"error": {"code", "message"}}`."""
    try:
        return str(answer.json()["error"]["message"])[: limits.REASON_CHARS_MAX]
    except (ValueError, TypeError, KeyError):
        return str(answer.reason_phrase)
