"""What a person can do about each verdict: all texts in one table, so that they can be translated.

A key is a condition, or condition and kind of network (`dead_wifi/cell`), which is looked for first.
"""

from collections.abc import Mapping
from typing import Final

HINTS: Final[Mapping[str, str]] = {
    "ok": "The network works.",
    "slow": "The network is slow. Move closer to the WiFi, or to a window; wait with large transfers.",
    "slow/cell": "The mobile network is slow here. Move to a place with better reception, or use a WiFi.",
    "no_network": "There is no network. Switch WiFi or mobile data on, or plug the cable in.",
    "airplane": "Flight mode is on. Switch it off, or switch WiFi on.",
    "permission": "This app may not use the network. Allow it in the system's settings (or in the firewall).",
    "router_fault": "The router does not answer. Restart the router, or switch to another network.",
    "router_fault/wifi": "The WiFi's router does not answer. Move closer to it or restart it, or switch to cellular.",
    "captive_portal": "This network wants you to log in. Open a page in the browser and log in to the network.",
    "dns_only_broken": "Names are not resolved rightly; the rest works. Choose another DNS server in the network's "
    "settings, or restart the router.",
    "dead_wifi": "The network is connected, but nothing passes. Switch to another network or to cellular.",
    "dead_wifi/wifi": "The WiFi is connected, but nothing passes. Switch to cellular or to another WiFi.",
    "dead_wifi/cell": "The mobile network is connected, but nothing passes. Move to a place with better reception, or "
    "switch flight mode on and off.",
    "dead_wifi/wired": "The cable is connected, but nothing passes beyond the router. Restart the router, or ask the "
    "provider.",
    "server_fault": "The network works, this server does not. Try again later.",
}
"""The table, in English."""


def hint(condition: str, kind: str = "unknown", table: Mapping[str, str] = HINTS) -> str:
    """Give the text for a condition on a kind of network; the table's general one where it has none for the kind.

    Args:
        condition: a `verdict.Condition`.
        kind: one of `network.KINDS`.
        table: the texts; another language's may lack some, which are then taken from `HINTS`.
    """
    for key in (f"{condition}/{kind}", condition):
        if key in table:
            return table[key]
    return HINTS.get(f"{condition}/{kind}", HINTS[condition])
