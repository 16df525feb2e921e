"""How business systems learn whose call they serve."""

from typing import Final
from urllib.parse import quote

from stormline.appgw.port import Identity

PREFIX: Final = "stormline-"
"""Headers that begin with it are ours alone: what a client sends under such a name is dropped."""
_PLAIN: Final = "!#$&'()*+,/:;=?@[]"


def headers(identity: Identity) -> list[tuple[str, str]]:
    """Give the headers `Stormline-App`, `Stormline-Device` and, where somebody is logged in, `Stormline-User`.

    Ids are written in printable ASCII: any other byte of their UTF-8, blanks and `%` as `%XX` (RFC 3986 section 2.1),
    so distinct ids stay distinct and none can end its header.
    """
    named = [("Stormline-App", identity.app), ("Stormline-Device", identity.device), ("Stormline-User", identity.user)]
    return [(name, quote(value, safe=_PLAIN)) for name, value in named if value]
