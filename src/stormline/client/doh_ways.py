"""DNS over HTTPS for a client with several ways out: a name is asked for over the way that calls use.

Where the first way is dark a question goes over the one that calls are tried on, and one that waits already goes over
with them: else a name that nobody has asked for lately could not be found in the dark.
"""

import asyncio
import ssl
from collections.abc import Callable, Collection

from stormline.client.config import Config
from stormline.client.name_sources import Doh
from stormline.client.path import Path
from stormline.client.paths import Paths
from stormline.client.steering import Steering
from stormline.core import limits
from stormline.core.clock import Clock
from stormline.net.resolve import Found
from stormline.net.sessions import TlsSessions
from stormline.outbound.dial import Dialer, OpenTcp, quiet
from stormline.outbound.doh import DohNames, NoNames


def doh_over(
    config: Config, clock: Clock, context: ssl.SSLContext, open_tcp: OpenTcp, steering: Steering, sessions: TlsSessions
) -> DohNames:
    """Give the servers of a config, asked over one way."""
    dialer = Dialer(NoNames(), context, open_tcp=open_tcp, advice=steering, sessions=sessions)
    return DohNames([each for each in config.doh if not isinstance(each, str)], dialer, clock)


class WaysDoh:
    """`name_sources.Doh` over the ways out of one client.

    Args:
        first: the servers, asked over the system's own choice.
        paths: gives the ways; None where they are gone or not made yet.
    """

    def __init__(self, first: Doh, paths: Callable[[], Paths | None]) -> None:
        self._first = first
        self._paths = paths

    async def ask(self, host: str, *, avoid: Collection[str] = (), on_note: Callable[[str], None] = quiet) -> Found:
        """Give the addresses of a name, see `DohNames.ask`; asked anew where calls move to another way meanwhile."""
        paths = self._paths()
        if paths is None or not paths.watching:
            return await self._first.ask(host, avoid=avoid, on_note=on_note)
        loop = asyncio.get_running_loop()
        while True:
            path = paths.names_over()
            asked = loop.create_task(self._of(path).ask(host, avoid=avoid, on_note=on_note), name=f"DoH {host}")
            try:
                while not asked.done() and paths.names_over() is path:
                    await asyncio.wait((asked,), timeout=limits.PATH_LOOK_S)
                if asked.done():
                    return asked.result()
                on_note(f"asked for over {paths.names_over().name} instead")
            finally:
                asked.cancel()
                await asyncio.wait((asked,))

    def _of(self, path: Path) -> Doh:
        return self._first if path.doh is None else path.doh

    def shun(self, source: str) -> None:
        """See `DohNames.shun`."""
        self._first.shun(source)

    def doubt(self) -> None:
        """See `DohNames.doubt`."""
        self._first.doubt()

    def close(self) -> None:
        """Close the first's connections; the other ways' are theirs."""
        self._first.close()
