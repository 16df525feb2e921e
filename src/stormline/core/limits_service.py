"""Bounds of the helper for business services; see `limits`."""

from typing import Final

# -- business services -------------------------------------------------------------------------------------------------
SERVICE_CALLS_AT_ONCE: Final = 64
"""Calls that one process of a service works on, unless it says otherwise; one more is answered 503 at once, so that its
caller comes back later instead of waiting in a queue nobody sees."""
SERVICE_DRAIN_S: Final = 10.0
"""What calls under way get to end when a service is told to stop; then they are cancelled, and their callers hear 503.
Longer than most calls, shorter than the half minute that most supervisors wait."""
SERVICE_ASK_S: Final = 5.0
"""What the engine gets to take the question who is there."""
SERVICE_ANSWER_S: Final = 0.5
"""Silence after which no more services are expected: they answer from memory, within the round trip to the engine."""
SERVICE_PROCESSES_MAX: Final = 10_000
"""Processes that are listed: more than an installation has, and a bound for what an answer of anybody may cost."""
SERVICE_ENDPOINTS_MAX: Final = 1000
"""Methods of one process."""
SERVICE_TEXT_CHARS_MAX: Final = 512
"""A name, version, id or subject in such an answer."""
