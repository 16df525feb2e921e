"""Whether what only Linux has may be used: decided once, when this is imported.

Everything here has something to fall back to, because other systems lack it, and sandboxes and old kernels do too. With
`STORMLINE_PORTABLE=1` in the environment a Linux machine does without it as well: for tests of what is left, and for
machines on which one of these parts does harm. Other modules ask these constants and never the environment.
"""

import os
import sys
from pathlib import Path
from typing import Final

PORTABLE: Final = os.environ.get("STORMLINE_PORTABLE", "").strip().lower() in ("1", "on", "yes", "true")
"""Only what every system with sockets has; the pace of keep-alive, which macOS has as well, is not part of that."""
LINUX: Final = sys.platform in ("linux", "android") and not PORTABLE
"""This is Linux, and its own parts may be used: TCP_INFO, MPTCP, SO_BINDTODEVICE, the routing socket, CLOCK_BOOTTIME,
files below `FILES`."""
FILES: Final = Path("/") if LINUX else Path(os.devnull)
"""Where `proc` and `sys` are; where there are none, a path below which there is nothing on any system."""
