"""Bounds of a diagnosis: how long it may take, how much it may send, how often it comes by itself."""

from typing import Final

from stormline.core import limits_heartbeat

# -- a diagnosis ------------------------------------------------------------------------------------------------------
DIAGNOSIS_S: Final = 10.0
"""The whole of it: people wait that long for an explanation. What is not done by then is told as unknown."""
DIAGNOSIS_TCP_S: Final = 3.2
"""One connection: a lost SYN is sent again after one second, and after three."""
DIAGNOSIS_TLS_S: Final = 4.0
"""One handshake: two round trips of EDGE, and one repetition."""
DIAGNOSIS_HTTP_S: Final = 5.0
"""One request with all that is read of its answer."""
DIAGNOSIS_NAMES_S: Final = 4.0
"""One source of names: the C library asks its first server again after five seconds, which is too late to help."""
DIAGNOSIS_ADDRESSES_MAX: Final = 8
"""Addresses that are connected to: four of each family, from all sources."""
DIAGNOSIS_AUTOMATIC_ADDRESSES_MAX: Final = 4
"""By a diagnosis that comes by itself; each is a handshake of TLS, some 5 KB."""
DIAGNOSIS_SOURCE_ADDRESSES_MAX: Final = 4
"""Addresses taken of one source, so that a long answer of one does not leave out what another says."""
DIAGNOSIS_ADDRESSES_TOLD: Final = 16
"""Addresses of one source that are told; a name has rarely more."""
DIAGNOSIS_GATEWAYS_MAX: Final = 2
"""Gateways of a plan that are knocked at beside the origin."""
DIAGNOSIS_QUIC_PORTS_MAX: Final = 2
"""Ports that are asked for QUIC at one address."""
DIAGNOSIS_BODY_BYTES_MAX: Final = 64 * 1024
"""Read of an answer: enough to see whether whole packets pass, and to compare pages."""
DIAGNOSIS_AUTOMATIC_BODY_BYTES_MAX: Final = 4096
"""Read of it by a diagnosis that comes by itself: three packets show whether they pass."""
DIAGNOSIS_STALL_S: Final = 1.5
"""Silence of a handshake or answer after which it is tried with small packets beside: above EDGE's two round trips."""
DIAGNOSIS_SMALL_SEGMENT_BYTES: Final = 536
"""What a segment then carries: every path takes it (RFC 9293 section 3.7.1)."""
DIAGNOSIS_QUIC_DATAGRAMS: Final = 8
"""Datagrams that ask for QUIC at one address: at a loss of one in five all are lost once in 400,000 times."""
DIAGNOSIS_QUIC_ENOUGH: Final = 3
"""So many answers with nothing lost are enough; so many datagrams are sent where a round trip is slow."""
DIAGNOSIS_QUIC_PAUSE_S: Final = 0.25
"""The shortest wait for one before the next goes out; else one and a half round trips of TCP."""
DIAGNOSIS_QUIC_PAUSE_S_MAX: Final = 0.7
"""The longest."""
DIAGNOSIS_QUIC_S: Final = 1.5
"""After the last until silence counts: two round trips of EDGE."""
DIAGNOSIS_ECHOES: Final = 3
"""Echo requests to a router."""
DIAGNOSIS_ECHO_PAUSE_S: Final = 0.25
"""Between two of them."""
DIAGNOSIS_ECHO_S: Final = 1.5
"""After the last until silence counts."""
DIAGNOSIS_HOPS_MAX: Final = 20
"""Routers asked on the way; few servers are further."""
DIAGNOSIS_TRACE_PAUSE_S: Final = 0.02
"""Between the packets of two hops: at once they would be a queue on a thin uplink, and more than are needed go out."""
DIAGNOSIS_TRACE_S: Final = 2.0
"""From the last packet of a trace until silence counts."""
DIAGNOSIS_POLL_S: Final = 0.01
"""Between two looks at a socket's queue of errors, which not every event loop tells of; the error of a hop's time."""
DIAGNOSIS_MTU_S: Final = 1.5
"""For routers to say that a packet is too large."""
DIAGNOSIS_MTU_TRIES: Final = 4
"""How often the path's size may shrink on the way: tunnels in tunnels are rarely deeper."""
DIAGNOSIS_TEXT_CHARS_MAX: Final = 200
"""A text that comes from outside, such as the subject of a certificate."""
DIAGNOSIS_TRACE_PORT: Final = 33434
"""First of the UDP ports that nobody listens on by custom; one for each hop."""
# -- how long the network keeps silent connections --------------------------------------------------------------------
DIAGNOSIS_NAT_LIMIT_S: Final = 300.0
"""The longest silence that is tried unless the caller says: mobile networks forget after one to five minutes."""
DIAGNOSIS_NAT_LIMIT_S_MIN: Final = 8.0
"""The least such: the shortest silence is then half a second, a packet's time on a slow network."""
DIAGNOSIS_NAT_LIMIT_S_MAX: Final = limits_heartbeat.HEARTBEAT_MAX_S
"""The most: no heartbeat is longer."""
DIAGNOSIS_NAT_CONNECTIONS: Final = 8
"""Connections side by side, each silent for a time of its own: a browser opens six to a server."""
DIAGNOSIS_NAT_SPAN: Final = 16.0
"""The longest silence is so many times the shortest: the limit is then found within half of itself."""
DIAGNOSIS_NAT_ANSWER_S: Final = 8.0
"""From the use of a connection that was silent until it counts as lost: as `HEARTBEAT_ANSWER_S`."""
DIAGNOSIS_NAT_REST_S: Final = 0.4
"""From the head of an answer for what else belongs to it: shorter than the shortest silence."""
DIAGNOSIS_NAT_TOLD_S: Final = 1.0
"""Between two words of how far it is."""
# -- what a diagnosis concludes ---------------------------------------------------------------------------------------
DIAGNOSIS_CLOCK_S: Final = 300.0
"""How far our clock may be from a server's: less harms nobody, and servers are off by minutes themselves."""
DIAGNOSIS_SLOW_RTT_S: Final = 0.5
"""Round trip from which a network is called slow: UMTS' is below, EDGE's above."""
DIAGNOSIS_UDP_LOST: Final = 0.6
"""Share of lost datagrams from which UDP is called degraded: at a loss of one in ten each way a train of eight loses
five once in 150 times."""
DIAGNOSIS_UDP_SLOWER: Final = 4.0
"""So many times TCP's round trip UDP's must be to be called degraded."""
DIAGNOSIS_UDP_SLOWER_S: Final = 0.5
"""And so much longer at least: 1200 bytes take a thin uplink longer than a SYN does."""
# -- diagnoses that come by themselves, and their records -------------------------------------------------------------
DIAGNOSIS_PAUSE_S: Final = 300.0
"""Between two that come by themselves on one network: what is wrong there rarely changes sooner."""
DIAGNOSIS_PER_HOUR: Final = 4
"""That come by themselves, on all networks together: some 150 KB an hour at most."""
DIAGNOSIS_QUIET_LOOKS: Final = 120
"""One that comes by itself looks so often for a moment without calls under way; there is none beside them."""
DIAGNOSIS_QUIET_LOOK_S: Final = 0.25
"""Between two looks: half a minute in all. Later the failure is history."""
DIAGNOSIS_NETWORKS_MAX: Final = 32
"""Networks of which it is remembered when the latest came; the oldest goes first."""
REPORT_DIAGNOSES_MAX: Final = 8
"""In one report, and waiting for one; the oldest goes first. Each is some 8 KB."""
DIAGNOSIS_RECORD_BYTES_MAX: Final = 32 * 1024
"""One as it is stored; larger ones are left out."""
DIAGNOSIS_CHECKS_MAX: Final = 64
"""Checks of one that is taken from a report; there are 14, and three for each address."""
