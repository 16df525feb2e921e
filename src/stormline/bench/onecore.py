"""Everything that is measured on one core, where nobody waits for another to wake up.

A core with nothing to do goes to sleep, and the process that it wakes for pays, and so does the one that wakes it: on a
virtual machine as much for each request as an answer costs, or nothing, as the scheduler places them. That is the
machine's, not the code's, and it hides what is compared.
"""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process, and those it starts meanwhile, on one core (Linux; elsewhere nothing is done)."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
