"""Bounds of what carries the long connection: listeners, WebSocket, PROXY protocol, keys of TLS tickets, choice.

The rest of the product's bounds is in `limits`.
"""

from typing import Final

# -- arrivals at a gateway --------------------------------------------------------------------------------------------
ARRIVALS_MAX: Final = 2048
"""Connections of one process that are not sessions yet (silent, in a TLS handshake, in an upgrade), some 46 KB each.
Where more come the oldest goes: at the 2,000 handshakes a second that a core does, it has had a second."""
ACCEPTS_PER_TURN: Final = 64
"""Connections taken from one listening socket before others have their turn: some 2 ms."""
PEEK_BYTES: Final = 4096
"""How much is looked at of what comes first: a ClientHello with a ticket and a post-quantum key share is 2 KB."""
ACCEPT_PAUSE_S: Final = 0.2
"""How long nothing is accepted after the kernel said that it has no descriptors or memory left."""
LISTENERS_MAX: Final = 64
"""Addresses one gateway listens on, plain ones included."""

# -- PROXY protocol ---------------------------------------------------------------------------------------------------
PROXY_HEADER_BYTES_MAX: Final = 2048
"""A PROXY protocol header with all its values: addresses need 52 bytes, a TLS front adds names and versions, some
hundred; certificates do not belong there."""

# -- WebSocket --------------------------------------------------------------------------------------------------------
WS_MESSAGE_BYTES: Final = 16 * 1024
"""Frames that are put into one message of a WebSocket, unless one alone is larger: one TLS record, so that what has
left is known as exactly as over TLS alone."""
WS_CONTROL_BYTES_MAX: Final = 16 * 1024
"""Answers to a peer's pings that wait to be sent: some hundred; a peer that asks more and reads nothing is left."""

# -- certificates and ticket keys -------------------------------------------------------------------------------------
CERTIFICATE_LOOK_S: Final = 10.0
"""How often the certificate's files are looked at: a renewed one is served within it."""
TICKET_ROTATION_S: Final = 12 * 3600.0
"""Age at which the key of TLS tickets is replaced: who steals one can read no more than two such spans (RFC 5077
section 5.5 asks for regular change)."""
TICKET_LOOK_S: Final = 60.0
"""How often a process looks whether another has replaced the key. A new key makes tickets only twice this long after it
was written, so that each process knows it by then."""
TICKET_RETRY_S: Final = 1.0
"""The same while the engine is away or another was quicker."""
TICKET_RECORD_BYTES_MAX: Final = 4096
"""The record of ticket keys: two of 80 bytes."""

# -- choice of the carrier by a client --------------------------------------------------------------------------------
CARRIER_FAILURES_MAX: Final = 2
"""Failures in a row, with another carrier standing meanwhile, after which a carrier goes behind: one may be chance."""
CARRIER_HEAD_START_S: Final = 2.5
"""How long the first carrier is tried alone: a lost SYN (1 s) and three round trips of a bad network."""
CARRIER_CLIMB_FIRST_S: Final = 60.0
"""After this long on a lesser carrier the better one is tried beside it."""
CARRIER_CLIMB_MAX_S: Final = 4 * 3600.0
"""Longest pause between two such trials; each that fails doubles it."""
CARRIER_NETWORKS_MAX: Final = 64
"""Networks of which is remembered what passes, twice as many at most."""
CARRIERS_REMEMBERED: Final = 8
"""Carriers in what is kept of a network; there are three."""
