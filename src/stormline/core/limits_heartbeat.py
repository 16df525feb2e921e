"""Bounds of how long a long connection is left in silence; see `limits`."""

from typing import Final

# -- the search for what a network stands -----------------------------------------------------------------------------
HEARTBEAT_MIN_S: Final = 15.0
"""The shortest heartbeat: networks that forget a connection sooner are broken, and a phone's radio would never rest."""
HEARTBEAT_START_S: Final = 30.0
"""The first silence on an unknown network: some carriers forget after 45 to 60 s, hardly one sooner, and three steps
later a minute is reached."""
HEARTBEAT_MAX_S: Final = 3600.0
"""The longest: RFC 5382 section 5 asks translators for two hours and four minutes, and past an hour nothing is saved
any more."""
HEARTBEAT_STEP: Final = 1.25
"""Factor from a silence that was survived to the next: a limit of an hour is reached with 22 beats."""
HEARTBEAT_STEP_FINE: Final = 1.15
"""The same once two links were lost in a search: the third loss then brackets the limit closely enough by itself."""
HEARTBEAT_BRACKET: Final = 1.18
"""Ratio of the shortest lost to the longest survived silence at which the search ends: with the margin, the heartbeat
is then above 0.8 of the limit."""
HEARTBEAT_NEAR: Final = 1.125
"""Ratio at which there is nothing left to try in between: one bisection of a step is below it."""
HEARTBEAT_MARGIN: Final = 0.95
"""What is used of the longest silence survived where the limit was met: timers fire late, and networks jitter."""
HEARTBEAT_BACK: Final = 0.8
"""What is tried of a silence that was survived before and is lost now."""
HEARTBEAT_HITS_NOISY: Final = 3
"""Losses of one silence that are believed where links are lost by chance: three in a row by chance are one in 8,000
where each twentieth beat is lost."""
HEARTBEAT_NOISY_S: Final = 7 * 24 * 3600.0
"""How long after a loss that proved false a network counts as such a one."""
HEARTBEAT_CONFIRMED: Final = 3
"""Beats in a row that must be answered before a heartbeat counts as settled."""
HEARTBEAT_REPROBE_S: Final = 24 * 3600.0
"""A settled heartbeat is first questioned after this long, then after twice as long: each time may cost a link."""
HEARTBEAT_REPROBE_MAX_S: Final = 7 * 24 * 3600.0
"""The longest pause between two such questions."""
HEARTBEAT_PROOF_S: Final = 30.0
"""A link counts as lost by silence only where the first dial after it stood within this: else the network was dead."""
HEARTBEAT_ASKED_S: Final = 600.0
"""The longest silence a gateway asks for unless configured: what it costs is how long it keeps the session of a client
that vanished without a word."""
TIMER_EARLY_S: Final = 5.0
"""How much too early a link's timer may fire, so that not each frame sets it anew; one that would be earlier is: it
would wake the device for nothing."""

# -- a link that may be half-open -------------------------------------------------------------------------------------
DOUBT_FIRST_S: Final = 2.0
"""A call that is unanswered for this long has its link asked for a sign of life, on a network whose round trips are
short: servers that work for longer are common, so it must not cost more than a frame."""
DOUBT_ROUND_TRIPS: Final = 8.0
"""The same in round trips, where those are longer."""
DOUBTS_MAX: Final = 5
"""How often a link is asked on account of one call, at pauses that double: a minute has passed by then, and the link is
left to its heartbeat, so that a stream that is silent for hours does not keep a phone awake."""
ANSWER_S_MIN: Final = 3.0
"""Least wait for the answer to such a question: time for three retransmissions of TCP."""
ANSWER_ROUND_TRIPS: Final = 12.0
"""The same in round trips; `limits.HEARTBEAT_ANSWER_S` at most."""
BESIDE_FIRST_S: Final = 1.0
"""After this long without an answer short HTTP is tried beside a link with calls: a retransmission of TCP has had its
time, and to open a channel costs some 5 KB."""
BESIDE_ROUND_TRIPS: Final = 4.0
"""The same in round trips, where those are longer."""
