"""The bounds of the platform's roles; see `limits`."""

from typing import Final

from stormline.core.limits import CALL_BODY_BYTES_MAX, CALL_HEADER_BYTES_MAX, PLAN_HOSTS_MAX

# -- HTTP served by the roles -----------------------------------------------------------------------------------------
HTTP_KEEP_ALIVE_S: Final = 30.0
"""Idle time after which a kept-alive HTTP connection is closed."""
HTTP_DRAIN_S: Final = 2.0
"""How long a stopping role waits for HTTP requests in flight; well inside the 5 s a platform has to end."""
HTTP_CONNECTIONS_MAX: Final = 4096
"""Connections and requests in progress of one HTTP server; beyond it the answer is 503. A fifth of the descriptors."""
HTTP_HEADS_PER_LINE_MAX: Final = 512
"""Connections from one subscriber's line (an IPv4 address, an IPv6 /64) of which one HTTP server awaits a head: an
eighth. Where it has more the one awaited for longest is ended, so that one that dribbles makes room for the others."""

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
GATEWAY_WORKERS_MAX: Final = 64
"""Processes of one gateway: one for each core of a large machine."""
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
REPORT_DISCARD_BYTES_MAX: Final = 4 * 1024 * 1024
"""How much of a refused body is read and thrown away, so that the sender gets the answer and not a reset."""
REPORT_DISCARD_S: Final = 2.0
"""How long that may take."""
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
APM_HEALTH_S: Final = 1.0
"""How long 'the store answers' is believed before it is asked again."""
APM_WINDOW_S_MAX: Final = 7 * 24 * 3600
"""The longest window one question may cover; what is older is for exploring with SQL."""
APM_HOSTS_MAX: Final = 200
"""Hosts in one answer, those with most calls first; `total` counts all."""
APM_FAILURE_KINDS_MAX: Final = 12
"""Kinds of failure named per host; the rest is summed as `other`."""
APM_CALLS_MAX: Final = 500
"""Calls in one answer."""
APM_ADDRESSES_MAX: Final = 1000
"""Addresses judged at once: as many as dispatch probes."""
VERDICT_INTERVAL_S: Final = 2.0
"""How often the APM looks whether dispatch has to be told something: each look costs the store some milliseconds."""
VERDICT_TIMEOUT_S: Final = 10.0
"""One question or order of the APM to dispatch, its answer included."""
VERDICT_ANSWER_BYTES_MAX: Final = 128 * 1024 * 1024
"""The longest answer: a rule set of `RULES_BYTES_MAX`, as JSON is written for people."""
BAD_WINDOW_S: Final = 60.0
"""Attempts that arrived within this speak for or against an address: a minute of many devices, and one that healed is
forgiven after it."""
BAD_DEVICES_MIN: Final = 3
"""Devices for which an address must have failed: one or two may be the fault of their own networks."""
BAD_FAILURES_MIN: Final = 10
"""Failed attempts it takes beside that."""
BAD_SHARE_MIN: Final = 0.5
"""Share of the attempts at an address, and of the devices that tried it, that must have failed; what fails less often
is worth its tries."""
BAD_DRAINS_MAX: Final = 20
"""Addresses out of use at once because devices found them bad: more at once is no matter of addresses."""
BAD_OTHERS_SHARE_MAX: Final = 0.2
"""Share of the attempts at the other addresses of the same host that may have failed: where these fail as well, it is
the network or the service that is ill, and no address to blame."""
BAD_HOLD_S: Final = 300.0
"""How long an address that was found bad is out of use before devices try it again; doubles each time it is found bad
again, as far back as the log of changes reaches."""
BAD_HOLD_S_MAX: Final = 24 * 3600.0
"""The longest such time."""
BAD_RESPECT_S: Final = 3600.0
"""How long an address that a person took back into service is left alone."""
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

# -- dispatch as a server for DNS -------------------------------------------------------------------------------------
DOH_QUESTION_BYTES_MAX: Final = 4096
"""A question over HTTPS: a name has 255 bytes, and clients fill up to a multiple of 128 (RFC 8467); beyond it 413, or
414 in a URL."""
DOH_QUESTION_RECORDS_MAX: Final = 8
"""Additional records of a question: one for EDNS, one signature, and room."""
DOH_PAD_BYTES: Final = 468
"""Answers to padded questions are filled up to a multiple of this (RFC 8467 section 4.1)."""
DOH_TTL_S: Final = 30
"""Life of what the rules say, in the caches of those who learn no other way that they changed: as `PLAN_REFRESH_S`."""
DOH_ABSENT_TTL_S: Final = 10
"""Life of "this host has no such record" (RFC 2308): shorter, as what is added should be seen soon."""
DOH_RESOLVER_TTL_S: Final = 300
"""Life of the record that says how this server itself is asked (RFC 9462); a move of it is planned for longer."""
DOH_SERVICES_MAX: Final = 16
"""HTTPS records of one answer; clients try a few."""
DOH_HINTS_MAX: Final = 8
"""Address hints of one family in a record: a dial tries no more, and all stand in A and AAAA anyway."""
DOH_ADDRESSES_MAX: Final = 32
"""Addresses of one answer, as a client keeps of it."""
DOH_MADE_MAX: Final = 16_384
"""Answers from the rules kept made, at most some 1,500 bytes each with their question; the one unused for longest goes
first."""
DOH_MADE_QUESTION_BYTES_MAX: Final = 384
"""Longer questions are answered anew: a name of 255 bytes with EDNS, padded to three times 128 (RFC 8467), is kept."""
ECS_V4_BITS: Final = 24
"""How much of a client's IPv4 address is looked at (RFC 7871 section 11.1 advises it)."""
ECS_V6_BITS: Final = 56
"""How much of its IPv6 address."""
FORWARDS_MAX: Final = 512
"""Questions on their way to upstream servers at once, each with a socket; beyond it SERVFAIL."""
FORWARD_SERVERS_MAX: Final = 4
"""Upstream servers; what four do not answer a fifth will not."""
FORWARD_TRY_S: Final = 1.2
"""Wait for one upstream server before the next is asked: three tries fit into `FORWARD_TIMEOUT_S`."""
FORWARD_TIMEOUT_S: Final = 4.0
"""One forwarded question in all; below a client's own `limits_names.DOH_TIMEOUT_S`, so that it hears of the failure."""
FORWARD_BEHIND_S: Final = 10.0
"""How long an upstream server that failed is asked last."""
FORWARD_UDP_BYTES: Final = 1232
"""Largest UDP answer asked for: passes every IPv6 link unfragmented (what DNS operators agreed on in 2020)."""
FORWARD_CACHE_MAX: Final = 16_384
"""Forwarded answers kept; the one unused for longest goes first."""
FORWARD_CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Their messages together."""
FORWARD_TTL_S_MAX: Final = 3600
"""Longest time a forwarded answer is kept, whatever its TTL says."""
FORWARD_ABSENT_S_MAX: Final = 60
"""Longest time a forwarded "no" is kept (RFC 2308 section 5 allows hours): a name made a minute ago works."""
FORWARD_FAILURE_S: Final = 2.0
"""How long a failure of all upstream servers stands before they are asked again (RFC 9520 section 3.2: 1 s or more)."""
FORWARD_STALE_S: Final = 3600.0
"""How long after its end an answer still stands in for upstream servers that fail (RFC 8767 allows days)."""
FORWARD_STALE_TTL_S: Final = 2
"""Life given to such an answer: with `FORWARD_FAILURE_S` before it and a cache behind it that asks once a second,
recovery is seen within 5 s (RFC 8767 section 4 has 30 s)."""
FORWARD_PATIENCE_S: Final = 0.9
"""How long a question may go on before such an answer is given all the same (RFC 8767 section 5 has 1.8 s): below
`limits_names.DOH_STAGGER_S`, after which a client asks another server."""

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
RULES_BYTES_MAX: Final = 64 * 1024 * 1024
"""A rule set as JSON: 100,000 hosts with two endpoints and a policy each are 25 to 40 MB."""
RULES_NAMES_MAX: Final = 100
"""Endpoints of one host, or names of switched-off means, in a rule set: an answer stays far below `PLAN_BYTES_MAX`."""
HOST_RULE_BYTES_MAX: Final = 3 * 1024
"""One host in a rule set as JSON, and so `limits.PLAN_HOSTS_MAX` of them within `limits.PLAN_BYTES_MAX`, whatever is
asked for: some 20 endpoints, or ten with a dozen paths."""
GATEWAYS_BYTES_MAX: Final = 16 * 1024
"""The gateways of one app as JSON; they go with every plan."""
RULES_TTL_S_MIN: Final = 5
"""The shortest life of what is said of a host: below it a client would ask without end."""
PRELOAD_HOSTS_MAX: Final = 50
"""Hosts of which an app is told unasked: they travel with every one of its plans."""
NETWORKS_MAX: Final = 50_000
"""Networks in a rule set; a larger table belongs into a MaxMind database. They are read in 0.3 s and hold 15 MB."""
REGIONS_MAX: Final = 500
"""Regions, and neighbours of one; operators likewise."""
PLACEMENT_BUCKETS: Final = 64
"""Into so many groups the devices of a region and operator are parted, to spread them over equal endpoints. All of one
group get the same signed bytes; shares come out within some 6 % of the weights."""
PLACE_CACHE: Final = 16384
"""Addresses whose place is remembered, some 300 bytes each."""
QUESTION_CACHE: Final = 1024
"""Lists of hosts, as they were asked for, whose normal form is remembered: apps ask for the same again and again."""
QUESTION_CACHE_HOSTS_MAX: Final = 32
"""Longer lists are not remembered: with names of any length the memory stays below 20 MB."""
PLAN_HISTORY_MAX: Final = 1024
"""Contents given out of which the digests are remembered, so that only what changed need be sent; 1 MB at ten hosts,
10 MB at a hundred. Who holds an older one gets a whole plan."""
MEASURED_BAND: Final = 0.1
"""Endpoints whose measured quality (0 to 1) lies in the same tenth are equal: noise must not move devices."""
LOAD_FULL: Final = 0.9
"""Load (0 to 1) from which an endpoint comes after those with room."""
RULES_CHUNK_BYTES: Final = 512 * 1024
"""A rule set's bytes in one key: below the 1 MiB that any NATS server takes."""
RULES_CHUNKS_MAX: Final = 256
"""Keys of one rule set: more than `RULES_BYTES_MAX` needs, also where it does not compress."""
RULES_VERSIONS_MAX: Final = 20
"""Versions whose content is kept, to look at and to go back to."""
RULES_LOG_MAX: Final = 200
"""Lines of the log of changes: with the longest texts some 160 KB, in the one record that each change writes."""
RULES_WHO_CHARS_MAX: Final = 64
"""The name of whoever changes the rules."""
RULES_WHY_CHARS_MAX: Final = 256
"""Why they do; longer is a ticket's text, not its number."""
RULES_DRAINS_MAX: Final = 1000
"""Endpoints out of service by hand at once."""
RULES_COMMIT_TRIES_MAX: Final = 8
"""Tries of one change against others that write at the same time; a person meets none, a script few."""
RULES_COMMIT_PAUSE_S: Final = 0.02
"""Pause before the second of them, doubling."""
RULES_HELD_BYTES_MAX: Final = 96 * 1024 * 1024
"""The copy on disk: a few compressed rule sets in base64."""
RULES_RETRY_PAUSE_S: Final = 0.1
"""Pause before rules that could not be read from the engine are read again; doubles up to
`ENGINE_RECONNECT_PAUSE_MAX_S`."""
RULES_REJECTED_PAUSE_S: Final = 60.0
"""Longest pause before rules that were read and refused are read again without a change of them: they will hardly get
better, and each look costs the engine a whole rule set and the centre seconds of work."""
RULES_FIRST_WAIT_S: Final = 1.5
"""How long a starting centre waits for the engine's rules before it serves those on disk."""
RULES_SETTLE_S: Final = 1.0
"""How long the answer to a change waits until this centre itself serves it: what every node needs at most."""
RULES_THREAD_BYTES: Final = 64 * 1024
"""Rule sets above this are read and checked beside the event loop: some milliseconds of work."""
RULES_BODY_TIMEOUT_S: Final = 60.0
"""From the head of a request with a rule set to its whole body."""
RULES_LIVE_TARGETS_MAX: Final = 512
"""Endpoints tried before publishing; more changed ones than that are sampled, from the first host on."""
RULES_DIFF_LINES_MAX: Final = 1000
"""Differences listed; beyond it they are only counted."""
ROLLOUT_STEPS_MAX: Final = 20
"""Steps of a roll-out; more is no plan a person follows."""
ROLLOUT_CALLS_MIN: Final = 200
"""Calls in each arm before a roll-out is judged."""
ROLLOUT_MARGIN: Final = 0.002
"""By how much the new arm's success rate must be lower: two in a thousand calls; less is not worth a halt."""
ROLLOUT_FALSE_HALT: Final = 0.001
"""Chance to halt a roll-out that is not worse, over all its looks."""
DISPATCH_ADMIN_TIMEOUT_S: Final = 90.0
"""A command's wait for an answer of dispatch's admin API: a large rule set is sent, checked and tried."""
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

# -- the distributed engine -------------------------------------------------------------------------------------------
ENGINE_MESSAGE_BYTES_MAX: Final = CALL_BODY_BYTES_MAX + 2 * CALL_HEADER_BYTES_MAX
"""Headers and data of one engine message: the largest gathered call with its headers, and ours beside them."""
ENGINE_SUBJECT_CHARS_MAX: Final = 1024
"""A subject or queue name. Room for several base32 names; subject, inbox and sizes fit the server's 4 KiB line."""
ENGINE_HANDLERS_MAX: Final = 256
"""Handlers of one served subject running at once; beyond it the caller is told 'overloaded', not left to wait."""
ENGINE_QUEUE_MESSAGES_MAX: Final = 8192
"""One-way messages waiting for one subscription's handler; newer ones are dropped, counted and logged."""
ENGINE_QUEUE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Their bytes together."""
ENGINE_REQUESTS_MAX: Final = 16384
"""Requests of one process awaiting their answers; 64 full connections' worth of calls, some 20 MB of bookkeeping."""
ENGINE_OUT_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes waiting to leave for the engine; beyond it a send waits, then fails. Four of the largest messages."""
ENGINE_OUT_WAIT_S: Final = 2.0
"""How long a send waits for room in that buffer: a server on loopback or in the same rack that takes nothing for two
seconds is in trouble."""
ENGINE_CONNECT_TIMEOUT_S: Final = 5
"""One attempt to connect to the engine, greeting and subscriptions included."""
ENGINE_WAIT_S: Final = 10.0
"""How long a role waits at its start for an engine that is starting beside it."""
ENGINE_PING_S: Final = 5
"""Silence after which the engine is pinged; `ENGINE_PINGS_MAX` unanswered ones and the connection counts as lost."""
ENGINE_PINGS_MAX: Final = 2
"""Pings without an answer that are borne."""
ENGINE_LOOK_S: Final = 0.2
"""How often the keeper looks whether the connection still stands, beside being told."""
ENGINE_RECONNECT_PAUSE_S: Final = 0.05
"""Pause before the first reconnection; doubles with each failure, each time drawn from half to whole."""
ENGINE_RECONNECT_PAUSE_MAX_S: Final = 2.0
"""Longest such pause: a restarted engine is found again within it, and a thousand roles are 1,000 attempts a second."""
ENGINE_KV_TIMEOUT_S: Final = 5.0
"""One read or write of a key; a durable write takes 0.6 ms here, a cluster's election about 4 s."""
ENGINE_KV_READ_MAX: Final = 1024
"""Keys of one read: what the server gives at once."""
ENGINE_KV_TTL_MIN_S: Final = 1.0
"""Shortest life of keys in a bucket: what the server can mark as expired."""
ENGINE_DELETED_KEY_LIFE_S: Final = 3600
"""How long the mark of a deleted key is kept, so that deleting does not fill a bucket."""
ENGINE_WATCH_QUEUE_MAX: Final = 1024
"""Changes waiting for one watcher; beyond it the server is held back."""
ENGINE_WATCH_HEARTBEAT_S: Final = 5
"""A watch hears from the server at least this often; after three silent ones it starts anew."""
ENGINE_WATCH_IDLE_S: Final = 60
"""When the server forgets a watch whose reader went away."""
ENGINE_MESSAGE_ID_CHARS_MAX: Final = 128
"""An id that tells a repeated record from a new one: two ids of ours and a word. The server keeps it in memory."""
ENGINE_DUPLICATES_S: Final = 120
"""How long a stream knows the ids it has taken: longer than an election, a reconnection and the retries between."""
ENGINE_RECORD_LIFE_MAX_S: Final = 366.0 * 86400.0
"""Longest life a record may be given: beyond a year it is an archive and not a stream."""
ENGINE_READ_RECORDS_MAX: Final = 1000
"""Records of one read; each is a message of the server to us."""
ENGINE_READ_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes after which a read ends; the record that passes it is still given. Half a largest message."""
ENGINE_LAST_SUBJECTS_MAX: Final = 500
"""Subjects in one question for newest records; the server takes 1,024."""
ENGINE_BATCH_MAX: Final = 1000
"""Records a worker gets at once."""
ENGINE_BATCH_BYTES_MAX: Final = ENGINE_MESSAGE_BYTES_MAX + 64 * 1024
"""Bytes of one batch, with what the server counts beside data: one largest record always fits."""
ENGINE_UNFINISHED_MAX: Final = 4 * ENGINE_BATCH_MAX
"""Records under way with all workers of one name: four full batches; beyond it the engine gives no more."""
ENGINE_ACK_WAIT_S: Final = 30.0
"""How long a worker may be silent before its records go to another; running ones say so three times in it."""
ENGINE_RETRY_PAUSE_S: Final = 1.0
"""Rest of records whose worker failed; doubles with each failure, up to `ENGINE_RETRY_PAUSE_MAX_S`."""
ENGINE_RETRY_PAUSE_MAX_S: Final = 60.0
"""Longest such rest: whatever the worker needs is found again within it."""
ENGINE_PULL_S: Final = 5.0
"""How long a question for the next records stands before it is put anew: one that a lost server held is missed no
longer than this."""
ENGINE_URLS_LEARNED_MAX: Final = 16
"""Servers remembered that a cluster named itself, beside those in the settings."""
ENGINE_ENSURE_S: Final = 1.0
"""How long a new connection to a single server waits for its buckets and streams before it is used without: messages
need none of them."""
ENGINE_DRAIN_S: Final = 1.0
"""How long a closing engine lets running handlers finish."""
ENGINE_CONNECTIONS_MAX: Final = 4096
"""Connections the embedded server takes; roles and business services use one or two each."""
ENGINE_STORE_BYTES_MAX: Final = 8 * 1024 * 1024 * 1024
"""Disk the embedded server may use."""
ENGINE_MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Memory its non-persistent buckets may use: more than a million keys at 400 bytes."""
ENGINE_DISK_LOW_BYTES: Final = 2 * ENGINE_MESSAGE_BYTES_MAX
"""Free disk below which the embedded server counts as having met a full one: a largest record, and one beside it."""
ENGINE_DISK_LOOK_S: Final = 1.0
"""How often that is looked at: one call of the kernel."""
ENGINE_START_TIMEOUT_S: Final = 20.0
"""From starting the embedded server to its first answer; recovery of a full store reads it once."""
ENGINE_CLUSTER_START_TIMEOUT_S: Final = 40.0
"""The same for a member of a cluster, where a leader is elected first; that takes up to 9 s a try."""
ENGINE_STOP_S: Final = 3.0
"""From SIGTERM to SIGKILL of the embedded server, inside the time a role has to stop."""
CHILD_LOG_BYTES_MAX: Final = 16 * 1024 * 1024
"""A child's log file is put aside (one old one kept) when it is larger than this at a start."""

# -- the demo shop ----------------------------------------------------------------------------------------------------
DEMO_ORDERS_MAX: Final = 100_000
"""Orders (and idempotency keys) the demo shop remembers; the oldest go first."""
DEMO_ORDERS_LISTED_MAX: Final = 100
"""Newest orders one GET lists."""
DEMO_BODY_BYTES_MAX: Final = 64 * 1024
"""Body of one order."""
DEMO_SLOW_S_MAX: Final = 60.0
"""The longest `/slow` waits."""
DEMO_IMAGES_CACHED_MAX: Final = 32
"""Demo images kept in memory: at most 13 MB."""

# -- gateway ----------------------------------------------------------------------------------------------------------
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
"""From accept to a finished TLS handshake: three round trips with losses on the worst networks we serve."""
WHEEL_TICK_S: Final = 1.0
"""How much later than asked a connection's timer may fire: none of their bounds is shorter than five seconds."""
WHEEL_TURN_MAX: Final = 256
"""Timers of connections told in one turn of the event loop; the rest of a full tick comes after whatever else waits."""
SESSIONS_MAX: Final = 18_000
"""Connections of one gateway process; the rest of its 20,000 descriptors is for upstreams, engine and admin API."""
GATEWAY_BACKLOG: Final = 1024
"""Connections the kernel may finish before we accept them, where a thousand wait with us already. Who finds the queue
full is not answered, and its kernel asks again after a second."""
GATEWAY_CALLS_MAX: Final = 20_000
"""Calls in progress in one gateway process; beyond it CALL_UNAVAILABLE. Some 100 MB of tasks and buffers."""
SEND_UNSENT_BYTES: Final = 32 * 1024
"""Bytes the kernel may hold of one session that are not even sent yet (TCP_NOTSENT_LOWAT): what is urgent waits behind
no more than this, and a slow reader costs no more."""
SEND_BUFFER_BYTES: Final = 32 * 1024
"""Bytes waiting in our process above which a session's senders pause."""
SESSION_BACKLOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes waiting for one session above which it is dropped as OVERLOADED. Senders pause long before; all pushes that may
be unacknowledged (2 MiB) and a FAIL for every call fit."""
KEPT_NODE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Frames that all sessions of one process keep for their clients: 14 KB for each of `SESSIONS_MAX`. A session that
finds no room keeps nothing, and ends with its connection."""
SESSIONS_WAITING_MAX: Final = SESSIONS_MAX
"""Sessions without a connection in one process: all it may have, where a network fails. Some 4 KB each; the longest
without is ended first."""
HANDOVER_CALLS_S: Final = 2.0
"""How long a node that gives a session away waits for its calls to end; most take less. What still runs then fails."""
GREETINGS_MAX: Final = 1024
"""Greetings of one process that wait for a session of another node; beyond it OVERLOADED. A node that hangs holds each
of them for `HANDOVER_TIMEOUT_S`."""
HANDOVER_TIMEOUT_S: Final = 3.5
"""How long a node waits for a session of another: that wait and the way there and back, within `HELLO_TIMEOUT_S`."""
STALL_TIMEOUT_S: Final = 120.0
"""How long a session may take nothing of what we send before it is dropped: twice what 64 KiB need on GPRS."""
ANSWERS_JOINED_MAX: Final = 16
"""Answers of one connection that leave in one write where its calls came in one read: with full chunks 256 KiB wait."""
CALL_DEADLINE_GRACE_S: Final = 0.5
"""How long after the deadline the session itself ends a call: the gate knows better what became of the work, so it is
given the time to say so."""
ENGINE_FIRST_WAIT_S: Final = 1.0
"""How long a starting gateway waits for the engine before it serves without: one that runs answers in milliseconds."""
DRAIN_S: Final = 1.0
"""How long a stopping gateway gives its clients to go elsewhere and their calls to end, where its settings do not say:
inside `ROLE_STOP_TIMEOUT_S`."""
DRAIN_S_MAX: Final = 600.0
"""The longest that settings can say: ten minutes for the last upload of a rolling restart."""
DRAIN_SPREAD_SHARE: Final = 0.6
"""Part of that time over which clients are asked to leave; the rest is for those who came last to connect elsewhere."""
LEAVE_LOOK_S: Final = 0.05
"""How often a stopping gateway looks whether connections still arrive: one that is dropped half-way may have sent its
first call."""
LEAVE_FLUSH_S: Final = 0.4
"""How long the last CLOSE of a stopping gateway may take to leave."""
LEAVE_END_S: Final = 0.4
"""How long a stopping gateway then takes for each of its business API and the rest, so that it has ended within a
second after `DRAIN_S`."""
LEAVING_RETRY_S: Final = 1.0
"""What a client is told to wait that comes to a node that is stopping: another node is there at once."""
QUOTA_RETRY_S: Final = 30.0
"""What a client is told to wait whose app has all the sessions it may have: they end by the minute, not the second."""
CALL_RETRY_AFTER_S: Final = 1.0
"""What a caller is told to wait where something we depend on is away for the moment."""

# -- application gateways ---------------------------------------------------------------------------------------------
UPSTREAM_CONNECTIONS_MAX: Final = 1024
"""Connections of one gateway to all its API upstreams; what `SESSIONS_MAX` leaves of the descriptors."""
UPSTREAM_CONNECTIONS_PER_ORIGIN_MAX: Final = 256
"""Connections to one of them: one slow upstream cannot take those of all."""
RPC_GATHERED_BYTES_MAX: Final = 256 * 1024 * 1024
"""Bodies of RPC calls gathered in one process at once; beyond it CALL_UNAVAILABLE."""
NODE_BEAT_S: Final = 1.0
"""How often a node says that it lives, and what it holds."""
NODE_LEASE_S: Final = 6.0
"""Silence after which a node has died: six words lost. Looked at once a second: no ghost outlives its node by 10 s."""
NODE_ANSWER_S: Final = 0.05
"""Pause before a node answers one that has just come: many who come at once get one answer."""
NODES_MAX: Final = 4096
"""Nodes one of them hears of: 45 million devices are 2500 nodes."""
DIRECTORY_LIFE_S: Final = 24 * 3600.0
"""Life of a directory entry since its last write: so long a device's last session is known after it has ended."""
DIRECTORY_REFRESH_S: Final = 8 * 3600.0
"""Age at which a live session's entry, or its user's key, is written again: three chances within its life. 45 million
sessions are then 1600 writes a second in all."""
DIRECTORY_TICK_S: Final = 1.0
"""How often a node looks whether its entries are due, and whether the engine still has them."""
DIRECTORY_AWAY_S: Final = NODE_LEASE_S / 2
"""Time without the engine after which a node announces its sessions again: others may have held it for dead."""
DIRECTORY_WRITES_MAX: Final = 128
"""Directory writes under way from one node: announcing 18,000 sessions again takes seconds, and is no burst to the
engine."""
DIRECTORY_READS_MIN: Final = 4
"""Entries read in one request from this number on; fewer are cheaper one by one."""
DIRECTORY_TAKEOVER_TRIES_MAX: Final = 8
"""Tries to win an entry against others that write it at the same moment, then again at the next tick."""
DIRECTORY_FLUSH_S: Final = 1.0
"""How long a stopping node tries to write its sessions' ends: 18,000 take 0.6 s; what remains ends with its node."""
DIRECTORY_ENDS_MAX: Final = 50_000
"""Ended sessions whose entries wait to be written while the engine is away; beyond it the oldest stay as they are
until their device or their life ends them."""
JOURNAL_PAUSE_S: Final = 1.0
"""Between two writes of a node's list of its sessions: what came within it is not cleared up if the node dies now."""
JOURNAL_CHUNK_KEYS_MAX: Final = 256
"""Keys in a chunk of that list: some 15 KB, written again as it fills."""
JOURNAL_CHUNK_KEYS_MIN: Final = 64
"""A full chunk that has fewer left is dissolved: a node's 18,000 sessions are 282 chunks at most."""
PRESENCE_PAGE: Final = 100
"""Devices in a page of a list where nobody says how many."""
PRESENCE_PAGE_MAX: Final = 1000
"""The most: some 200 KB."""
PRESENCE_SLICE: Final = 1000
"""Sessions looked through at once, some 0.5 ms; what devices send is served between two slices."""
PRESENCE_NODE_TIMEOUT_S: Final = 2.0
"""A node's wait for another's part of a list; without it the list says which node is missing."""
PRESENCE_ABOUTS_MAX: Final = 4096
"""Different descriptions of devices that a node keeps once for all who share them."""
PRESENCE_VERSIONS_MAX: Final = 64
"""Versions of an app a node counts apart; rarer ones are counted together."""
PUSH_ID_CHARS_MAX: Final = 128
"""A push's own id; a UUID or ULID has 36 or 26."""
PUSH_TTL_S: Final = 60.0
"""Life of a push whose sender names none: it is not stored, so it only has to survive the way to the device."""
PUSH_TTL_MAX_S: Final = 30 * 24 * 3600.0
"""The longest life a sender can ask for."""
PUSH_RECENT_MAX: Final = 20_000
"""Pushes a node remembers, so that one sent twice with the same id reaches the device once; some 10 MB."""
PUSH_REQUEST_MARGIN_S: Final = 1.0
"""How much longer than a device's acknowledgement the answer of its node is awaited."""

# -- changed plans ----------------------------------------------------------------------------------------------------
NOTICE_SPREAD_S: Final = 0.9
"""One pass over a node's sessions, each told at a random moment in it, so that not all ask dispatch at once. Whoever
was told just before a change came waits for the next pass: two of them must fit into the 2 s in which a changed plan
reaches everybody."""
NOTICE_STEP_S: Final = 0.02
"""Sessions whose moments lie closer together are told at once: 45 turns of the loop for any number of sessions."""
NOTICE_CHANGES_KEPT: Final = 16
"""Changes of an app's plan whose hosts a gateway remembers; a session further behind is told that any host may have
changed."""
NOTICE_CHANGES_MAX: Final = 64
"""Apps in one message of a centre to its gateways: 1.6 MB where each names 100 hosts of the longest name."""
NOTICE_BEAT_S: Final = 2.0
"""How often a centre says again which versions there are: a gateway that did not hear of a change, because the engine
was away or it started later, hears of it within this."""
NOTICE_RETRY_S: Final = 0.1
"""How often a centre that has a change to tell looks whether the engine is there again."""
NOTICE_TOUCHED_MAX: Final = PLAN_HOSTS_MAX
"""Hosts of one app named at once because their endpoints stand otherwise than before: what a notice can name. More at
once means that the network of the probes is ill; the clients of the others learn of it with their next plan."""
DISPATCH_GATE_TIMEOUT_S: Final = 5.0
"""The longest wait of a gateway for a centre's answer: it is made in memory, in microseconds."""

# -- the gateway's business API ---------------------------------------------------------------------------------------
ADMIN_BODY_BYTES_MAX: Final = 256 * 1024
"""A request to the business API: the largest push in base64 inside JSON, with room."""
ADMIN_BODY_TIMEOUT_S: Final = 10.0
"""From such a request's head to its whole body."""
API_KEYS_MAX: Final = 1000
"""Keys of businesses on a platform; each node holds them all."""
API_KEY_RATE_PER_S: Final = 200.0
"""Requests a second of one key on one node, in the long run; a tenth of what a node's HTTP can do."""
API_KEY_BURST: Final = 400
"""Requests of one key at once: two seconds of its rate."""
API_CALL_DEADLINE_MAX_S: Final = 300.0
"""The longest wait for a device's answer over HTTP: whatever stands in front of us drops requests that take longer."""
IDEMPOTENCY_KEY_CHARS_MAX: Final = 255
"""An idempotency key; the draft of the header (draft-ietf-httpapi-idempotency-key-header) leaves it to the server."""
IDEMPOTENCY_LIFE_S: Final = 24 * 3600.0
"""How long the answer to a request with an `Idempotency-Key` is kept."""
IDEMPOTENCY_RUNNING_S: Final = 900.0
"""Age at which a request without an answer has lost its node: longer than the longest deadline."""
AUDIT_KEPT: Final = 1000
"""Entries of the audit that each node keeps in the engine; the log of the role has more."""
AUDIT_LIFE_S: Final = 30 * 24 * 3600.0
"""Life of such an entry."""
ADMIN_SESSIONS_LISTED_MAX: Final = 1000
"""Sessions in one answer; the count is always whole."""
DISPATCH_TRY_S: Final = 2.0
"""One question to one address of dispatch, connection included; below PLAN_WAIT_S so that a second can be asked."""
ROLE_POLL_S: Final = 0.02
"""Pause between two looks for a starting role's run file."""
REPORT_ANSWER_BYTES_MAX: Final = 16 * 1024
"""The APM's answer to a report: a short JSON."""
ENGINE_GRACE_S: Final = 1.0
"""What the embedded engine gets to end after all roles have ended, so that both fit into the 5 s of a platform. It
syncs each write before it acknowledges it: a kill loses nothing that was promised."""
PUSH_IDS_REMEMBERED: Final = 1024
"""Ids of pushes a device remembers, so that one sent again after a lost acknowledgement is not shown twice."""
HEALTHY_TIMEOUT_S: Final = 10.0
"""From every part's first answer to every part being well: a gateway tries for the engine every few seconds."""
HEALTHY_PAUSE_S: Final = 0.1
"""Pause between two looks at the parts' health while a platform starts."""

REQUEST_HEAD_BYTES_MAX: Final = 32 * 1024
"""Request line and headers of one HTTP request; beyond it 431."""
REQUEST_HEAD_TIMEOUT_S: Final = 10.0
"""From the start of a connection, or of a later request, to the end of its head; beyond it 408."""

# -- health of endpoints ----------------------------------------------------------------------------------------------
HEALTH_INTERVAL_S: Final = 5.0
"""From the end of one probe of an endpoint to the next, before jitter: with `HEALTH_FALL` an endpoint that died is no
longer handed out after some 15 s, and a thousand endpoints cost 200 probes a second."""
HEALTH_INTERVAL_S_MIN: Final = 0.05
"""The shortest interval that can be asked for; below it a centre is a load test."""
HEALTH_JITTER: Final = 0.2
"""Part of the interval by which each pause is drawn shorter or longer, so that the probes of several centres neither
come together nor stay together."""
HEALTH_FALL: Final = 3
"""Failed probes in a row after which an endpoint counts as ill: single ones are lost packets."""
HEALTH_RISE: Final = 2
"""Good probes in a row after which it counts as well again."""
HEALTH_FLOOR_SHARE: Final = 0.5
"""Share of a host's endpoints that is handed out however the probes went: where more than half seem ill at once, the
network of the probes is the likelier patient, and the others would not bear the load."""
HEALTH_FLAP_HALF_LIFE_S: Final = 120.0
"""In which the memory of an endpoint's falls fades by half (RFC 2439 damps routes in this way, over 15 min)."""
HEALTH_FLAP_SUPPRESS: Final = 3.5
"""Falls remembered at which an endpoint that is well again is not yet believed: four in a few minutes."""
HEALTH_FLAP_REUSE: Final = 1.5
"""Falls remembered below which it is believed again: some 2.5 min after the fourth."""
HEALTH_FLAP_MAX: Final = 8.0
"""Falls remembered at most, so that an endpoint that flapped all night is believed 5 min after it has stopped."""
HEALTH_TARGETS_MAX: Final = 1000
"""Endpoints that are probed; those beyond count as well, and the log and the admin API say so."""
HEALTH_PROBES_MAX: Final = 64
"""Probes under way at once: each is a connection and at worst a handshake, 64 silent peers cost 64 sockets for
`HEALTH_TIMEOUT_S`."""
HEALTH_TIMEOUT_S: Final = 3.0
"""One probe, connection, handshake and answer together: one lost SYN (1 s, RFC 6298) and some round trips."""
HEALTH_QUIC_REPEAT_S: Final = 0.7
"""When a datagram that was not answered is sent again: four of them within `HEALTH_TIMEOUT_S`."""
HEALTH_QUIC_WITNESS_S: Final = 30.0
"""How long an answer over UDP shows that UDP passes, so that silence of another server is its own: some intervals."""
HEALTH_REASON_CHARS_MAX: Final = 200
"""Why a probe failed, for people."""
DRAINS_MAX: Final = 1000
"""Addresses that can be out of service by hand at once."""
