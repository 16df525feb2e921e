"""A small HTTPS request to a role of the platform, at an address, its answer gathered within a bound."""

from typing import NamedTuple

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool


class Answer(NamedTuple):
    """Status, headers (names as they came) and the whole body."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


async def post(
    pool: HttpPool,
    *,
    address: Address,
    server_name: str,
    path: str,
    headers: tuple[tuple[bytes, bytes], ...],
    body: bytes,
    timeout_s: float,
    size_max: int,
    secure: bool = True,
    addresses: tuple[Address, ...] | None = None,
) -> Answer:
    """POST `body` to `https://server_name/path` at `address`.

    Args:
        pool: connections; its TLS context decides whom to trust.
        address: where to connect; no DNS is asked where it is an IP literal.
        server_name: name for SNI, certificate and Host.
        path: absolute path.
        headers: beside Host and Content-Length.
        body: what to send.
        timeout_s: for all of it.
        size_max: longest body accepted.
        secure: False for clear HTTP; what is sent and what comes may then be read and changed by anybody.
        addresses: where to connect instead, of a name that was looked up.

    Raises:
        TransportError: no whole answer came in time, or it was longer than `size_max`.
    """
    request = HttpRequest(
        method="POST",
        scheme="https" if secure else "http",
        host=server_name if address.is_ip or addresses else address.host,
        port=address.port,
        target=path.encode("ascii"),
        headers=headers,
        body=body,
    )
    response = await pool.request(
        request,
        deadline_s=timeout_s,
        addresses=addresses or ((address,) if address.is_ip else None),
        server_name=server_name if secure else None,
    )
    try:
        gathered = bytearray()
        async for chunk in response.aiter_raw():
            gathered += chunk
            if len(gathered) > size_max:
                raise errors.ProtocolViolation(
                    f"{address}: answer of more than {size_max} bytes", phase=Phase.BODY, maybe_delivered=True
                )
    finally:
        await response.aclose()
    return Answer(response.status, tuple(response.headers), bytes(gathered))


def retry_after_s(headers: tuple[tuple[bytes, bytes], ...]) -> float:
    """Give the pause asked for (RFC 9110 section 10.2.3, seconds only), at most our own longest."""
    for name, value in headers:
        if name.lower() == b"retry-after" and value.isdigit() and len(value) <= 6:
            return min(float(value), 10 * limits.REPORT_RETRY_S)
    return 0.0
