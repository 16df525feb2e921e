"""Which ports the parts get: those that are set, checked to be free, and free ones for those set to 0.

All are known before any part starts, because the parts name each other: dispatch tells clients where the gateway is.
"""

import contextlib
import errno
import socket
from collections.abc import Mapping

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.core.values import Address

_FIRST, _LAST = 16_384, 32_767
"""Free ports are drawn below the kernel's own range for outgoing connections (32768 and up on Linux): one of those
could take a port between our test and the part's own bind."""


def choose(hosts: Mapping[str, str], wanted: Mapping[str, int], *, rng: Rng) -> dict[str, int]:
    """Settle the port of each part.

    Args:
        hosts: IP address to listen on, by part; of the parts that will run.
        wanted: port by part, 0 for a free one; those of parts that will not run are left as they are.
        rng: draws free ports.

    Returns:
        Port by part; none is used twice. A port can still be lost to another process before its part binds it; that
        part then says so itself.

    Raises:
        PlatformError: a wanted port is taken or given to two parts, a host is not ours, or no free port was found.
    """
    chosen = dict(wanted)
    with contextlib.ExitStack() as held:
        for part in sorted(hosts, key=lambda part: wanted[part] == 0):  # fixed ones first: a drawn one must avoid them
            chosen[part] = _hold(hosts[part], wanted[part], part, held, rng)
    return chosen


def _hold(host: str, port: int, part: str, held: contextlib.ExitStack, rng: Rng) -> int:
    if port:
        error = _bind(host, port, held)
        if error is None:
            return port
        raise errors.PlatformError(
            f"{part}: cannot listen on {Address(host, port)}: {error.strerror}; "
            f"set STORMLINE_PORTS__{part.upper()} to another port, or 0 for a free one"
        )
    for _ in range(limits.FREE_PORT_TRIES_MAX):
        drawn = _FIRST + int(rng.random() * (_LAST - _FIRST + 1))
        error = _bind(host, drawn, held)
        if error is None:
            return drawn
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise errors.PlatformError(f"{part}: cannot listen on {host}: {error.strerror}")
    raise errors.PlatformError(f"{part}: no free port found on {host} in {limits.FREE_PORT_TRIES_MAX} tries")


def _bind(host: str, port: int, held: contextlib.ExitStack) -> OSError | None:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free to listen on
        sock.bind((host, port))
        sock.listen(1)  # two sockets may bind one port with SO_REUSEADDR; only one may listen
    except OSError as error:
        sock.close()
        return error
    held.enter_context(contextlib.closing(sock))
    return None
