"""The bounds of the laboratory, the simulator and the link model they share; see `limits` for those of the product."""

from typing import Final

# -- the link model ---------------------------------------------------------------------------------------------------
LINK_QUEUE_BYTES: Final = 256 * 1024
"""Queue of an emulated link where none is given: the usual size of a home router's or a modem's buffer."""
LINK_MTU_BYTES_MAX: Final = 65_535
"""The largest IP packet there is; an emulated link has no other MTU unless one is given."""
LINK_RATE_BPS_MIN: Final = 100.0
"""Below this one packet takes minutes; a link that is dead is modelled as a blackout."""
FADE_PERIOD_S_MIN: Final = 0.01
"""Fades that come more often are random loss; and each one costs memory until it is past."""
TRACE_OPPORTUNITIES_MAX: Final = 4_000_000
"""Lines of a capacity trace: 48 Mbit/s for a quarter of an hour, 32 MB."""
SCHEDULE_STEPS_MAX: Final = 10_000
"""Steps of one schedule; a run of an hour with a change every half second has fewer."""
SCHEDULE_REPEAT_S_MIN: Final = 0.01
"""Shortest round of a schedule that repeats."""

# -- the simulator ----------------------------------------------------------------------------------------------------
SIM_TIME_MAX_S: Final = 24 * 3600.0
"""Virtual seconds of one run: a scenario is minutes; what is not over after a day never will be."""
SIM_STEPS_MAX: Final = 250_000
"""Turns of the loop in one run: some seconds of real time; a scenario needs five to twenty thousand."""
SIM_DEVICES_MAX: Final = 5000
"""Devices of one simulated world: each is a whole client, some 20 ms of real time; more are for a model."""
SIM_DEVICE_STEPS: Final = 5000
"""Turns of the loop that each device of a world adds to what is allowed."""
SIM_SEGMENT_BYTES: Final = 1400
"""Bytes of one simulated TCP segment: an Ethernet frame less the headers and what tunnels take."""
SIM_HEADER_BYTES: Final = 52
"""IPv4 and TCP headers of a segment, with timestamps."""
SIM_SEND_BUFFER_BYTES: Final = 128 * 1024
"""A simulated kernel's send buffer: what is taken and not acknowledged; a fair middle of Linux' autotuning."""
SIM_RECEIVE_BUFFER_BYTES: Final = 256 * 1024
"""A simulated kernel's receive buffer, which is also the largest window it offers."""
SIM_RTO_MIN_S: Final = 0.2
"""Shortest retransmission time-out (Linux; RFC 6298 would have 1 s)."""
SIM_RTO_FIRST_S: Final = 1.0
"""Retransmission time-out before the first measurement, and of the first SYN (RFC 6298 section 2.1)."""
SIM_RTO_MAX_S: Final = 60.0
"""Longest retransmission time-out (RFC 6298 section 2.5)."""
SIM_RETRIES_MAX: Final = 15
"""Retransmissions of one segment before a connection fails with ETIMEDOUT (Linux' tcp_retries2)."""
SIM_SYN_RETRIES_MAX: Final = 6
"""Retransmissions of a SYN (Linux' tcp_syn_retries)."""
SIM_ORPHAN_S: Final = 60.0
"""How long a closed connection is kept for what its peer may still say (Linux' tcp_fin_timeout)."""

# -- the laboratory ---------------------------------------------------------------------------------------------------
SHAPER_PACKETS_MAX: Final = 50_000
"""Packets on their way in one shaper: 75 MB. More fit on no mobile link; what comes beyond is dropped and counted, and
the run is not to be trusted."""
SHAPER_READS_MAX: Final = 16
"""Packets taken from one device before deliveries that became due go first: 0.2 ms of work."""
SHAPER_PACKET_BYTES_MAX: Final = 2048
"""Buffer for one packet; the laboratory's devices have an MTU of 1500."""
SHAPER_TICK_S: Final = 0.01
"""How often an idle shaper wakes, only to see how late it does: a machine too busy to be trusted shows there first."""
SHAPER_LATENESS_STEP_S: Final = 0.00005
"""Resolution of the lateness histogram."""
SHAPER_LATENESS_S_MAX: Final = 0.2
"""Its end; later ones count in the last step, and the maximum is exact."""
SHAPER_PRIORITY: Final = 40
"""Real-time priority (1 to 99): before all ordinary work, behind the kernel's own threads (50)."""
SHAPER_DROPS_KEPT_MAX: Final = 5000
"""Lost packets a shaper remembers for a timeline; the oldest go first."""
SHAPER_DROPS_ANSWER_MAX: Final = 500
"""Of these in one answer: about 60 KB."""
SHAPER_MESSAGE_BYTES_MAX: Final = 1024 * 1024
"""One command or answer: a schedule of `SCHEDULE_STEPS_MAX` steps fits."""
SHAPER_ANSWER_S: Final = 10.0
"""How long a command may take; its start included, when the machine is busy and modules are read from disk."""
SHAPER_STOP_S: Final = 2.0
"""From the command to stop to SIGKILL."""
LAB_DEVICE_QUEUE_PACKETS: Final = 4000
"""Packets the kernel keeps for a shaper that is late; a quarter of a second at the rates it is made for."""
LAB_COMMAND_S: Final = 20.0
"""One command that sets up a namespace."""
LAB_CLEANUP_S: Final = 3.0
"""How long processes killed in a namespace may take to end."""
LAB_CLEANUP_PAUSE_S: Final = 0.01
"""Pause between two looks whether they have."""
LAB_SERVER_ADDRESSES_MAX: Final = 64
"""Addresses of each family on the server's side."""
TRACE_FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A capacity trace on disk."""
VALIDATE_TRIES_MAX: Final = 3
"""How often a measurement that misses its target is repeated: the machine may be busy with something else."""

# -- the laboratory's stage -------------------------------------------------------------------------------------------
LAB_SLOW_BPS_MIN: Final = 80.0
"""A body slower than this is a stall, and is modelled as one."""
LAB_HOLD_S_MAX: Final = 60.0
"""Longest that a server works on a request, or on a DNS question, by order of a profile."""
LAB_CHUNK_BYTES: Final = 16 * 1024
"""Bytes of a body written at once; a TLS record holds no more (RFC 8446 section 5.1)."""
LAB_PIPELINE_MAX: Final = 100
"""Requests of one HTTP/1.1 connection that wait for their turn; beyond it the connection is closed."""
LAB_REQUEST_BODY_BYTES_MAX: Final = 64 * 1024
"""Body of one request to the origin: a DNS question over HTTPS is at most this."""
LAB_BOX_NAMES_MAX: Final = 64
"""Names that a box which ends TLS keeps a certificate for; a stage has three."""
LAB_BOX_PAGE_BYTES_MAX: Final = 2 * 1024 * 1024
"""An answer that such a box reads whole: twice the longest of the origin."""
LAB_BACKLOG: Final = 512
"""Connections that wait to be accepted by the origin."""
LAB_LAG_STEP_S: Final = 0.02
"""How often the origin looks whether its loop is late."""
LAB_ORIGIN_ANSWER_S: Final = 15.0
"""How long the origin may take for a command, its start included, on a machine that is busy."""
LAB_ORIGIN_STOP_S: Final = 2.0
"""From closing its input to SIGKILL."""
LAB_ORIGIN_LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""One command or answer: a report with `workload.REQUESTS_MAX` requests fits."""
LAB_EVENTS_MAX: Final = 1000
"""Events of one run: a change every 100 ms for 100 s is more than any network shows."""
LAB_NAT_TIMEOUT_S_MIN: Final = 1
"""Shortest memory of a NAT: the kernel counts whole seconds."""
LAB_WAIT_P99_MS_MAX: Final = 25.0
"""How long a client waited for a core (p99): beyond it a run says more about the machine than about the client."""
LAB_WAIT_MS_MAX: Final = 300.0
"""The longest a client may wait for a core, or the servers' loop stand still: a tenth of an impatient patience."""
LAB_SHAPER_LATE_MS_MAX: Final = 5.0
"""Lateness of packets (p99): a quarter of the shortest round trip of any profile."""
LAB_LATE_END_S: Final = 0.25
"""How much later than the user's patience an answer may be told of; a driver ends each request itself."""
LAB_RESULTS_BYTES_MAX: Final = 256 * 1024 * 1024
"""A file of results: some ten thousand runs."""
LAB_READY_S: Final = 60.0
"""From the start of a driver until its client is made; eight start at once on two cores."""
LAB_DRAIN_S: Final = 8.0
"""How much longer than its schedule and the user's patience a driver may take before it is killed."""
LAB_JOBS_MAX: Final = 16
"""Runs side by side; each has a shaper, servers and a client."""
LAB_TAIL_BYTES: Final = 2000
"""Of what a driver said last, kept for the message when it fails."""
LAB_DRIVER_EXIT_S: Final = 3.0
"""From a driver's last line to SIGKILL; it gives its client one second to close."""
LAB_DIAGNOSIS_S: Final = 90.0
"""From the start of `stormline diagnose` to SIGKILL. It bounds itself at ten; to be started took 23 s where 18 others
wanted two cores."""
LAB_DIAGNOSES_MAX: Final = 6
"""Diagnoses on one stage, one after the other: a minute where all wait for silence."""
