"""What a person can do about each verdict: all texts in one table, so that they can be translated.

A key is a condition, or condition and kind of network (`dead_wifi/cell`), which is looked for first. Those after
`server_fault` are what only a diagnosis tells (`policy.diagnosis`).
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
    "dns_hijack": "This network gives false addresses for names. Choose another DNS server, or use a VPN or cellular.",
    "tls_interception": "Somebody on this network reads encrypted connections. Do not log in here; if it is your "
    "company's network, have its certificate installed; else use another network.",
    "injected_page": "This network changes pages that are not encrypted. Use https, or another network.",
    "udp_blocked": "This network lets no UDP pass, so QUIC falls back to TCP. For more speed, allow UDP port 443 in "
    "the firewall, or use another network.",
    "udp_degraded": "This network carries UDP badly, so QUIC is slow here. TCP is used instead; switch to another "
    "network for more speed.",
    "ipv6_broken": "IPv6 does not work here, IPv4 does. Restart the router; if that does not help, switch IPv6 off in "
    "it, or ask the provider.",
    "clock_wrong": "The clock of this device is wrong. Set date and time, or switch automatic time on.",
    "mtu_blackhole": "Large packets get lost on the way. Switch the VPN off, or set a smaller MTU (1280) in the "
    "router.",
    "proxy_fault": "The proxy does not do its work. Check the proxy in the system's settings, or switch it off.",
    "unknown": "Nothing certain was found. Try again, or try on another network.",
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
