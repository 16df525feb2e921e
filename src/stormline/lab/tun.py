"""TUN devices and network namespaces, by the kernel's own calls (Linux).

A TUN device hands whole IP packets to the process that holds its descriptor (Documentation/networking/tuntap.rst).
IPv6 needs no neighbour discovery on it, so TAP's Ethernet frames would add nothing.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stormline.core import errors

TUN_DEVICE: Final = Path("/dev/net/tun")
NETNS_FOLDER: Final = Path("/run/netns")
"""Where `ip netns` keeps named namespaces."""
_CLONE_NEWNET: Final = 0x4000_0000
_TUNSETIFF: Final = 0x4004_54CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_NAME_BYTES_MAX: Final = 15  # IFNAMSIZ less its final zero
_libc = ctypes.CDLL(None, use_errno=True)


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def inside(netns: Path) -> Iterator[None]:
    """Be in another network namespace with this thread: sockets and devices made inside belong to it for good.

    Do not await inside: other tasks of the thread would be in the namespace as well.

    Raises:
        PlatformError: no such namespace, or no right to enter it.
    """
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            target = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _setns(target)
            finally:
                os.close(target)
        except OSError as error:
            raise errors.PlatformError(f"cannot enter network namespace {netns}: {error.strerror}") from error
        try:
            yield
        finally:
            _setns(own)
    finally:
        os.close(own)


def open_tun(name: str, netns: Path) -> int:
    """Attach to the TUN device `name` in a namespace, making it where it does not exist.

    Returns:
        A non-blocking descriptor: each read gives one IP packet, each write sends one. The caller closes it.

    Raises:
        PlatformError: no TUN on this machine, no right to it, or the device is held by another process.
    """
    raw = name.encode()
    if not 0 < len(raw) <= _NAME_BYTES_MAX:
        raise errors.PlatformError(f"device name {name!r}: must have 1 to {_NAME_BYTES_MAX} bytes")
    with inside(netns):
        try:
            descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise errors.PlatformError(f"cannot open {TUN_DEVICE}: {error.strerror}") from error
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", raw, _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            os.close(descriptor)
            raise errors.PlatformError(f"cannot attach to device {name} in {netns}: {error.strerror}") from error
    return descriptor
