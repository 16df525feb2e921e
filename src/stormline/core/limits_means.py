"""Bounds of the means: plans and rules, configured addresses, hedges, answers over clear HTTP, verdicts on bodies.

The rest of the product's bounds is in `limits`.
"""

from typing import Final

# -- plans and rules --------------------------------------------------------------------------------------------------
PLAN_ATTEMPTS_MAX: Final = 6
"""Steps of one call by a plan of full effort; the ordinary plan keeps to `ATTEMPTS_MAX`. More tries within the 15 s of
a call leave each too little time on a slow network."""
MEANS_TRIES_MAX: Final = 3
"""Tries by one of the means of last resort (clear HTTP, the original URL): the article's "off, or 1 to 3"."""
RULES_MAX: Final = 256
"""Business rules of one client. The first that fits is found by looking at each, once for each path."""
RULE_PATH_CHARS_MAX: Final = 256
"""A rule's path pattern; it is written by hand."""
RULE_MATCHES_CACHED: Final = 1024
"""Method, host and path whose rule is remembered: an app asks for few paths, over and over."""
PLAN_NAMES_TOLD_MAX: Final = 32
"""Names of a dispatch plan's that a client does not know, of which each stands in its log once."""
MEANS_HOSTS_MAX: Final = 256
"""Hosts with addresses in the settings."""
MEANS_ADDRESSES_MAX: Final = 16
"""Addresses of one such host: as many as one dial tries (`DIAL_CANDIDATES_MAX`)."""

# -- hedges -----------------------------------------------------------------------------------------------------------
HEDGE_QUANTILE: Final = 0.95
"""A read that waits for its first byte longer than this share of those before it may have a second one beside it ("The
Tail at Scale", Dean and Barroso 2013)."""
HEDGE_SAMPLES_MIN: Final = 20
"""Answers of one class of path from which that quantile is known: of twenty one is beyond it."""
HEDGE_MARGIN_S: Final = 0.1
"""How much later than that quantile: where all answers come within a millisecond, a garbage collection of the server is
no reason for a second request."""
HEDGE_BYTES_SHARE: Final = 0.05
"""Bytes that hedges may add to those of ordinary requests and answers."""
HEDGE_HANDSHAKE_BYTES: Final = 6 * 1024
"""What a hedge is taken to cost beside its request and answer: the TCP and TLS handshake of a connection of its own,
with a chain of three certificates. Where a connection stands already it costs less."""
HEDGE_CLASSES_MAX: Final = 2048
"""Classes of path (network, host, method and first parts of the path) whose waits are remembered, some 300 bytes each;
those unused for longest go first, never more than twice as many."""

# -- beside a request on a metered network -----------------------------------------------------------------------------
METERED_SHARE: Final = 0.05
"""Bytes that all that is made beside something else (hedges, second lanes, second handshakes) may add, where bytes cost
money, to those of everything else."""
METERED_FLOAT_BYTES: Final = 32 * 1024
"""Bytes they may add before anything was carried, so that the first requests can be rescued: five handshakes, or four
with a small request and answer."""
METERED_ANSWER_BYTES: Final = 8 * 1024
"""What an answer beside another is reckoned to cost where none of its class is known; a larger guess would forbid the
first rescue of each class."""
METERED_SILENCE_S: Final = 3.0
"""Silence of a TLS handshake after which another of the same dial is a repetition and not beside it, where no bytes are
left for that: the kernel has repeated a lost packet twice by then (RFC 6298: after 1 and 3 s at most)."""

# -- answers over clear HTTP ------------------------------------------------------------------------------------------
CLEAR_BODY_BYTES_MAX: Final = 1024 * 1024
"""Body of an answer whose signature is checked: it is held back, whole, until that is done."""
CLEAR_SIGNATURE_AGE_S: Final = 300.0
"""Age of a signature that names its time and not our nonce: an answer signed once, for everybody, in a cache.
Whoever is on the way can give an old answer again for this long."""
SIGNATURE_FIELD_CHARS_MAX: Final = 8 * 1024
"""`Signature-Input`, `Signature` and `Content-Digest`, each with all its lines."""
SIGNATURE_MEMBERS_MAX: Final = 8
"""Members of such a field: one signature or digest is used, some servers send two for a change of keys."""
SIGNATURE_COMPONENTS_MAX: Final = 64
"""Components that one signature covers."""
SIGNATURE_PARAMS_MAX: Final = 16
"""Parameters of one member or component; RFC 9421 knows seven."""
CLEAR_KEYS_MAX: Final = 16
"""Keys one rule trusts: two for a change of keys, of some origins."""

# -- verdicts on bodies -----------------------------------------------------------------------------------------------
PARSE_WAIT_S_MAX: Final = 300.0
"""The longest that a call's record can be made to wait for its business's verdict."""
PARSE_WAITING_MAX: Final = 1000
"""Records that wait for one; beyond it a record goes without. As many as wait for the APM
(`REPORT_QUEUE_RECORDS_MAX`)."""
PARSE_REASON_CHARS_MAX: Final = 200
"""A verdict's reason in the story; longer ones are cut."""
