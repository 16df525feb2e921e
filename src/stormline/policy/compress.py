"""Whether an answer is worth compressing on its way to a device, and how: by what it is and by the device's network.

On a weak network bytes cost most: brotli, which makes small bodies smallest, at a quality that takes some processor
time. On a middling one zstd, which is as good as brotli at a quarter of the time there. Where the network is good, or
nothing is known of it, only large bodies, by the cheapest zstd.
Never what is coded already, nor a part of a body (RFC 9110 section 14), nor what says `no-transform` (RFC 9111
section 5.2.2.6), nor a stream of events: its pieces are small and each must leave at once.
"""

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from stormline.core import limits_api as limits

_TEXTS: Final = (
    "text/", "application/json", "application/xml", "application/javascript", "application/graphql",
    "application/x-ndjson", "application/wasm", "application/manifest", "application/x-javascript", "image/svg",
    "application/geo+json", "application/ld+json", "application/problem+json", "font/ttf", "application/yaml",
)  # fmt: skip


class Quality(enum.IntEnum):
    """How much a device's network can carry, as far as is known."""

    WEAK = 0
    MIDDLING = 1
    GOOD = 2


class Coding(NamedTuple):
    """How a body is coded.

    Attributes:
        name: as in `Content-Encoding`.
        level: the compressor's.
    """

    name: str
    level: int


_BY_QUALITY: Final = {
    Quality.WEAK: (Coding("br", 5), Coding("zstd", 6)),
    Quality.MIDDLING: (Coding("zstd", 3), Coding("br", 4)),
    Quality.GOOD: (Coding("zstd", 1), Coding("br", 1)),
}
"""What is preferred, best first: as measured on lists in JSON, see the how-to."""


def quality(network: str, header: Callable[[str], str]) -> Quality:
    """Say how good a device's network is.

    Args:
        network: its kind as the device said in its HELLO: `wifi`, `cell`, `wired` or `unknown`.
        header: gives the value of a field of the request by its name, empty where there is none. `Save-Data` and `ECT`
            are those of the Network Information API (WICG).
    """
    effective = header("ect").lower()
    if header("save-data").lower() == "on" or effective in ("slow-2g", "2g"):
        return Quality.WEAK
    if effective == "3g":
        return Quality.MIDDLING
    if effective == "4g":
        return Quality.GOOD
    return Quality.MIDDLING if network == "cell" else Quality.GOOD


def choose(
    network: Quality, *, accept: str, status: int, length: int | None, header: Callable[[str], str]
) -> Coding | None:
    """Choose the coding of an answer; None: it goes as it is.

    Args:
        network: the device's.
        accept: the request's `Accept-Encoding`.
        status: the answer's.
        length: its body's bytes, None where they are not known.
        header: gives the value of a field of the answer by its name, empty where there is none.
    """
    least = limits.COMPRESS_GOOD_BYTES_MIN if network is Quality.GOOD else limits.COMPRESS_BYTES_MIN
    if length is not None and not least <= length <= limits.COMPRESS_BYTES_MAX:
        return None
    if status in (204, 206, 304) or header("content-encoding") or header("content-range"):
        return None
    kind = header("content-type").lower()
    plain = kind.startswith(_TEXTS) or kind.partition(";")[0].rstrip().endswith(("+json", "+xml"))
    if not plain or kind.startswith("text/event-stream") or "no-transform" in header("cache-control").lower():
        return None
    taken = _accepted(accept)
    return next((coding for coding in _BY_QUALITY[network] if taken.get(coding.name, 0.0) > 0.0), None)


def _accepted(accept: str) -> dict[str, float]:
    """Read `Accept-Encoding` (RFC 9110 section 12.5.3); `*` stands for no coding here: who means one names it."""
    found = {}
    for part in accept.lower().split(","):
        name, *parameters = (each.strip() for each in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        found[name] = weight
    return found
