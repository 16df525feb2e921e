"""Every bound of the system in one place, each with its reason. Units are last in the name.

A bound is part of the contract: what overflows it gets a named error or code, never silence.
"""

from typing import Final

# -- names ------------------------------------------------------------------------------------------------------------
NAME_BYTES_MAX: Final = 128
"""A user, device or topic name: base32 makes 205 characters of it, well inside one engine subject (4 KiB)."""
METHOD_CHARS_MAX: Final = 128
"""An RPC method name; becomes part of a subject."""

# -- frames of the long connection ------------------------------------------------------------------------------------
FRAME_BYTES_MAX: Final = 64 * 1024
"""One frame, decoded. Small enough that a mass of data cannot hold an interactive frame back for long (64 KiB is
5 ms at 100 Mbit/s, 0.5 s at 1 Mbit/s), large enough for a whole ordinary call."""
FRAME_BEFORE_HELLO_BYTES_MAX: Final = 8 * 1024
"""Before a peer has shown who it is it may not make us buffer more than a HELLO with a large token."""
CHUNK_BYTES_MAX: Final = 16 * 1024
"""One body chunk. One TLS record; other calls' frames go between two chunks."""
CREDIT_BYTES: Final = 256 * 1024
"""Body bytes a peer may have in flight to us for one call before we grant more: the bandwidth-delay product of
10 Mbit/s at 200 ms, and the most that one stalled reader costs."""
CALLS_IN_FLIGHT_MAX: Final = 256
"""Calls one side may have open on one connection at once; beyond it CALL_TOO_MANY."""
CREDIT_WINDOW_BYTES_MAX: Final = 2**31 - 1
"""The most credit a call can hold; a grant beyond it is a protocol error (RFC 9113 section 6.9.1 has the same)."""
CALL_HEADERS_MAX: Final = 128
"""Header pairs of one call or reply."""
CALL_HEADER_BYTES_MAX: Final = 32 * 1024
"""Header names and values of one call or reply together; what nginx and others allow by default."""
CALL_BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""A call body that is gathered whole in memory (RPC); streams are not bound by it but by credit."""
PUSHES_UNACKED_MAX: Final = 64
"""Pushes sent on a connection and not yet acknowledged; more wait with the sender."""
PUSH_BODY_BYTES_MAX: Final = 32 * 1024
"""One push; larger content belongs behind a link or in a call."""
REASON_CHARS_MAX: Final = 256
"""The human part of a code; longer ones are cut."""

# -- time on the long connection --------------------------------------------------------------------------------------
HELLO_TIMEOUT_S: Final = 5.0
"""From accept to a whole HELLO, absolute: bytes that dribble in do not extend it."""
HEARTBEAT_S: Final = 60.0
"""Silence after which a client pings. Below the shortest NAT memory commonly met on cellular networks for TCP
(several minutes) with room; learned per network later."""
HEARTBEAT_ANSWER_S: Final = 8.0
"""Wait for a PONG before the link counts as dead."""
SESSION_IDLE_S: Final = 150.0
"""A server drops a session that sent nothing for two heartbeats and an answer's wait, rounded up."""
CLOSE_FLUSH_S: Final = 1.0
"""How long a closing side waits for its last frames to leave."""

# -- calls ------------------------------------------------------------------------------------------------------------
CALL_DEADLINE_S: Final = 15.0
"""A call without a deadline of its own ends after this."""
CALL_DEADLINE_MAX_S: Final = 3600.0
"""The longest deadline a peer can ask for."""
PUSH_ACK_TIMEOUT_S: Final = 5.0
"""Wait for a device to acknowledge a push before the sender is told 'unconfirmed'."""

# -- signed texts -----------------------------------------------------------------------------------------------------
TOKEN_BYTES_MAX: Final = 4096
"""A device token; anything longer is refused before it is parsed."""
TOKEN_LIFE_S: Final = 24 * 3600.0
"""Life of a device token the platform mints."""
PLAN_BYTES_MAX: Final = 512 * 1024
"""A dispatch answer; anything longer is refused unread."""
PLAN_LIFE_S: Final = 3600.0
"""How long a dispatch answer may be used."""
CLOCK_SKEW_S: Final = 120.0
"""Tolerance when a signed time is compared with ours."""
PLAN_HOSTS_MAX: Final = 100
"""Hosts one question to dispatch may name."""
BUNDLE_BYTES_MAX: Final = 256 * 1024
"""A client bundle file."""
