"""Bounds of what the client knows of its network: watching it, and finding out what is wrong with it."""

from typing import Final

# -- watching ---------------------------------------------------------------------------------------------------------
NETLINK_BYTES_MAX: Final = 64 * 1024
"""One datagram of the kernel's; it fills at most 32 KiB of a reader's buffer (`NLMSG_GOODSIZE`)."""
NETLINK_MESSAGES_MAX: Final = 1024
"""Messages read of one datagram: 64 KiB of the smallest kind that means something are fewer."""
NETLINK_ATTRIBUTES_MAX: Final = 128
"""Attributes read of one message; a link has some sixty."""
NETLINK_READS_MAX: Final = 16
"""Datagrams read at once before other work of the loop has its turn. What a router's table throws at us waits, or
overflows the socket, which counts as a change."""
NETLINK_ANSWER_S: Final = 0.2
"""The kernel answers a question before it takes the next; beyond this something is broken and the answer is unknown."""
NETWORK_ADDRESSES_MAX: Final = 16
"""Addresses of one interface that are looked at; IPv6 privacy addresses pile up to some ten."""
NETWORK_SETTLE_S: Final = 0.1
"""From the first sign of a change to looking: route, address and link change within milliseconds of each other."""
NETWORK_LOST_HOLD_S: Final = 1.0
"""How long a network has to be gone before it is told: a hand-over has none for some hundred milliseconds."""
NETWORK_REFINE_S: Final = 1.0
"""When a new network is looked at once more: by then the kernel knows its gateway's link-layer address."""
NETWORK_POLL_S: Final = 2.0
"""Pause between two looks where nothing tells of changes: a change is seen within five seconds."""
NETWORK_POLL_IDLE_S: Final = 60.0
"""Such looks end this long after the last request, so that an idle app does not wake its device; the next request
looks first."""
NETWORK_CALLBACKS_MAX: Final = 64
"""Callbacks of one client that are told of its network."""
NETWORK_KEY_BYTES: Final = 32
"""The random key of an installation that names of networks are hashed with (BLAKE2b takes up to 64)."""
NETWORK_ID_BYTES: Final = 8
"""A network's hashed name: among 20 networks two meet by chance once in 10^17."""
NETWORK_NAME_CHARS_MAX: Final = 128
"""A network's clear name as it is told; an SSID has 32 bytes (IEEE 802.11), which may be escaped."""
NETWORK_STORY_BYTES_MAX: Final = 8 * 1024
"""One line of a recorded story of a network."""
NETWORK_STORY_LINES_MAX: Final = 10_000
"""Lines of such a story: a day with a change every ten seconds."""
SLEEP_S_MIN: Final = 2.0
"""Between two looks the clock that goes on in sleep has run this much further than the one that does not: the machine
slept. Shorter sleeps break no connection."""
CLOCK_DRIFT_MAX: Final = 0.001
"""What a clock may run faster or slower without having stepped; NTP slews by at most 0.0005."""

# -- finding out what is wrong ----------------------------------------------------------------------------------------
PROBE_S: Final = 4.0
"""Time of one probe: a lost SYN is sent again after 1 s and 3 s, and EDGE's round trip is 0.6 s."""
PROBE_GATEWAY_S: Final = 3.5
"""Time of the gateway's probe: the kernel asks three times for a neighbour, a second apart."""
PROBE_NEIGHBOUR_LOOK_S: Final = 0.1
"""Pause between two looks at the kernel's table of neighbours."""
PROBE_PAUSE_S: Final = 10.0
"""Shortest pause between the starts of two rounds of probes. Longer than a lift's ride of eight seconds."""
PROBE_PAUSE_S_MAX: Final = 60.0
"""Longest; the pause doubles while nothing gets better."""
PROBE_ROUNDS_QUIET_MAX: Final = 3
"""Rounds since the last failed request, after which nobody seems to care."""
PROBE_TARGETS_MAX: Final = 3
"""Servers asked in one round for a connection, and name servers asked for a name."""
PROBE_ANSWER_BYTES_MAX: Final = 4096
"""What is read of an answer to a probe; beyond it the answer is a page, and a page is a portal's."""
PROBE_STRIKES: Final = 2
"""Failed attempts in a row, of whatever requests, before the first probe is made. A request has several."""
VERDICT_HOSTS_MAX: Final = 32
"""Hosts whose latest failures are kept; the one unused for longest goes first."""
VERDICT_FAILURES_MAX: Final = 8
"""Failures kept of one host."""
VERDICT_OUTCOMES: Final = 20
"""Last outcomes of attempts: where others failed among these too, one host that fails is no proof against the host."""
VERDICT_MEMORY_S: Final = 60.0
"""Age at which an answer or a failure says nothing of now."""
VERDICT_SURE_S: Final = 10.0
"""How long nothing may come at all before "dead" is said with confidence: lifts and tunnels are shorter."""
VERDICT_SETTLE_S: Final = 5.0
"""After others have answered, until the failures of one host count as its own: what was under way in a tunnel still
fails when light is back."""
VERDICT_AGAIN_S: Final = 8.0
"""Within it a host must have failed twice to be surely at fault while others answer: who asks every four seconds meets
that, and a single packet lost after the host has healed does not (33 wrong looks in 20,000 simulated worlds; now 5)."""
VERDICT_SLOW_S: Final = 1.0
"""Median of the last times from question to answer from which a network is called slow."""
VERDICT_TIMES: Final = 5
"""How many such times are looked at."""
SIGNAL_GOOD_DBM: Final = -75
"""WiFi signal from which a silent router is the router's fault, not the distance's."""

NETWORK_WAYS_MAX: Final = 8
"""Default routes that are looked at for a second way out; more than four are not used (`limits.PATHS_MAX`)."""

# -- asking scheduling centres ----------------------------------------------------------------------------------------
CENTRES_MAX: Final = 32
"""Ways to scheduling centres that are considered and remembered: eight centres by TLS and in clear, and names."""
CENTRE_KEYS_MAX: Final = 8
"""Keys told by plans that are trusted beside the bundle's: a rotation has two, and the last few stay readable."""
ASK_BESIDE_MAX: Final = 3
"""Ways asked at once for one question: a third beside two that are silent. More would make an outage a storm."""
ASK_STAGGER_S: Final = 0.8
"""Head start of a way before the next is asked too, while little is known: TCP, TLS and a question are three round
trips, of which most mobile networks make this. Five silent ones cost 4 s of the 10 s in which people give up."""
ASK_STAGGER_S_MIN: Final = 0.2
"""The shortest head start that is learned: a pause of the centre is no reason to ask two."""
ASK_STAGGER_S_MAX: Final = 1.5
"""The longest that is learned; below `limits_platform.DISPATCH_TRY_S`, so that a silent one never costs all of it."""
ASK_STAGGER_QUANTILE: Final = 0.95
"""Share of the answers that come within the head start: one question in twenty asks twice where all is well."""
ASK_STAGGER_SAMPLES_MIN: Final = 5
"""Answers before the head start is learned from them."""
ASK_TRY_S_MAX: Final = 10.0
"""The longest wait for an answer that is believed."""
SNIFF_PAUSE_S: Final = 10.0
"""A way that failed is left alone for so long where others answer, doubled with each further failure."""
SNIFF_PAUSE_S_MAX: Final = 900.0
"""The longest such pause: a centre that is back carries its share again within a quarter of an hour."""
PLAN_RETRY_S_MAX: Final = 60.0
"""The longest pause after questions that nobody answered well; it begins at `limits.PLAN_RETRY_S` and doubles."""
PLAN_STALE_LIVES: Final = 24.0
"""For so many of its own lives after its end an expired plan serves at once, while a newer one is asked for: a day for
one of `PLAN_LIFE_S`, in which addresses seldom move (`RESOLVE_STALE_S`), and less where the operator gave it less."""
PLAN_STALE_WAIT_S: Final = 1.0
"""How long a call waits for a newer word where it has one that expired before that; then the expired one serves."""
PLAN_CHANGES_KEPT: Final = 8
"""Answers that change a stored plan and are kept behind it: read one after the other at a start, some 0.1 ms each. The
next answer after them is wanted whole."""
NOTICE_PAUSE_S: Final = 1.0
"""Between two questions that notices over the long connection led to: a gateway that tells without end costs one
question a second."""
CLOCK_WITNESS_S: Final = 300.0
"""How far apart two centres' answers may be issued to agree on the time: a centre gives a signed answer again for
`limits_platform.PLAN_REFRESH_S`, and their clocks may differ by `limits.CLOCK_SKEW_S`."""
