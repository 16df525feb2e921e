"""What Linux tells of radios without being asked for privileges: kind of an interface, SSID, signal, flight mode.

All of it is best effort: a file or a call that is not there means "unknown", never an error.
"""

import contextlib
import socket
import struct
from pathlib import Path
from typing import Final

from stormline.core import limits_network as limits
from stormline.core.values import Secret
from stormline.net.system import FILES, LINUX

_NET: Final = "sys/class/net"
_RFKILL: Final = "sys/class/rfkill"
_WIRELESS: Final = "proc/net/wireless"
_SIOCGIWESSID: Final = 0x8B1B  # linux/wireless.h
_SSID_BYTES_MAX: Final = 32
_CELL_NAMES: Final = ("wwan", "rmnet", "ccmni", "pdp_ip", "ppp")
"""What drivers of cellular modems call their interfaces."""
_TUNNELS: Final = frozenset({"tun", "tap", "wireguard", "ppp", "ipip", "sit", "gre", "xfrm", "vti"})
_READ_BYTES_MAX: Final = 16 * 1024


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES_MAX).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def kind_of(name: str, *, ethernet: bool, what: str = "", root: Path = FILES) -> str:
    """Give the kind of an interface, as `policy.network.KINDS` has it.

    Args:
        name: of the interface.
        ethernet: it asks for link-layer addresses as Ethernet does.
        what: the kernel's word for a virtual one.
        root: where `sys` and `proc` are.
    """
    folder = root / _NET / name
    with contextlib.suppress(OSError, ValueError):
        if "/" not in name and ((folder / "phy80211").exists() or (folder / "wireless").exists()):
            return "wifi"
    if "DEVTYPE=wwan" in _read(folder / "uevent") or name.startswith(_CELL_NAMES):
        return "cell"
    return "wired" if ethernet and what not in _TUNNELS else "unknown"


def is_tunnel(name: str, what: str) -> bool:
    """Say whether an interface is a tunnel's."""
    return what in _TUNNELS and not name.startswith(_CELL_NAMES)


def signal_dbm(name: str, *, root: Path = FILES) -> int | None:
    """Give the strength of a WiFi interface's signal (`/proc/net/wireless`), None where it does not say."""
    for line in _read(root / _WIRELESS).splitlines()[2:]:
        interface, _, rest = line.partition(":")
        words = rest.split()
        if interface.strip() == name and len(words) >= 3:
            try:
                level = float(words[2].rstrip("."))
            except ValueError:
                return None
            return int(level) if -120 <= level < 0 else None
    return None


def ssid(name: str) -> Secret | None:
    """Give the name of the WiFi an interface is in, by the old wireless extensions; None where it cannot be read."""
    if not LINUX:
        return None
    try:
        import array
        import fcntl
    except ImportError:
        return None
    buffer = array.array("B", bytes(_SSID_BYTES_MAX + 2))
    address, length = buffer.buffer_info()
    try:
        label = name.encode()[:15].ljust(16, b"\0")
        ask = struct.pack("16sPHH", label, address, length, 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            told = fcntl.ioctl(asker, _SIOCGIWESSID, ask)
    except (OSError, ValueError):
        return None
    size: int = struct.unpack("16sPHH", told[: struct.calcsize("16sPHH")])[2]
    text = buffer.tobytes()[: min(size, _SSID_BYTES_MAX)].rstrip(b"\0").decode("utf-8", "backslashreplace")
    return Secret(text[: limits.NETWORK_NAME_CHARS_MAX]) if text else None


def airplane(*, root: Path = FILES) -> bool | None:
    """Say whether all radios are switched off (rfkill); None where this machine has none.

    One soft or hard block is enough to silence a radio; a radio that is only off by itself, with another on, is no
    flight mode.
    """
    try:
        radios = sorted((root / _RFKILL).iterdir())[:64]
    except OSError:
        return None
    states = []
    for radio in radios:
        if _read(radio / "type").strip() not in ("wlan", "wwan", "bluetooth"):
            continue
        soft, hard = _read(radio / "soft").strip(), _read(radio / "hard").strip()
        if soft in ("0", "1") or hard in ("0", "1"):
            states.append("1" in (soft, hard))
    return all(states) if states else None
