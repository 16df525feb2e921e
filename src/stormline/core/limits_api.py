"""Bounds of the API gate and of own protocols on the gateway, each with its reason."""

from typing import Final

# -- upstreams --------------------------------------------------------------------------------------------------------
UPSTREAMS_MAX: Final = 2000
"""Upstreams in one record; a platform's hosts and their paths."""
UPSTREAM_ENDPOINTS_MAX: Final = 64
"""Endpoints of one upstream: beyond that a balancer of its own stands before them."""
UPSTREAM_WEIGHT_MAX: Final = 1000
"""Largest weight of an endpoint: thousandths are as fine as traffic is ever shared out."""
UPSTREAMS_BYTES_MAX: Final = 256 * 1024
"""The record of all upstreams: as much as a request to the gateway's API may bring."""
UPSTREAM_CONNECT_TIMEOUT_S: Final = 5.0
"""Wait for a connection to an endpoint, unless its upstream says otherwise: two lost SYNs are borne, which are sent
again after 1 and 3 s (RFC 6298)."""
UPSTREAM_READ_TIMEOUT_S: Final = 60.0
"""Longest silence in an answer's body, unless its upstream says otherwise: as nginx's `proxy_read_timeout`."""
UPSTREAM_TIMEOUT_MAX_S: Final = 3600.0
"""Longest time that can be given for anything about an upstream: that of a call (`CALL_DEADLINE_MAX_S`)."""
UPSTREAM_RETRIES: Final = 1
"""Further tries of one request, unless its upstream says otherwise: one other endpoint."""
UPSTREAM_RETRIES_MAX: Final = 4
"""Further tries that can be asked for."""
UPSTREAM_FOLLOW_PAUSE_S: Final = 1.0
"""Before the record of upstreams is followed anew where the engine was away."""

# -- circuit breaker --------------------------------------------------------------------------------------------------
BREAKER_FAILURES: Final = 5
"""Failures in a row that open a circuit: single ones are chance, and Envoy's outlier detection takes five too."""
BREAKER_SHARE: Final = 0.5
"""Share of failures among what is remembered that opens it: an endpoint that fails every other request is ill, though
never five in a row."""
BREAKER_SAMPLES_MIN: Final = 20.0
"""Outcomes remembered below which a share says nothing."""
BREAKER_HALF_LIFE_S: Final = 10.0
"""Age at which an outcome counts half."""
BREAKER_OPEN_FIRST_S: Final = 1.0
"""How long a circuit is open the first time: a restarted process is back by then."""
BREAKER_OPEN_MAX_S: Final = 30.0
"""The longest; it doubles with each trial that fails."""
BREAKER_CALLER_S: Final = 5.0
"""Wait after which a caller's own deadline counts against the endpoint: an impatient caller says nothing of it."""

# -- response cache ---------------------------------------------------------------------------------------------------
CACHE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Answers kept by one gateway process, over all apps."""
CACHE_APP_SHARE: Final = 0.5
"""Share of it that one app may fill, so that none drives out all others' answers."""
CACHE_ENTRY_BYTES_MAX: Final = 1024 * 1024
"""Largest answer that is kept: larger ones would drive out hundreds of small ones."""
CACHE_ENTRY_OVERHEAD_BYTES: Final = 1024
"""What an entry is counted for beside its body and headers, so that empty ones cost something too."""
CACHE_VARIANTS_MAX: Final = 8
"""Answers to one URL that differ by Vary; the oldest goes first."""
CACHE_WRITES_REMEMBERED: Final = 4096
"""URLs whose last write is remembered, so that no answer from before it is kept: those of some seconds."""
CACHE_LIFE_MAX_S: Final = 24 * 3600.0
"""Longest time an answer counts as fresh, or serves in an error, whatever it says itself."""

# -- compression ------------------------------------------------------------------------------------------------------
COMPRESS_BYTES_MIN: Final = 1024
"""Smallest body worth compressing: below it a body fits into one packet anyway, and the header costs as much."""
COMPRESS_GOOD_BYTES_MIN: Final = 16 * 1024
"""The same on a network that is good, or of which nothing is known: below it nobody would notice."""
COMPRESS_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest body of known length that is compressed: what is larger is mostly compressed already, and would hold the
processor for seconds."""
COMPRESS_STEP_BYTES: Final = 64 * 1024
"""Bytes compressed in one go, before others have their turn: a fifth of a millisecond by zstd 3, one by brotli 5. Steps
of 16 KiB, many bodies in turn, cost twice the time: each finds its memory cold."""
COMPRESS_STREAMS_MAX: Final = 64
"""Bodies compressed at once by one process; those beyond go as they are. Each holds up to a megabyte meanwhile."""
COMPRESSORS_KEPT: Final = 8
"""Idle compressors kept for each way of coding, a megabyte each at most."""

# -- identity ---------------------------------------------------------------------------------------------------------
IDENTITY_LIFE_S: Final = 120.0
"""Life of a signed identity: longer than a request waits for its turn, too short to be of use elsewhere."""
IDENTITY_RENEW_S: Final = 60.0
"""Age at which the next request gets a new one: a signature costs as much as half a request."""
IDENTITIES_KEPT: Final = 8192
"""Signed identities kept at least, twice as many at most: some 10 MB."""

# -- own protocols ----------------------------------------------------------------------------------------------------
OWN_MESSAGE_BYTES_MAX: Final = 1024 * 1024
"""Largest message of an own protocol that a plug-in can allow; it is held whole in memory."""
OWN_MESSAGE_BYTES: Final = 64 * 1024
"""The same, where the plug-in says nothing."""
OWN_MESSAGES_PER_S: Final = 100.0
"""Messages a second that a device may send on one stream where the plug-in says nothing; more wait."""
OWN_MESSAGES_BURST: Final = 200
"""Messages it may send at once."""
OWN_STREAMS_PER_DEVICE: Final = 4
"""Open streams of one protocol and device where the plug-in says nothing; a client opens one, and another while the
first one ends."""
OWN_STREAMS_MAX: Final = 20_000
"""Open streams of one protocol on one node where the plug-in says nothing."""
OWN_OUTBOX_MAX: Final = 16
"""Messages of one stream that a client holds while the network takes none; then its sender waits."""
OWN_CLOSED_S: Final = 5.0
"""Time a plug-in has for its `closed`, while the stream is gone already."""
