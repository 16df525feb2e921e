"""Names that more than one part must agree on."""

from typing import Final

SERVER_NAMES: Final = {
    "dispatch": "dispatch.stormline.test",
    "gateway": "gateway.stormline.test",
    "apm": "apm.stormline.test",
}
"""What the certificate of each TLS role is for. `.test` never resolves anywhere (RFC 6761 section 6.2): clients get
addresses from the bundle and from plans, and check these names."""

SHOP_HOST: Final = "shop.demo"
"""Host of the demo's upstream, as clients ask for it."""
