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

# -- HTTP served by the roles -----------------------------------------------------------------------------------------
HTTP_KEEP_ALIVE_S: Final = 30.0
"""Idle time after which a kept-alive HTTP connection is closed."""
HTTP_DRAIN_S: Final = 2.0
"""How long a stopping role waits for HTTP requests in flight; well inside the 5 s a platform has to end."""
HTTP_CONNECTIONS_MAX: Final = 4096
"""Connections and requests in progress of one HTTP server; beyond it the answer is 503. A fifth of the descriptors."""

# -- settings and the platform's processes ----------------------------------------------------------------------------
CONFIG_FILE_BYTES_MAX: Final = 256 * 1024
"""A settings file; more is not a settings file."""
PLATFORM_FILE_BYTES_MAX: Final = 64 * 1024
"""A small file the platform itself wrote into its state folder (lock, keys, run files)."""
ROLE_START_TIMEOUT_S: Final = 45.0
"""From starting a role's process to its first true answer. The store takes seconds to load on a loaded two-core
machine; a role that needs longer than this does not come."""
ROLE_STOP_TIMEOUT_S: Final = 3.5
"""From SIGTERM to SIGKILL: longer than `HTTP_DRAIN_S`, and inside the 5 s in which a platform has ended."""
ROLE_RESTART_PAUSE_S: Final = 0.25
"""Pause before a role that died is started again; doubles with each death in a row."""
ROLE_RESTART_PAUSE_MAX_S: Final = 8.0
"""Longest such pause."""
ROLE_RESTARTS_MAX: Final = 5
"""Deaths of one role within `ROLE_RESTARTS_WINDOW_S` after which the platform gives up: a role that cannot live needs
a person, and a platform that looks up but is not misleads."""
ROLE_RESTARTS_WINDOW_S: Final = 60.0
"""The window in which restarts are counted."""
LOG_TAIL_BYTES_MAX: Final = 16 * 1024
"""How much of a log's end is read to find the reason of a death."""
FREE_PORT_TRIES_MAX: Final = 50
"""Ports tried to find a free one; with half the range taken, all fail once in 10^15."""
LOCK_TRIES_MAX: Final = 5
"""Tries for the lock of a state folder: `stormline status` holds it for microseconds to look."""
LOCK_PAUSE_S: Final = 0.02
"""Pause between two such tries."""

# -- reports, the analytics store and its readers ---------------------------------------------------------------------
REPORT_BODY_TIMEOUT_S: Final = 30.0
"""From a report's head to its whole body: 1 MiB at 300 kbit/s. Slower devices send smaller batches."""
REPORT_BODIES_BYTES_MAX: Final = 64 * 1024 * 1024
"""Report bodies held in memory at once, over all connections; beyond it 503."""
REPORT_HOST_CHARS_MAX: Final = 253
"""The longest DNS name (RFC 1035 section 2.3.4), as text."""
REPORT_PATH_CHARS_MAX: Final = 1024
"""A path in a call record; longer is no path a person groups by."""
REPORT_TEXT_CHARS_MAX: Final = 128
"""Any other text of a call record."""
REPORT_ATTEMPTS_MAX: Final = 32
"""Attempts of one call; no policy makes that many within a deadline."""
REPORT_DURATION_MS_MAX: Final = 24 * 3_600_000.0
"""The longest duration believed; a call's longest deadline is an hour."""
REPORT_LATE_S: Final = 24 * 3600.0
"""A start that lies further back than this when the report arrives counts as a wrong device clock."""
REPORT_EARLY_S: Final = 300.0
"""A start that lies further ahead than this counts as a wrong device clock; smaller steps are ordinary drift."""
REPORT_WALL_MS_MAX: Final = 4_102_444_800_000
"""2100-01-01 UTC; a start beyond it, or before 1970, is not a time but damage."""
INGEST_ROWS_MAX: Final = 20_000
"""Rows that wait for the store: 40 full reports, some 40 MB, 0.5 s of inserts; beyond it 503."""
INGEST_COMMIT_ROWS_MAX: Final = 5_000
"""Rows in one insert: 20 ms of work, so one slow commit does not hold the next for long."""
INGEST_RETRY_AFTER_S: Final = 2.0
"""What a reporter refused for want of room is told to wait: the queue empties in a quarter of it."""
INGEST_RECENT_CALLS_MAX: Final = 50_000
"""Stored calls remembered so that a report sent again (its answer was lost) is not counted twice; some 15 MB."""
STORE_DAYS: Final = 14
"""Days a call stays in the store: two weeks, to compare with the same weekday."""
STORE_READERS: Final = 2
"""Threads that answer questions to the store; its queries use several cores themselves."""
STORE_READS_MAX: Final = 16
"""Questions running or waiting for a reader; beyond it 503."""
STORE_QUERY_S: Final = 5.0
"""The longest a question may run in the store."""
STORE_QUERY_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Memory one question may use in the store."""
STORE_CLOSE_S: Final = 1.5
"""How long a closing store waits for its threads before it leaves them to the end of the process."""
APM_WINDOW_S_MAX: Final = 7 * 24 * 3600
"""The longest window one question may cover; what is older is for exploring with SQL."""
APM_HOSTS_MAX: Final = 200
"""Hosts in one answer, those with most calls first; `total` counts all."""
APM_FAILURE_KINDS_MAX: Final = 12
"""Kinds of failure named per host; the rest is summed as `other`."""
APM_CALLS_MAX: Final = 500
"""Calls in one answer."""
APM_SERIES_POINTS_MAX: Final = 360
"""Points of one series; more than a sparkline has pixels."""
APM_SERIES_HOSTS_MAX: Final = 50
"""Hosts with a series of their own in one answer."""

# -- console ----------------------------------------------------------------------------------------------------------
CONSOLE_APM_TIMEOUT_S: Final = 6.0
"""Wait for one answer of the APM: a little longer than its own `STORE_QUERY_S`."""
CONSOLE_CACHE_S: Final = 1.0
"""Age to which one answer of the APM serves every open page: many viewers cost the store no more than one."""
CONSOLE_CACHED_MAX: Final = 64
"""Different answers kept; the pages ask for a handful."""

# -- dispatch ---------------------------------------------------------------------------------------------------------
HOST_CHARS_MAX: Final = 253
"""A host name without the root's dot (RFC 1035 section 2.3.4: 255 octets on the wire)."""
PLAN_REQUEST_BYTES_MAX: Final = 64 * 1024
"""The body of a question: `PLAN_HOSTS_MAX` names of `HOST_CHARS_MAX` and room; more is answered with 413 unread."""
DISPATCH_SMALL_BODY_BYTES_MAX: Final = 4 * 1024
"""The body that asks for a device or a token: three short names."""
REQUEST_BODY_TIMEOUT_S: Final = 10.0
"""From a request's head to the end of its body, absolute: bytes that dribble in do not extend it."""
PLAN_REFRESH_S: Final = 30.0
"""How long signed bytes are given out again. They lose at most this much of `PLAN_LIFE_S`, and the time hint in
them stays well inside `CLOCK_SKEW_S`."""
PLAN_CACHE_ENTRIES_MAX: Final = 4096
"""Signed answers kept: apps times the host sets their versions ask for, with much room."""
PLAN_CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Their text together; whoever asks for ever new host sets pushes out answers but fills no memory."""
RULES_BYTES_MAX: Final = 8 * 1024 * 1024
"""A rule set as JSON: tens of thousands of hosts."""
RULES_NAMES_MAX: Final = 100
"""Endpoints of one host, or names of switched-off means, in a rule set: an answer stays far below `PLAN_BYTES_MAX`."""
ENROL_BURST: Final = 120
"""Devices one address may enrol at once: a carrier's NAT or a workshop brings many in the same minute."""
ENROL_RATE_PER_S: Final = 2.0
"""Devices one address may enrol in the long run; each costs a signature, about 50 us."""
ENROL_ADDRESSES_MAX: Final = 16384
"""Addresses whose rate is remembered, about 150 bytes each; the one silent for longest is forgotten first."""
ADMIN_KEY_CHARS_MIN: Final = 16
"""Shortest admin key: nothing here slows guessing down, so its length must."""
ADMIN_TOKEN_LIFE_MAX_S: Final = 30 * 24 * 3600.0
"""Longest life an operator can give a device token: there is no revocation yet but waiting."""
ADMIN_TIMEOUT_S: Final = 10.0
"""A command's wait for one answer of the platform's admin APIs; a person waits for it."""
