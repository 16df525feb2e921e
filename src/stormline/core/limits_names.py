"""Bounds of how names are found: DNS over HTTPS, second opinions, and what is kept of names between starts.

Each has its reason beside it, as all bounds have; those of the memory of one resolver are in `limits`.
"""

from typing import Final

# -- DNS messages -----------------------------------------------------------------------------------------------------
DNS_MESSAGE_BYTES_MAX: Final = 65_535
"""One DNS message over HTTPS (RFC 8484 section 6)."""
DNS_RECORDS_MAX: Final = 256
"""Records of one answer that are read; a name of a large service has a few dozen."""
DNS_ALIASES_MAX: Final = 16
"""CNAME records in a row that are followed: what common resolvers follow, and an end to a circle."""
DNS_ADDRESSES_MAX: Final = 32
"""Addresses kept of one answer: twice what one dial tries."""

# -- DNS over HTTPS ---------------------------------------------------------------------------------------------------
DOH_SERVERS_MAX: Final = 8
"""Servers of a client. Each may be asked about each name where those before it fail."""
DOH_STAGGER_S: Final = 1.0
"""Head start of a server before the next is asked too, and of a kept connection before a fresh one: TCP, TLS and a
question are three round trips, under a second on all but the slowest networks."""
DOH_TIMEOUT_S: Final = 5.0
"""All servers together, as `limits.RESOLVE_TIMEOUT_S`: a longer wait helps nobody who has a deadline."""
DOH_BACKOFF_S: Final = 5.0
"""A server that failed goes behind the others for so long, doubled with each further failure."""
DOH_BACKOFF_S_MAX: Final = 300.0
"""Longest such time. It is still asked where no other answers."""
DOH_IDLE_S: Final = 30.0
"""How long an unused connection to a server is kept: a page's names are asked within seconds, and a new handshake costs
some 5 KB."""
DOH_CONNECTIONS_MAX: Final = 4
"""Connections to one server: one where it speaks HTTP/2, else one for each family; and the same beside them where those
that stand have died in silence."""
DOH_OTHER_FAMILY_S: Final = 0.05
"""How long the first family's addresses wait for the other's (RFC 8305 section 3: 50 ms)."""

# -- sources of names -------------------------------------------------------------------------------------------------
NAMES_HEAD_START_S: Final = 1.0
"""Head start of the system's resolver where nothing is known of its pace: a working one needs 0.7 s on EDGE, where the
5 KB of a handshake beside it would cost as much again."""
NAMES_HEAD_START_S_MIN: Final = 0.25
"""Least head start where its pace is known: a handshake costs more than a short wait."""
NAMES_HEAD_START_S_MAX: Final = 1.5
"""Greatest such head start."""
NAMES_BEHIND_MAX: Final = 2
"""Times in a row the first source may be overtaken before it is second for a while."""
NAMES_BEHIND_S: Final = 120.0
"""How long it is second then: long enough to spare a run of pages the wait, short enough to come back to the cheaper
way soon."""
NAMES_TIMEOUT_S: Final = 12.0
"""One question to all sources together. The system gives up after 10 s, two servers asked once each; a question nobody
waits for any more goes on until then, so that its answer is there for the next who asks."""
NAMES_PATIENCE_S: Final = 1.0
"""How long a name with addresses in reserve (proven before, or given as backup) may wait for its sources."""
NAMES_PROVEN_MAX: Final = 4
"""Addresses of a name that are remembered as proven."""
NAMES_PROVEN_S: Final = 7 * 86_400.0
"""How long an address that has shown the right certificate stays in reserve. TLS proves it again each time; after a
week most services that move have moved."""
NAMES_REJECTED_S: Final = 600.0
"""How long an address that has shown a wrong certificate is set aside for that name; and how long a resolver that gave
it is asked last on this network, doubled each time."""
NAMES_REJECTED_S_MAX: Final = 3600.0
"""Longest such time: a network that lied an hour ago may be another's by now."""
NAMES_REJECTED_MAX: Final = 256
"""Addresses set aside; the oldest goes first."""
NAMES_ABSENT_S_MAX: Final = 60.0
"""Longest time "there is no such name" stands, whatever its zone says (RFC 2308 section 5 allows hours): a name made a
minute ago works."""
NAMES_ABSENT_DOUBT_S: Final = 60.0
"""How long a proven address is still tried after the system alone has said that its name does not exist: some say so
when they are offline. After that it is believed."""
NAMES_TTL_S_MIN: Final = 2.0
"""Shortest time an answer with a TTL is given without asking again, as `limits.RESOLVE_FAILED_S`. Servers give a TTL of
seconds to an answer that stands in for one that fails (RFC 8767): a longer floor would have it outlive the failure."""
NAMES_TTL_S_MAX: Final = 600.0
"""Longest time an answer with a TTL is given without asking again, as `limits.RESOLVE_OLD_S`."""
NAMES_OPINION_S: Final = 10.0
"""A second opinion on a name is not asked for more often than this: each failed dial would, in a blackout."""
NAMES_NETWORKS_MAX: Final = 32
"""Networks whose resolver's conduct is remembered; the oldest goes first."""
NAMES_CONFIGURED_MAX: Final = 16
"""Addresses a setting may give one name: what one dial tries."""

# -- names on disk ----------------------------------------------------------------------------------------------------
NAMES_STORED_MAX: Final = 256
"""Names kept between starts, those used last: what an app asks in a week, at some 200 bytes each."""
NAMES_FILE_BYTES_MAX: Final = 256 * 1024
"""Size up to which the file is read; a larger one is not ours."""
NAMES_WRITE_PAUSE_S: Final = 2.0
"""Pause between a change and the writing of it: names come in bursts."""
