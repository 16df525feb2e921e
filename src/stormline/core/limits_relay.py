"""Bounds of the relay: requests and answers that are carried sealed end to end (Oblivious HTTP).

The rest of the product's bounds is in `limits`.
"""

from typing import Final

# -- messages ---------------------------------------------------------------------------------------------------------
RELAY_HEAD_BYTES_MAX: Final = 64 * 1024
"""Control data and one section of fields of a message in binary form: as much as a head of HTTP/1.1 may have
(`HTTP_HEAD_BYTES_MAX`), so that what came that way can go this way."""
RELAY_INFORMATIONAL_MAX: Final = 16
"""Informational answers (1xx) before the real one: servers send one or two."""
RELAY_CHUNK_BYTES: Final = 16 * 1024
"""Plain bytes in a sealed chunk: what every receiver takes (chunked Oblivious HTTP, section 3)."""
RELAY_CHUNK_BYTES_MAX: Final = 64 * 1024
"""Plain bytes in a chunk that is still taken from others; one chunk is held whole before any of it can be believed."""

# -- keys -------------------------------------------------------------------------------------------------------------
RELAY_KEYS_BYTES_MAX: Final = 4 * 1024
"""A list of key configurations: one of ours has 45 bytes, one with a post-quantum key some 1.3 KB."""
RELAY_KEYS_MAX: Final = 16
"""Key configurations in a list: those in use, and those before and after them while they change."""
