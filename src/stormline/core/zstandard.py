"""Where zstd (RFC 8878) comes from."""

import functools
from typing import Any


@functools.cache
def zstd() -> Any:
    """Give the module of the standard library (Python 3.14), else its backport; only who compresses loads it."""
    try:
        from compression import zstd as module  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from backports import zstd as module
    return module
