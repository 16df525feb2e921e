"""Bounds of the outbox, in which an app leaves calls that are made when there is a way; see `limits`."""

from typing import Final

# -- calls that an app leaves -----------------------------------------------------------------------------------------
OUTBOX_ENTRIES_MAX: Final = 10_000
"""Calls kept at once: a device that is offline for a week may leave one a minute."""
OUTBOX_BYTES_MAX: Final = 16 * 1024 * 1024
"""Parameters of all of them together: what an app may fill of a small device's disk without being asked."""
OUTBOX_LIFE_S: Final = 7 * 24 * 3600.0
"""How long a call waits where the app does not say: a device that stood in a drawer for a holiday still reports."""
OUTBOX_LIFE_MAX_S: Final = 90 * 24 * 3600.0
"""Longest life that an app may ask for: services forget idempotency keys, and no key should outlive its meaning."""
OUTBOX_KEY_CHARS_MAX: Final = 128
"""An entry's id, which travels as the call's idempotency key."""
OUTBOX_LANE_CHARS_MAX: Final = 128
"""A lane's name: an order, a room, a document."""
OUTBOX_AT_ONCE: Final = 4
"""Entries under way at once, each of another lane: a long backlog must not crowd out what the user does now."""
OUTBOX_CALL_S: Final = 30.0
"""Deadline of one attempt."""
OUTBOX_HOLD_S: Final = 60.0
"""How long an entry belongs to the process that sends it: longer than an attempt, so that another process takes over
only from one that died."""
OUTBOX_ANSWERED_TRIES_MAX: Final = 8
"""Attempts that a service answered with a fault of its own (5xx); then the app is told. Losses of the network do not
count: they say nothing about the call."""
OUTBOX_PAUSE_FIRST_S: Final = 1.0
"""Pause after the first attempt that failed, doubled after each further one."""
OUTBOX_PAUSE_MAX_S: Final = 300.0
"""Longest pause: a service that is down for an hour is asked a dozen times by each device."""
OUTBOX_LOOK_S: Final = 60.0
"""How often the file is looked at without a reason: another process may have left something and died."""
OUTBOX_BUSY_S: Final = 5.0
"""How long a write waits for another process's (SQLite's busy timeout)."""
