"""Bounds of what a client remembers of networks, and of what it does ahead of being asked; see `limits`."""

from typing import Final

# -- what is kept of networks between starts --------------------------------------------------------------------------
MEMORY_LIFE_S: Final = 7 * 24 * 3600.0
"""Age at which what was learned of a host on a network says nothing any more: a place that is visited once a week is
still known, and addresses seldom move within days."""
MEMORY_HALF_LIFE_S: Final = 3 * 24 * 3600.0
"""After this long what a protocol did at a host counts half, as does a host's use: a fault of last week is tried anew,
one of Friday is not on Monday."""
MEMORY_NETWORKS_MAX: Final = 32
"""Networks that have a file; those written longest ago go first. Home, work, some cells and cafés."""
MEMORY_HOSTS_MAX: Final = 64
"""Hosts kept of a network, those used last: an app and all it embeds. Taking them over takes some milliseconds of the
event loop's time."""
MEMORY_ADDRESSES_MAX: Final = 6
"""Addresses kept of a host, those tried last: most names have two to four."""
MEMORY_PATHS_MAX: Final = 4
"""Classes of path whose cost is kept of a host."""
MEMORY_PROTOCOLS_MAX: Final = 4
"""Protocols kept of a host: h1, h2, h3, long."""
MEMORY_NAME_CHARS_MAX: Final = 253
"""A host's name: what DNS lets it be (RFC 1035 section 2.3.4, without the last dot)."""
MEMORY_WORD_CHARS_MAX: Final = 64
"""Any other text in such a file: an IPv6 literal with its zone, a digest, the name of a protocol."""
MEMORY_FILE_BYTES_MAX: Final = 64 * 1024
"""One network's file: 64 hosts with everything kept of each are less; ten hosts are 4 KB. Hosts unused for longest are
left out of one that would be larger, and a larger one is not read."""
MEMORY_SAVE_FIRST_S: Final = 5.0
"""From the first thing learned to the first write: an app that is killed soon after its start has kept that."""
MEMORY_SAVE_S: Final = 60.0
"""Least pause between later writes of one client: each is a file of some kilobytes, synced."""
MEMORY_CLOSE_S: Final = 1.0
"""What a closing client waits for its last write."""
EXPLORE_SHARE: Final = 0.02
"""Share of the chances to try something else than the best that are taken."""
EXPLORE_PAUSE_S: Final = 60.0
"""Least pause between two such trials on one network, whatever chance says."""
EXPLORE_QUIET_S: Final = 30.0
"""No such trial so soon after a network is entered: the first half minute belongs to what is known to work."""
STRATEGY_HOSTS_MAX: Final = 256
"""Hosts whose protocols and use are remembered at least, all networks together, twice as many at most."""
PRECONNECT_S: Final = 10.0
"""The most one pre-connect takes, names, TCP and TLS together."""
PRECONNECTS_MAX: Final = 4
"""Pre-connects under way at once, and hosts connected to at a start: more would take the bandwidth of what is asked."""
