"""Bounds of the relay: requests and answers that are carried sealed end to end (Oblivious HTTP).

The rest of the product's bounds is in `limits`.
"""

from typing import Final

from stormline.core import limits, limits_platform

# -- messages ---------------------------------------------------------------------------------------------------------
RELAY_HEAD_BYTES_MAX: Final = 64 * 1024
"""Control data and one section of fields of a message in binary form: as much as a head of HTTP/1.1 may have
(`HTTP_HEAD_BYTES_MAX`), so that what came that way can go this way."""
RELAY_INFORMATIONAL_MAX: Final = 16
"""Informational answers (1xx) before the real one: servers send one or two."""
RELAY_CHUNK_BYTES: Final = 16 * 1024
"""Plain bytes in a sealed chunk: what every receiver takes (chunked Oblivious HTTP, section 3)."""
RELAY_CHUNK_BYTES_MAX: Final = 64 * 1024
"""Plain bytes in a chunk that is still taken from others; one chunk is held whole before any of it can be believed."""

# -- keys -------------------------------------------------------------------------------------------------------------
RELAY_KEYS_BYTES_MAX: Final = 4 * 1024
"""A list of key configurations: one of ours has 45 bytes, one with a post-quantum key some 1.3 KB."""
RELAY_KEYS_MAX: Final = 16
"""Key configurations in a list: those in use, and those before and after them while they change."""

RELAY_KEYS_LOOK_S: Final = 1.0
"""Between two looks at the files of the gateway's keys: a rotation waits for it twice, and a small read costs 50 us."""
RELAY_FORMER_KEYS_MAX: Final = 64
"""Keys of a gateway's past that rules are still mended from: rotated every month, those of five years."""
RELAY_ROTATE_WAIT_S: Final = 15.0
"""For the relay to take a new key up, and again for the rules to name it: some looks, and a centre with many hosts."""
RELAY_KEY_OVERLAP_S: Final = limits.PLAN_LIFE_S + limits_platform.PLAN_REFRESH_S + limits.CLOCK_SKEW_S
"""How long a key is still opened with that no rule names any more: no plan that does is used for longer."""

# -- the service ------------------------------------------------------------------------------------------------------
RELAY_ORIGINS_MAX: Final = 4096
"""Origins a relay may fetch from; each is named by hand or by dispatch."""
RELAY_ADDRESSES_MAX: Final = 16
"""Addresses of one origin in the settings, and those of a name that are tried: as many as one dial tries."""
RELAY_REQUEST_BYTES_MAX: Final = 1024 * 1024
"""A sealed request that is not in chunks: it is held whole."""
RELAY_RESPONSE_BYTES_MAX: Final = 4 * 1024 * 1024
"""An answer to one that is not in chunks: it is held whole, twice for a moment."""
RELAY_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Content of a request or an answer in chunks. A relay is for what does not get through by itself, not for films."""
RELAY_HEAD_S: Final = 10.0
"""From a request's first byte to the head inside it: a small request on a slow link takes a second or two."""
RELAY_DEADLINE_S: Final = 30.0
"""From the head inside a request to the head of the origin's answer, and again to its last byte; twice what a call of
the client takes (`CALL_DEADLINE_S`): who gave up is noticed before."""
RELAY_CONNECT_S: Final = 5.0
"""For a connection to an origin: the relay stands where the network is good."""
RELAY_CONNECTIONS_MAX: Final = 512
"""Connections to origins, kept ones included."""
RELAY_CONNECTIONS_PER_ORIGIN_MAX: Final = 64
"""Of these to one origin over HTTP/1.1."""
RELAY_RATE_PER_S: Final = 20.0
"""Requests from one address (IPv4, or an IPv6 /64) in the long run: an app's retries of a page, not a crawler."""
RELAY_BURST: Final = 200
"""And at once: many devices stand behind one address of an operator's."""
RELAY_PEERS_MAX: Final = 65536
"""Addresses whose rate is remembered, some 150 bytes each."""

# -- replays ----------------------------------------------------------------------------------------------------------
RELAY_REPLAY_WINDOW_S: Final = 60.0
"""How far the `Date` of a request that is not safe may be from the gateway's clock: a device's clock that was set a
month ago is off by a second or two, one that was never set is told the time and asks again (RFC 9458 section 6.5.2)."""
RELAY_REPLAYS_MAX: Final = 200_000
"""Requests that are not safe, remembered for twice that window, some 120 bytes each: 1,600 a second. More are refused,
never forgotten."""

# -- the bundle -------------------------------------------------------------------------------------------------------
BUNDLE_RELAYS_MAX: Final = 8
"""Relays in a client bundle: a first request tries one or two, and a bundle lives as long as an app's version."""
BUNDLE_RELAY_HOSTS_MAX: Final = 100
"""Hosts that one of them is named for: as many as a plan has (`limits.PLAN_HOSTS_MAX`)."""

# -- the client -------------------------------------------------------------------------------------------------------
RELAY_BESIDE_S: Final = 2.0
"""A read that has come to no connection for so long is asked through a relay too: TCP and TLS take three round trips, a
second and a half on EDGE, and what is lost of them on the way is sent again after one second."""
RELAY_PLACES_MAX: Final = 256
"""Relays whose keys a client has read; a plan names a handful for all its hosts."""
