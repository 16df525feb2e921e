"""Bounds of what carries the long connection: listeners, WebSocket, short HTTP, PROXY protocol, TLS tickets, choice.

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
ARRIVALS_PER_LINE_MAX: Final = 512
"""Of these from one subscriber's line (an IPv4 address, an IPv6 /64). Where it has more its own oldest goes: an office
or a carrier's NAT that comes back at once is through with this many in half a second, one that dribbles is not."""
INTAKE_FIRST_PER_S: Final = 200.0
"""Handshakes begun a second before a process has proven anything: what a core does where each costs it 5 ms, ten times
what it is. A process that was killed begins here, with everybody before its door."""
INTAKE_GROWTH: Final = 1.25
"""Growth of the pace with each look until the first at which the loop was late: 2,000 a second within a second."""
INTAKE_MIN_PER_S: Final = 50.0
"""The slowest pace: a tenth of a core, so that a busy node still lets devices in."""
INTAKE_MAX_PER_S: Final = 4000.0
"""The quickest pace: twice what a core does today."""
INTAKE_STEP_PER_S: Final = 25.0
"""By how much the pace grows later with each look at which it was the bound, the loop was quick, and most begun were
finished: from the slowest to half of a core in four seconds."""
INTAKE_CUT: Final = 0.8
"""What is left at each look at which the loop was late: of the pace, or of what was begun a second where that is
less."""
INTAKE_LOOK_S: Final = 0.1
"""How often the loop's lag is looked at; costs some 5 us each."""
INTAKE_PAUSE_S: Final = 0.005
"""Shortest pause of a listener whose pace is used up, so that what the pace allows is begun by handfuls."""
INTAKE_WAIT_S: Final = 2.0
"""How long a connection whose first bytes are there waits to be begun; then it is reset, at no cost. Its client has
`limits.LINK_CONNECT_TIMEOUT_S` for it all: one begun later would be given up before it stands, and its place lost."""
INTAKE_WAITING_MAX: Final = 1024
"""Connections that wait so; beyond it nobody is accepted, and the kernel's queue fills."""
INTAKE_LAG_S: Final = 0.1
"""Lag of the loop from which the pace is cut: a fifth of the 0.5 s that a connected client must never wait."""
INTAKE_SHED_LAG_S: Final = 0.3
"""Lag at two looks in a row from which a HELLO is answered with OVERLOADED before its token is checked."""
INTAKE_RETRY_S: Final = 2.0
"""Least time that such a client is told to stay away; each is told up to four times as much, by chance."""
RETURN_SPREAD_MIN_S: Final = 3.0
"""Least span over which clients are asked to come back after a loss without a word: 3.4 % of them in each 0.1 s."""
RETURN_PER_S: Final = 500.0
"""Clients asked to come back each second of that span where a process has not shown that it can take more: a quarter of
what a core does, so that those who are connected notice nothing."""
RETURN_SPREAD_MAX_S: Final = 30.0
"""The longest: half of `limits.RESUME_WINDOW_S`, so that a session is still there when its client is."""
DESCRIPTORS_KEPT_SHARE: Final = 0.25
"""Part of a process's descriptors that clients cannot take, where it may open fewer than `SESSIONS_MAX` needs:
upstreams, the engine and the business API live on it."""
DESCRIPTORS_KEPT_MAX: Final = 2000
"""No more than this of them is kept: upstreams (1,024), the business API, the engine, files."""
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
WS_SLICE_BYTES: Final = 4096
"""How much of what a WebSocket's peer has sent is taken apart before it is looked at: some 700 empty frames, 10 ms."""
WS_EMPTY_FRAMES_MAX: Final = 200
"""Frames of one read that carry nothing, or only signs of life: six bytes cost 20 us, and a read has 43,000 of them."""
WS_CONTROL_BYTES_MAX: Final = 16 * 1024
"""Answers to a peer's pings that wait to be sent: some hundred; a peer that asks more and reads nothing is left."""

# -- short HTTP -------------------------------------------------------------------------------------------------------
SHORT_UP_BYTES: Final = 64 * 1024
"""Bytes of frames that one exchange takes up, and that a client puts out beyond those the gateway has: a frame and
what belongs to it."""
SHORT_DOWN_BYTES: Final = 256 * 1024
"""Bytes of frames in one answer at most: the first credit of a body in one round trip."""
SHORT_DOWN_FIRST_BYTES: Final = 32 * 1024
"""What a client has room for in its first answer, and twice as much after each that is full and comes: what breaks off
comes again from its beginning."""
SHORT_PIECE_BYTES: Final = 4 * 1024
"""What goes and comes in one exchange after failures, at least: 12 s at 3 kbit/s."""
SHORT_BODY_BYTES_MAX: Final = SHORT_UP_BYTES + 1024
"""The body of one request: the frames, the name of the channel, and some numbers."""
SHORT_ANSWER_BYTES_MAX: Final = SHORT_DOWN_BYTES + 1024
"""The body of one answer, likewise."""
SHORT_WAIT_S: Final = 25.0
"""How long a client has a question for news held: proxies and translators give up on what is silent after 30 s at the
earliest, most after 60."""
SHORT_WAIT_MAX_S: Final = 120.0
"""How long a gateway holds one at most."""
SHORT_ANSWER_S: Final = 8.0
"""How long an exchange may take beyond what it is held for, as a PING may: three retransmissions on a slow network."""
SHORT_TRIES_MAX: Final = 5
"""Exchanges in a row that may fail in one direction until the channel is given up: one may have met a connection that
had gone stale, the next a network that loses a third of them. Then the session is taken elsewhere."""
SHORT_OPEN_TRIES_MAX: Final = 2
"""The same for the exchange that opens one."""
SHORT_PAUSE_S: Final = 0.3
"""Pause before the second of them is repeated, longer by as much each time; the first is repeated at once."""
SHORT_GONE_S: Final = 30.0
"""How long a gateway keeps a channel that no exchange holds on to; the session then waits as after any loss. A client
has given up by then: it says so with a new connection."""
SHORT_LINGER_S: Final = 10.0
"""How long a channel that has ended can still be asked for its last bytes."""
SHORT_OPENINGS_MAX: Final = 1024
"""Channels of one process that are not sessions yet, some 3 KB each; where more come the oldest goes."""
SHORT_REQUEST_S: Final = 60.0
"""From the first byte of a request to its last, and from an answer that is the last to the connection's end: 64 KiB at
9 kbit/s. A client gives an exchange as long for its bytes in each direction."""
SHORT_IDLE_S: Final = 30.0
"""How long a connection without an exchange is kept open. Clients let go of theirs sooner: hardly one meets its end."""
SHORT_NAME_CHARS_MAX: Final = 160
"""The name of a channel: its node's, which is shorter than a resume token, and 32 digits."""

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
"""Carriers in what is kept of a network; there are four."""
