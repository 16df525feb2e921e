"""Every bound of the product in one place, each with its reason. Units are last in the name.

Those of some parts are in files of their own: `limits_platform` (the roles), `limits_names`, `limits_network`,
`limits_level`, `limits_means`, `limits_memory`, `limits_lab` (laboratory and simulator).

A bound is part of the contract: what overflows it gets a named error or code, never silence.
"""

from typing import Final

# -- names ------------------------------------------------------------------------------------------------------------
NAME_BYTES_MAX: Final = 128
"""A user, device or topic name: base32 makes 205 characters of it, well inside one engine subject (4 KiB)."""
METHOD_CHARS_MAX: Final = 128
"""An RPC method name; becomes part of a subject."""
HELLO_TAGS_MAX: Final = 8
"""Tags a device gives itself."""
HELLO_WORD_CHARS_MAX: Final = 64
"""One of them, the app's version, or a library's name: a device's entry stays below 1 KB."""

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
WIRE_SECONDS_MAX: Final = 365 * 86_400.0
"""The longest time span put on the wire or believed from it: a year; longer is a mistake."""

# -- sessions that outlive their connection ----------------------------------------------------------------------------
RECEIVED_EVERY_FRAMES: Final = 32
"""Frames of a session after which their receiver confirms them: one small frame in 33, and few small ones kept."""
RECEIVED_EVERY_BYTES: Final = 32 * 1024
"""The same in bytes: two chunks. What a sender keeps of a flowing body is what is on its way and this."""
KEPT_BYTES_MAX: Final = 1024 * 1024
"""Bytes of a session's frames kept until the peer confirms them. Four bodies with all their credit under way; beyond it
the oldest are dropped, and the session cannot be resumed until the peer has confirmed those."""
KEPT_FRAMES_MAX: Final = 4096
"""The same in frames: small ones cost their objects, some 200 KB. All calls that may be open, sixteen times."""
KEPT_ROOM_BYTES: Final = 64 * 1024
"""A session without a connection takes pushes and bodies while it keeps less than this; calls' short answers always."""
RESUME_WINDOW_S: Final = 60.0
"""How long a session waits for its client after a loss: a tunnel, a lift, a change of network."""
RESUME_TOKEN_CHARS_MAX: Final = 192
"""A resume token: node (a DNS label), session and secret."""

# -- time on the long connection --------------------------------------------------------------------------------------
HELLO_TIMEOUT_S: Final = 5.0
"""From accept (client: from its HELLO) to the WELCOME, absolute: bytes that dribble in do not extend it."""
HEARTBEAT_S: Final = 60.0
"""Longest silence before a client pings while its user looks at it. Otherwise what its network stands:
`limits_heartbeat`."""
HEARTBEAT_ANSWER_S: Final = 8.0
"""Wait for a PONG, or any other frame after a PING, before the link counts as dead."""
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
HOME_BYTES_MAX: Final = 4096
"""A signed home of a user; two names of `NAME_BYTES_MAX`, a unit and some numbers are far below."""
PLAN_LIFE_S: Final = 3600.0
"""How long a dispatch answer may be used."""
CLOCK_SKEW_S: Final = 120.0
"""Tolerance when a signed time is compared with ours."""
PLAN_HOSTS_MAX: Final = 100
"""Hosts one question to dispatch may name, and one notice: one that would name more means any."""
PLAN_VERSION_MAX: Final = 2**53 - 1
"""The highest version of a plan: integers that every JSON reader keeps exact."""
NOTICE_HOST_CHARS_MAX: Final = 253
"""A host name in a notice: what DNS allows (RFC 1035 section 2.3.4)."""
BUNDLE_BYTES_MAX: Final = 256 * 1024
"""A client bundle file."""

# -- outward: names, sockets, HTTP connections ------------------------------------------------------------------------
RESOLVE_THREADS_MAX: Final = 8
"""Threads that may hang in the system resolver at once. A dead resolver holds each for up to half a minute; eight let
a page's worth of other names still pass, and memory stays small."""
RESOLVE_WAITING_MAX: Final = 256
"""Names that wait for such a thread; beyond it a lookup fails at once."""
RESOLVE_TIMEOUT_S: Final = 5.0
"""One lookup, the first question's time-out of the usual resolvers; a longer wait helps nobody who has a deadline."""
CONNECT_STAGGER_S_MIN: Final = 0.1
"""Least head start where round trips are known (RFC 8305 section 5)."""
CONNECT_STAGGER_S_MAX: Final = 1.0
"""Greatest such head start (RFC 8305 allows 2 s): whoever waits longer notices."""
RESOLVE_REPEAT_S: Final = 1.5
"""A lookup that has taken this long is begun again beside itself: a lost packet costs the C library 5 s (resolv.conf,
`timeout`), and on EDGE an answer needs 0.6 to 1.3 s."""
RESOLVE_LOOKUPS_MAX: Final = 3
"""Lookups of one name side by side."""
RESOLVE_FRESH_S: Final = 30.0
"""Age to which an answer is given without asking again. The system tells no TTL; half of the minute that is usual for
names that move."""
RESOLVE_OLD_S: Final = 600.0
"""Age beyond which a new question gets `RESOLVE_PATIENCE_S` before the old answer is used: most TTLs are over."""
RESOLVE_STALE_S: Final = 86_400.0
"""Age beyond which an answer is not used at all: addresses of services outlive a day's outage of DNS (RFC 8767 section
5 would keep them one to three days)."""
RESOLVE_PATIENCE_S: Final = 0.5
"""How long a question may keep waiting whoever has an old or doubted answer: a working resolver needs less on 3G."""
RESOLVE_FAILED_S: Final = 2.0
"""How long a failure stands for the next questions, so that a burst of requests is not a burst of queries; and an
answer younger than this is not doubted. Longer would outlast short blackouts."""
RESOLVE_NAMES_REMEMBERED: Final = 1024
"""Names whose answers are remembered, some 300 bytes each; the one unused for longest is forgotten first."""
CONNECT_STAGGER_S: Final = 0.25
"""Head start of an address before the next is tried as well (RFC 8305 section 8: 250 ms)."""
DIAL_CANDIDATES_MAX: Final = 16
"""Addresses one dial tries; the rest of a longer list is not used."""
DIAL_REPEAT_S: Final = 2.0
"""Silence of an address after which a dial knocks again beside the connection it tries already. The kernel repeats a
lost SYN after 1, 3 and 7 s; together that is a look about every second, so a blackout's end is noticed within one."""
DIAL_REPEAT_S_MIN: Final = 0.25
"""Least pause between two knocks at one address, whatever the advice: a SYN is no flood at four a second."""
DIAL_KNOCKS_MAX: Final = 3
"""Connections to one address that one dial tries side by side; an answer later than three knocks is hardly one."""
DIAL_RACERS_MAX: Final = 16
"""Connections one dial tries side by side; beyond it a new knock replaces an older one."""
DIAL_ROUND_S_MIN: Final = 1.0
"""Where every address has been tried and at least one was only silent, they are begun again, this long after the last
such beginning at the earliest."""
TLS_HEAD_START_S: Final = 0.3
"""Head start of a TLS handshake before another of the same dial is begun, at least: as `CONNECT_STAGGER_S`, and the
work of both sides. On slow links it is two round trips."""
RECEIVE_BYTES_MAX: Final = 64 * 1024
"""Most bytes taken from a socket at once: four TLS records, and past it bigger reads gain nothing."""
SEND_PIECE_BYTES: Final = 64 * 1024
"""Pieces a large request body is sent in: between two of them an early answer can stop it. A request that fits one
piece leaves in one send."""
TCP_KEEPALIVE_IDLE_S: Final = 60
"""Silence after which the kernel asks the peer for a sign of life, for connections that nobody else asks: a stream of
events over HTTP/1.1, a tunnel. Routers forget a silent connection after minutes, some mobile ones after two; asked once
a minute, a phone's radio sleeps in between. Pooled connections at rest are closed before it (`POOL_IDLE_S`)."""
TCP_KEEPALIVE_INTERVAL_S: Final = 15
"""Pause between two such questions while none is answered."""
TCP_KEEPALIVE_PROBES: Final = 4
"""Questions without an answer after which the connection is broken: two minutes from the last byte, time enough for a
network that is gone for a minute."""
EAGER_OPERATIONS_MAX: Final = 16
"""Socket operations in a row that may succeed without a turn for other tasks: 1 MiB, well under a millisecond."""
TLS_SESSION_PLACES_MAX: Final = 256
"""Places (name, port, context) whose TLS sessions are kept; the one unused for longest goes first."""
TLS_SESSIONS_PER_PLACE_MAX: Final = 4
"""Sessions kept for one place. Each serves one connection; more are rarely opened at once, and each holds a copy of the
server's certificates, some 5 KB."""
HTTP_HEAD_BYTES_MAX: Final = 64 * 1024
"""An answer's head with its interim answers (1xx), and separately what a chunked body may hold between two pieces of
data (extensions, trailers). Twice what common servers allow for requests."""
HTTP_HEADERS_MAX: Final = 256
"""Fields of an answer's head; more is an attack or a fault."""
HTTP_FIELDS_REMEMBERED: Final = 16
"""Sets of request fields that a pool remembers as checked and put into lines: a client has one or two for each kind of
request. Where every request has one of its own nothing is gained, and little is lost."""
HTTP_FIELDS_REMEMBERED_BYTES: Final = 2048
"""Size of such a set above which it is checked anew: at most 32 KiB are kept."""
PACKET_GAP_S: Final = 12.0
"""Silence in the middle of an answer's body after which the connection counts as dead (the packet-to-packet time-out
for mobile networks of the published signalling network; 8 s there on WiFi)."""
POOL_CONNECTIONS_MAX: Final = 256
"""HTTP connections one pool holds, idle ones too; a small part of the descriptors a process has."""
POOL_CONNECTIONS_PER_ORIGIN_MAX: Final = 32
"""HTTP/1.1 connections to one origin: a burst of requests still goes out at once, and no server sees us as a flood."""
H2_DOUBT_S: Final = 2.0
"""A request over a shared connection that got no answer for this long and was given up makes us look whether the
connection lives: else a path that died in silence takes every further request until TCP gives up, minutes later."""
H2_CHECK_S: Final = 5.0
"""Wait for the answer to that PING, or any other sign of life: a full queue of a slow link holds it up for seconds."""
POOL_OPENING_S: Final = 120.0
"""Longest time one connection is being made for those who wait for it; each of them has a deadline of its own."""
POOL_NOTES_KEPT: Final = 4
"""Last notes of making a connection that go into the error of who could not wait longer."""
POOL_OPENING_BESIDE_S: Final = 10.0
"""The same for one beside others that serve: it is finished also where nobody waits any more, so not for long."""
POOL_BESIDE_PAUSE_S: Final = 1.0
"""After such a connection could not be made: time until another is tried. Those that stand go on serving meanwhile."""
POOL_PLACES_REMEMBERED: Final = 1024
"""Places of which it is remembered what their servers speak, how many requests side by side they allow, and after how
many they end a connection; some 200 bytes each."""
POOL_WAITING_MAX: Final = 16_384
"""Requests that wait for a connection or a stream; beyond it a request fails with QueueFull. Each costs some 1.5 kB
here, beside what its caller's task costs; a fleet of loops that ask without end is stopped all the same."""
POOL_IDLE_S: Final = 20.0
"""How long an unused connection is kept: below the 30 s (`HTTP_KEEP_ALIVE_S`) and more of common servers, so that ours
is rarely the request that meets their close."""

# -- HTTP/2 -----------------------------------------------------------------------------------------------------------
H2_STREAMS_MAX: Final = 100
"""Streams of ours open on one connection, whatever more the peer allows, and before it has said what it allows (RFC
9113 section 6.5.2 asks servers for at least this)."""
H2_STREAMS_UNTOLD: Final = 8
"""Streams opened before the peer's SETTINGS have said how many it takes, one round trip after the handshake: what most
bursts need, and few enough to lose little where it takes fewer and refuses the rest."""
H2_STREAMS_FEW: Final = 32
"""A connection that takes fewer requests than this at once, or over its life, gets others beside it where more wait;
HTTP/1.1 would be given as many connections (`POOL_CONNECTIONS_PER_ORIGIN_MAX`)."""
H2_CONNECTIONS_MAX: Final = 6
"""HTTP/2 connections to one place that take requests: what browsers open to one host that speaks HTTP/1.1."""
H2_STREAMS_CROWDED: Final = 4
"""Requests under way on one HTTP/2 connection from which on others are made beside it, where the link has room: one
lost packet holds all of them up. An app that asks for something now and then has fewer, and keeps one connection."""
H2_CONNECTIONS_SPREAD: Final = 3
"""Connections that requests are spread over: with a burst of losses on one, two go on; each costs one handshake."""
H2_STREAM_WAIT_S: Final = 1.0
"""A request that has waited this long for a stream has a connection made beside those whose streams are all taken, by
long polls for example."""
H2_LARGE_BYTES: Final = 256 * 1024
"""An answer of which more than this is still to come holds up the others on its connection where a packet is lost, and
where the server has filled its send buffer with it: what comes meanwhile gets one more connection."""
H2_WAITING_MAX: Final = 256
"""Requests that wait on one connection for a stream; beyond it a request fails with QueueFull. The pool gives a
connection no more than it takes at once; this is for other users, and for limits that sink meanwhile."""
H2_FRAME_BYTES_MAX: Final = 16 * 1024
"""Payload of a frame we take: the protocol's least, so that no stream holds the others back for long."""
H2_STREAM_WINDOW_BYTES: Final = 512 * 1024
"""Body bytes of one stream that may be on their way or unread: 20 Mbit/s at 200 ms, and what a stalled reader costs."""
H2_STREAM_WINDOW_BYTES_MIN: Final = 16 * 1024
"""The same on the slowest link: a frame, and what EDGE (12.5 KB/s) brings in twice its round trip of 0.6 s. What a
server may send of one answer it hands to its kernel at once, and every later answer of the connection waits behind."""
H2_STREAM_QUEUE_S: Final = 0.5
"""Time that a stream's window keeps a link busy beyond two round trips: one that wavers stays full, slow start makes a
short transfer's rate look smaller than it is, and half a second is not felt by whoever waits behind it."""
H2_CONNECTION_WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Body bytes of all streams that may be on their way: eight streams at full speed."""
H2_UNREAD_BYTES: Final = 8 * 1024 * 1024
"""Unread body bytes on one connection above which it gets no new credit either. Sixteen readers must stall before the
other streams feel it; memory is bounded by this and one connection window."""
H2_CONTROL_BYTES_MAX: Final = 64 * 1024
"""Answers to the peer's own frames (acknowledgements) that wait behind a send it does not take; beyond it the
connection is closed (CVE-2019-9512, CVE-2019-9515)."""
H2_EMPTY_FRAMES_MAX: Final = 1000
"""Frames in a row that bring nothing (empty DATA, unknown ones, any of streams that are over); beyond it the peer only
burns our CPU (CVE-2019-9518)."""
H2_CREDIT_FRAMES_MAX: Final = 16 * 1024
"""WINDOW_UPDATE frames in a row between which we send no body: what a server sends that gives the 4 MB on their way
back 256 bytes at a time. More only burn our CPU."""
H2_CONTINUATIONS_MAX: Final = 64
"""Frames that go on with one head, so that empty ones end (the CONTINUATION flood of 2024). A head of
`HTTP_HEAD_BYTES_MAX` in full frames needs four; a peer may cut it into pieces of 1 kB."""
H2_HEADER_TABLE_BYTES: Final = 4096
"""Header table of our requests, where the peer allows more too (RFC 7541 section 4.2): the protocol's default, which
holds the fields of usual requests; each connection has one."""
H2_FIELDS_KNOWN: Final = 64
"""Codings of fields, and heads of answers, remembered by one connection: a header table holds as many."""
H2_REQUESTS_KNOWN: Final = 8
"""Sets of header fields remembered as checked by one connection; a client sends few different ones."""
H2_KNOWN_BYTES_MAX: Final = 1024
"""Longer ones are not remembered; with `H2_FIELDS_KNOWN`, at most 64 KB for each of the three memories."""
H2_INDEXED_BYTES_MIN: Final = 20
"""Credentials shorter than this never enter the header tables, where a guess could be confirmed by the size of what is
sent (RFC 7541 section 7.1); longer ones cannot be guessed whole, and repeating them costs bytes in each request."""
H2_RESETS_BURST: Final = 16
"""Streams we reset at once. Servers guard themselves against rapid resets (CVE-2023-44487); the strictest met, hyper's
h2 under granian, hangs up at 20 not yet accepted."""
H2_RESETS_PER_S: Final = 16.0
"""How fast that allowance comes back; nginx, nghttp2 (33 a second) and Go allow more."""

# -- the client -------------------------------------------------------------------------------------------------------
ATTEMPTS_MAX: Final = 4
"""Steps of one call, whatever the plan says: more tries only load a network that already fails."""
LANES_MAX: Final = 3
"""Steps of one call under way at once: one that may still answer, one beside it, and one more where both are silent."""
REFUSALS_MAX: Final = 16
"""Times that one call goes elsewhere because a peer has not processed it: a burst of a hundred and fifty against an
origin that ends each connection after ten."""
QUEUE_CALLS_MAX: Final = 64
"""Calls in flight that one look at the queue before a call takes in, longest running first: more say nothing new, and
each of a thousand calls looks."""
RETRY_PAUSE_S: Final = 0.1
"""Pause before a request is sent again where something said no (a refused connection, an answer 503), doubled each
time and spread by half: what was only restarted is often back at once."""
RETRY_AFTER_SPREAD: Final = 0.25
"""How much longer than a `Retry-After` asks for is waited at most, by chance: all were told the same moment."""
RETRY_KEPT_BYTES: Final = 64 * 1024
"""Body of an answer that says "try again" (503, 429) kept for the caller while we do; a larger one is not repeated."""
RETRY_KEPT_S: Final = 0.25
"""How long before its deadline a call that has such an answer gives it, where it still waits to ask again."""
DIALLED_HOSTS_MAX: Final = 256
"""Hosts with several addresses whose addresses are remembered, those dialled last: as many as have connections."""
KNOCKS_BESIDE_MAX: Final = 2
"""Other addresses of a host that are knocked at beside a silent one on a slow, dark link: a SYN each, now and then."""
LOOK_S_MAX: Final = 1.0
"""Longest pause between two looks: what another call has found out of the same connection is heeded within it."""
LOOK_FIRST_S: Final = 0.25
"""When a connection that owes an answer is looked at first: on a quick network most answers have come by then, and a
lost packet has been sent again."""
SAMPLE_PAUSE_S: Final = 0.05
"""Between two answers of a host that are learned from: twenty in a second say all there is to know."""
MEASURE_BODY_S: Final = 1.0
"""A body that comes for this long is measured while it comes, and again each time that has doubled: one of minutes must
not be the last to tell how slow the link is. Shorter spells tell of bursts."""
MEASURE_BODY_BYTES: Final = 16 * 1024
"""With less than this come a measurement would tell of slow start."""
RESUME_KEPT_BYTES: Final = 64 * 1024
"""Beginning of a body that is kept as it came, to be compared when the rest has to be fetched again; longer ones are
kept as a digest."""
RANGE_BYTES_MIN: Final = 16 * 1024
"""From this on the rest of a body is asked for by range (RFC 9110 section 14); shorter ones come again as a whole."""
RECONNECT_FIRST_S: Final = 1.0
"""Span of the first reconnect; a thousand clients of a restarted gateway come back spread over it."""
RECONNECT_MAX_S: Final = 60.0
"""Longest pause between two tries of the long connection."""
RECONNECT_STABLE_S: Final = 10.0
"""A session that ends sooner counts as a failed try: a gateway that accepts and drops is left alone more and more."""
RECONNECT_RETRY_AFTER_MAX_S: Final = 3600.0
"""The longest pause a gateway can ask for: a mistake of its operator must not keep devices away for a day."""
CALL_TRIES_MAX: Final = 8
"""Tries of one RPC that certainly did not get out, within its deadline; the back-off between them bounds it too."""
LINK_WAITING_MAX: Final = 1024
"""Calls that wait for one of the `CALLS_IN_FLIGHT_MAX` of a link; beyond it a call fails with QueueFull."""
RECORD_PATH_CHARS_MAX: Final = 512
"""Path of a call record; a batch of records stays within what the APM reads."""
STORY_LINES_MAX: Final = 64
"""Lines of one call's story: `ATTEMPTS_MAX` attempts with every address they race."""
PLAN_WAIT_S: Final = 3.0
"""The most of a call's time that asking dispatch may take; then the call goes on without a plan."""
PLAN_RETRY_S: Final = 5.0
"""Pause after dispatch could not be reached, so that its outage does not cost every call PLAN_WAIT_S."""
LINK_CONNECT_TIMEOUT_S: Final = 5.0
"""TCP and TLS of the long connection together, at one address."""
REPORT_QUEUE_RECORDS_MAX: Final = 1000
"""Call records that wait for the APM; the oldest are dropped and counted (1,000 are about 0.5 MB)."""
REPORT_INTERVAL_S: Final = 1.0
"""How long a record may wait for company before it is sent."""
REPORT_TIMEOUT_S: Final = 5.0
"""One try to deliver a report."""
REPORT_RETRY_S: Final = 10.0
"""Pause after the APM did not take a report; grows to ten times this."""
REPORT_FLUSH_S: Final = 2.0
"""What a closing client waits for its last report."""
DEVICE_CALLS_MAX: Final = 16
"""Calls of the server that one device works on at once."""
DESCRIPTORS_ADVISED: Final = 8192
"""Open files under which `stormline doctor` warns: some thousand long connections, upstreams and the store's files."""
HEALTH_TIMEOUT_S: Final = 2.0
"""`stormline status` waits this long for a part to take a connection."""
READ_TIMEOUT_S: Final = 10.0
"""Longest silence while waiting for an answer or between two packets of it; learned per host later."""

# -- bodies of answers ------------------------------------------------------------------------------------------------
CONTENT_CODINGS_MAX: Final = 5
"""Content codings on top of each other; curl and httpx2 take as many, and few use two (CVE-2022-32206)."""
DECODE_PIECE_BYTES: Final = 64 * 1024
"""Content that a decoder gives at once, whatever it could: what a bomb costs in memory. Past it bigger pieces gain
nothing."""
DECODE_BITE_BYTES: Final = 16 * 1024
"""Coded bytes that a decoder is given at once: zlib copies what it leaves for the next piece."""
DECODE_TURN_BYTES: Final = 1024 * 1024
"""Content decoded without a turn for other tasks: a few milliseconds."""
DECODE_WINDOW_LOG_MAX: Final = 23
"""The largest zstd window, 8 MiB: what a sender may use at most (RFC 9659 section 3)."""

# -- what kind of request it is ---------------------------------------------------------------------------------------
UPLOAD_BYTES_MIN: Final = 1024 * 1024
"""Size from which a request's body makes it an upload: eight times the largest signalling request, and its own way
takes longer than any server."""
DOWNLOAD_BYTES_MIN: Final = 1024 * 1024
"""The same of an answer."""
ANSWER_BYTES_TOLD_MAX: Final = 2**50
"""The largest answer that a caller can announce: 1 PiB, more is a slip."""
PATH_CLASSES_CACHED: Final = 1024
"""Paths whose class is kept, at most 1 KB each; finding it costs more than all else that is asked of a request."""

# -- server-sent events -----------------------------------------------------------------------------------------------
SSE_EVENT_BYTES_MAX: Final = 8 * 1024 * 1024
"""One event's data: as much as a call's body gathered in memory (`CALL_BODY_BYTES_MAX`)."""
SSE_SILENCE_S: Final = 60.0
"""Silence after which a subscription takes its connection for dead and comes back: servers are advised to send a
comment every 15 s (WHATWG HTML section 9.2.7), and coming back loses nothing."""

# -- time-outs of one request -----------------------------------------------------------------------------------------
SAMPLE_DURATION_S_MAX: Final = 3600.0
"""The longest measured duration that is believed; with a call's longest deadline nothing honest is longer."""
SAMPLE_BYTES_PER_S_MAX: Final = 125e9
"""The fastest measured rate that is believed: 1 Tbit/s."""
SKETCH_SAMPLES_MAX: Final = 64
"""Samples that count in a sketch of durations; then all counts are halved. Few enough that a bad moment is forgotten
after that many good answers."""
SKETCH_HALF_LIFE_S: Final = 600.0
"""After this long a sample of a duration counts half."""
SKETCH_SAMPLES_KEPT: Final = 8
"""Samples that stand for a sketch of durations between two starts: few, so that what is measured soon counts more."""
RATE_EPOCH_S: Final = 10.0
"""Rates measured within one such span count as one: its best. A transfer can be slow for many reasons, but is never
faster than the link."""
RATE_EPOCHS_MAX: Final = 4
"""Epochs remembered; the worst of them is believed."""
RATE_MEMORY_S: Final = 300.0
"""Age at which a measured rate is forgotten: a person walks out of one cell into another."""
TIMEOUT_NETWORKS_MAX: Final = 20
"""Networks whose round trips, rates and state are remembered at least, twice as many at most (Mars keeps 20 for its
heartbeat)."""
TIMEOUT_HOSTS_MAX: Final = 20_000
"""Hosts whose round trips are remembered at least, and (host, path class) pairs whose costs are; twice as many at most,
those unused for longest go first. All that is known of a host is less than 1 KB."""
PATH_CLASS_CHARS_MAX: Final = 64
"""A path class: the method and up to three parts of the path."""
TIMEOUT_FLOOR_FAST_S: Final = 1.0
"""Shortest first-packet time-out on WiFi and cable: three losses in a row at the kernel's shortest RTO (0.2 s) take
0.2 + 0.4 = 0.6 s to the second retransmission."""
TIMEOUT_FLOOR_SLOW_S: Final = 2.0
"""The same on cellular and unknown networks: waking a 3G radio alone can take two seconds."""
TIMEOUT_FAST_RTT_S: Final = 0.15
"""Round trips (90th percentile) up to which a network counts as WiFi and cable do, whatever its kind: a good LTE cell
does, 3G (200 ms and more) does not."""
TIMEOUT_MIN_S: Final = 0.001
"""With less time left an attempt is not begun; no time-out is ever shorter."""
TIMEOUT_CONNECT_S_MAX: Final = 10.0
"""Longest wait for one TCP connection, and for one TLS handshake (Mars waits as long for a socket); a deadline is
usually shorter."""
TIMEOUT_GAP_FAST_S_MIN: Final = 3.0
"""Shortest packet-to-packet time-out on WiFi and cable. Longer than for the first packet: what has come would be
thrown away."""
TIMEOUT_GAP_SLOW_S_MIN: Final = 5.0
"""The same on cellular and unknown networks: a train's tunnel of three seconds and one doubled RTO after it."""
TIMEOUT_GAP_S_MAX: Final = 60.0
"""Longest packet-to-packet time-out that a measured round trip can ask for; what is queued ahead comes on top."""
TIMEOUT_SEND_BUFFER_BYTES: Final = 4 * 1024 * 1024
"""Most of a request that can wait in the kernel after it has taken the last byte (Linux' `tcp_wmem`)."""
LONG_POLL_HOLD_S: Final = 60.0
"""How long a server may hold a long poll whose caller does not say; common servers hold 30 to 60 s."""
SERVER_COST_S_MAX: Final = 120.0
"""The longest time a server is believed to work on an answer (Mars: `server_process_cost` up to 120 s)."""
QUALITY_RESULTS_MAX: Final = 10
"""Results that decide between Excellent, Evaluating and Bad (Mars: ten)."""
QUALITY_WINDOW_S: Final = 300.0
"""Age at which such a result is forgotten (Mars: five minutes)."""

# -- addresses --------------------------------------------------------------------------------------------------------
ADDRESS_RECORDS_MAX: Final = 20_000
"""Addresses that keep their history at least (networks, hosts, ports and carriers apart), twice as many at most; those
unused for longest go first."""
ADDRESS_BAN_S: Final = 360.0
"""First ban of an address; each further failure adds as much (Mars: 6, 12, ... 30 min)."""
ADDRESS_BAN_S_MAX: Final = 1800.0
"""Longest ban (Mars)."""
ADDRESS_PAROLE_S: Final = 30.0
"""Time after which a banned address may be tried once, behind the others; doubles with each failed try, so that a
server that was only restarted is back after half a minute, not six."""
ADDRESS_FAILURE_SPAN_S: Final = 1.0
"""Failures of one address within this count as one: a page's requests fail together (Mars ignores ten seconds)."""
ADDRESS_MEMORY_S: Final = 24 * 3600.0
"""Age at which a record says nothing any more (Mars: a day)."""
FAMILY_REPROBE_S: Final = 600.0
"""How long one address family stays second after it lost; then the next request gives it its head start again, at the
cost of one stagger (`CONNECT_STAGGER_S`)."""
FAMILY_PROBE_S: Final = 10.0
"""How long the outcome of that one request is awaited before another may find out."""

FAMILY_RECORDS_MAX: Final = 1024
"""Networks and hosts at which IPv6 has lost, at least; twice as many at most. IPv6 is tried anew where one is
forgotten."""
FAMILY_CLASSES_MAX: Final = 256
"""The same for classes of path that failed over IPv6 where their host did not, about 300 bytes each."""

# -- retries ----------------------------------------------------------------------------------------------------------
RETRY_SHARE: Final = 0.1
"""Retries per request in the long run: when all fails, a server sees 1.1 times its load, not four times."""
RETRY_BURST: Final = 10
"""Retries that a quiet host may have at once."""
RETRY_BURST_ALL: Final = 30
"""The same for all hosts together."""
RETRY_FLOOR_PER_S: Final = 1.0
"""Retries per second and host that are always allowed, unless the host said that it is overloaded: an app that asks
twice a second makes no storm, and its user wants the answer."""
RETRY_FLOOR_ALL_PER_S: Final = 5.0
"""The same for all hosts together."""
RETRY_UNHEARD_COST: Final = 0.1
"""What a retry costs of a token where nothing was heard of the failed attempt: the host saw a SYN of it at most."""
RETRY_OVERLOAD_S: Final = 10.0
"""How long after its last sign of overload a host gets retries by share only."""
RETRY_AFTER_S_MAX: Final = 3600.0
"""The longest `Retry-After` that is believed: a slip of an operator must not keep devices away for a day."""
RETRY_HOSTS_MAX: Final = 4096
"""Hosts with a budget of their own; the longest unused goes first and would start with a full one."""
REPEAT_BURST: Final = 105
"""Times that one and the same request may be sent at once before it is taken for a loop (Mars: 105 an hour)."""
REPEAT_RATE_PER_S: Final = 1.0
"""How fast such a request earns new sends; polling once a second is no loop."""
REPEAT_KEYS_MAX: Final = 1024
"""Requests whose repetitions are counted."""
FLOW_BYTES_BURST: Final = 80 * 1024 * 1024
"""Bytes that one network may carry at once where a flow limit is set (Mars: 80 MiB, mobile only)."""
FLOW_BYTES_PER_S: Final = 80 * 1024 * 1024 / 3600.0
"""How fast that room comes back (Mars: 80 MiB an hour)."""

# -- more than one way out ---------------------------------------------------------------------------------------------
PATHS_MAX: Final = 4
"""Ways out of the machine that are told apart: WiFi, cellular, a cable, one more."""
PATH_DARK_S: Final = 1.0
"""Silence of a whole network, with something owed, after which another network is tried beside it. Longer than any
round trip but those of the slowest links; a lost packet is repeated by then."""
PATH_DARK_ROUND_TRIPS: Final = 3.0
"""The same in the network's own longest round trips, where those are known to be longer than a third of it."""
PATH_PROBE_S: Final = 2.0
"""Pause before a dead network is asked whether it is back, and between two such questions: one TCP handshake each."""
PATH_PROBE_S_MAX: Final = 32.0
"""The longest such pause, for one that keeps relapsing."""
PATH_STEADY_S: Final = 30.0
"""A network that was back for this long has not relapsed when it fails again."""
PATH_METERED_BYTES: Final = 20 * 1024 * 1024
"""Bytes that a metered network may carry at once for us where the system had chosen another: some minutes of small
requests and a few pages, and no video."""
PATH_BYTES_MAX: Final = 2**40
"""The most that a setting may allow instead: more than any tariff has."""
PATH_CONNECTION_BYTES: Final = 1024
"""What a TCP connection costs beside the bytes that are counted on it: headers of its handshake and its end."""
PATH_LOOK_S: Final = 0.25
"""Pause between two looks at calls that wait, where there may be a second way; none waits, none is made."""
PATH_METERED_BYTES_PER_S: Final = 20 * 1024 * 1024 / 86_400
"""How fast that room comes back: in a day."""

# -- proxies ----------------------------------------------------------------------------------------------------------
PROXY_URL_CHARS_MAX: Final = 2048
"""A proxy's URL: a name and two credentials of 255 bytes each, percent-encoded, have room."""
NO_PROXY_CHARS_MAX: Final = 128 * 1024
"""Of `NO_PROXY`: the longest variable that Linux hands to a new process. What follows is skipped and told."""
PROXY_HEAD_BYTES_MAX: Final = 16 * 1024
"""A proxy's answer to CONNECT: a status line and a few fields; those that ask for credentials carry long challenges."""
PROXY_RULES_KEPT: Final = 8
"""Environments whose rules are remembered, so that many clients parse, and warn, once."""

# -- silent connections -----------------------------------------------------------------------------------------------
STALL_BACKOFFS: Final = 2
"""RTO back-offs with data unacknowledged after which a connection counts as silent: the packet was lost three times."""
STALL_OVERDUE_S: Final = 0.1
"""Least silence after which a connection that owes an answer is not given another request: below it a delayed
acknowledgement (40 to 200 ms) and the machine's own lateness look like loss."""
STALL_PROVE_S: Final = 0.4
"""Least wait for the first answer of a connection before the host's other addresses are asked beside it: a server that
needs longer for its first answer costs one handshake and one request more, once; one that never answers costs whoever
comes meanwhile as much."""
STALL_SPARE_QUEUE_S: Final = 1.0
"""More than this queued ahead, and a second connection would only wait behind it."""
STALL_PROBE_S: Final = 1.0
"""Pause between two probes of a path that went dark (one SYN or PING of some 60 bytes): how late the end of a blackout
is noticed at most, where the kernel would double its wait up to two minutes."""
STALL_PROBE_SLOW_S: Final = 3.0
"""The same on a slow link, where answers may take this long."""
STALL_LIVENESS_S: Final = 60.0
"""Silence of an idle stream after which the connection under it is asked for a sign of life (as `HEARTBEAT_S`)."""
STALL_LOOK_S_MAX: Final = 5.0
"""Longest pause between two looks at a connection that owes us something."""
STALL_LOOK_S_MIN: Final = 0.05
"""Shortest such pause."""
LAB_LINGER_S: Final = 2.0
"""How long the laboratory's servers take no notice of what a client still sends on a connection they have closed."""

# -- admission and activity -------------------------------------------------------------------------------------------
ADMISSION_FULL: Final = 1024
"""Requests in flight to one host that never showed trouble: more than pool and streams carry, so nobody waits here."""
ADMISSION_HOSTS_MAX: Final = 4096
"""Hosts whose room is kept, 150 to 800 bytes each; those that are whole and unused go first."""
ADMISSION_WAITING_MAX: Final = 4096
"""Requests that wait for room over all hosts, or for one read: at five answers a second most are past any patience."""
ADMISSION_AGE_S: Final = 1.0
"""Age that counts as one of RFC 9218's eight steps of urgency: background work waits 7 s longer than a key request."""
ADMISSION_SILENT_FLOOR: Final = 4
"""Room that time-outs alone leave to a host: they may be the network's, and then more lanes are what helps."""
ADMISSION_GRADIENT_FLOOR: Final = 12
"""Room that slow answers alone leave to a host: twice what a browser keeps in flight over HTTP/1.1."""
ADMISSION_QUEUED_S_MIN: Final = 0.1
"""Waiting at a server that is worth making others wait here instead: less than that no person notices."""
ADMISSION_WEAK_FLOOR: Final = 8
"""Room that a weak link leaves to a host, however little it carries: eight small answers are a second of EDGE."""
ADMISSION_MEMORY_S: Final = 300.0
"""Time without a sign of trouble after which a host's room is whole again."""
JOIN_FLIGHTS_MAX: Final = 256
"""Reads under way at once that others may join; beyond it each goes by itself."""
JOIN_BODY_BYTES_MAX: Final = 256 * 1024
"""Largest body held for all of them; a larger one is its first caller's, and the others go themselves."""
PARKED_MAX: Final = 256
"""Requests of one client that wait for the network; beyond it one fails with QueueFull."""
PARK_S: Final = 300.0
"""How long such a request waits that names no time: a ride through a tunnel, several times over."""
PARK_LOOK_S: Final = 2.0
"""Pause between two looks for a route where nothing tells when the network is back; nothing is sent."""
