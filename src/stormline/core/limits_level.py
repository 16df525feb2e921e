"""Bounds of the estimation of a network's quality (`policy.level`), each with its reason."""

from typing import Final

# -- network quality ---------------------------------------------------------------------------------------------------
LEVEL_NETWORKS_MAX: Final = 16
"""Networks whose level is remembered at least, twice as many at most: home, work, cellular and some cafes."""
LEVEL_SAMPLES_MAX: Final = 64
"""Samples of round trips, and of rates, that are kept: at the 20 a second that are taken (`SAMPLE_PAUSE_S`) they
reach back over one half-life and a half."""
LEVEL_HALF_LIFE_S: Final = 2.0
"""Age at which a round trip counts half: a median turns after one half-life of steady traffic, so a change shows
within five seconds with time to spare for hysteresis."""
LEVEL_RATE_HALF_LIFE_S: Final = 5.0
"""The same for rates: bodies large enough to show one come seconds apart."""
LEVEL_MEMORY_S: Final = 60.0
"""Age at which a sample is forgotten, and after which a network without traffic is unknown (Chromium's history)."""
LEVEL_PRIOR_S: Final = 86_400.0
"""Age up to which the level of a network that comes back is a first guess: the same place, the same day."""
LEVEL_RATE_DOUBT: Final = 0.1
"""Weight of "no bound" beside the rates that were measured: one slow body binds for a quarter of a minute, not longer,
where nothing confirms it."""
LEVEL_RISE_S: Final = 1.5
"""How long all samples must speak for a better level before it is taken: less than a flicker, and with the half-life
within five seconds."""
LEVEL_SILENCE_S: Final = 0.3
"""Silence, while something is owed, from which it may count as evidence: a lost packet has been sent again after 0.2 s,
and the first look at the connection (`LOOK_FIRST_S`) has shown whether the question has arrived, so that only the
server is waited for. A slower path's own round trip asks for more (`level.silence_level`)."""
LEVEL_SERVER_S: Final = 1.0
"""What a server may take, beside twice what it usually does, where no kernel says whether it has the question."""
LEVEL_BODY_BYTES_MIN: Final = 16 * 1024
"""A smaller body fits into TCP's first flight (RFC 6928: ten segments) and shows no rate."""
LEVEL_QUEUED_WEIGHT: Final = 0.25
"""Weight of a round trip behind other requests of our own: it says what we do to the link as well."""
LEVEL_SIGNAL_FACTOR: Final = 0.8
"""Weight of a sample for each bar by which the signal was another then (Chromium)."""
