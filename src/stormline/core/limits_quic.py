"""Bounds of QUIC and of HTTP/3 above it.

The rest of the product's bounds is in `limits`.
"""

from typing import Final

# -- QUIC -------------------------------------------------------------------------------------------------------------
QUIC_IDLE_S: Final = 30.0
"""Silence after which a connection is over (RFC 9000 section 10.1): what most servers allow, and the lesser counts."""
QUIC_DATAGRAM_BYTES: Final = 4096
"""Most of one datagram that is taken from the socket: twice what an Ethernet path carries. A longer one is cut and so
lost, and a server that probes for a larger MTU sees that it does not pass."""
QUIC_DATAGRAMS_PER_TURN: Final = 64
"""Datagrams taken from one socket before others have their turn: some 80 KB, about a millisecond of work."""
QUIC_SOCKET_BYTES: Final = 1024 * 1024
"""Kernel buffer asked for each way: 20 Mbit/s through a pause of 0.4 s. The kernel gives less where it allows less."""
QUIC_CONNECTION_WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Body bytes of all streams that may be on their way: as much as over HTTP/2 (`H2_CONNECTION_WINDOW_BYTES`)."""
QUIC_SEND_BACKLOG_BYTES: Final = 64 * 1024
"""Bytes of one stream handed to QUIC that it cannot send yet: enough to fill a flight, and little to give up in vain
where an answer comes before the body is out."""
QUIC_DATAGRAMS_HELD_MAX: Final = 256
"""Datagrams that the kernel does not take at once: none more are made while more than half of this wait, and what one
flight adds is bounded by the congestion window."""
QUIC_TICKET_PLACES_MAX: Final = 256
"""Places (name, port, trust) whose tickets are kept in memory; the one unused for longest goes first."""
QUIC_TICKETS_PER_PLACE_MAX: Final = 4
"""Tickets kept for one place; each serves one connection (RFC 8446 appendix C.4), some 2 KB."""
QUIC_CLOSE_REASON_CHARS_MAX: Final = 80
"""What is shown of a peer's words about why it closed."""

# -- HTTP/3 -----------------------------------------------------------------------------------------------------------
H3_STREAMS_MAX: Final = 100
"""Requests under way on one connection, whatever more the peer allows (RFC 9114 section 6.1 asks servers for at least
this)."""
H3_WAITING_MAX: Final = 256
"""Requests that wait on one connection for a stream; beyond it a request fails with QueueFull."""
H3_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""Body bytes of one connection that nobody has read, above which the peer gets no new credit until half of them are
read. QUIC's core gives credit for all streams alike, so this stops the other answers of the connection too: memory is
bounded by this and one connection window."""
H3_CONTROL_FRAME_BYTES_MAX: Final = 4096
"""A frame of the control stream: SETTINGS of servers met have some 30 bytes, GOAWAY eight."""
H3_UNI_STREAMS_MAX: Final = 256
"""Streams that a server opens towards us over a connection's life: three are needed, some add one to keep clients
honest (RFC 9114 section 6.2.3). More only burn our memory."""
H3_EMPTY_FRAMES_MAX: Final = 1000
"""Frames in a row that bring nothing; beyond it the peer only burns our CPU (CVE-2019-9518 in HTTP/2)."""
H3_HANDSHAKE_S: Final = 10.0
"""Longest time for the handshake of a connection that is used for reads meanwhile (0-RTT)."""
