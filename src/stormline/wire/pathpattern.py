"""Patterns of URL paths, as rules and plans write them.

/orders/*/items     literal text; in each part between two slashes at most one `*`, any text without a slash
/home/**            `**` as the last part: all that follows, nothing included
"""

from stormline.core import errors, limits_means


def check(path: object) -> None:
    """Make sure that a pattern is one.

    Raises:
        ConfigError: it is none; the message says why.
    """
    if not isinstance(path, str) or not path.startswith("/"):
        raise errors.ConfigError("path: expected a pattern that begins with /")
    if len(path) > limits_means.RULE_PATH_CHARS_MAX:
        raise errors.ConfigError(f"path: at most {limits_means.RULE_PATH_CHARS_MAX} characters")
    if "?" in path or "#" in path:
        raise errors.ConfigError("path: a pattern has neither query nor fragment")
    *parts, last = path[1:].split("/")
    if any(part.count("*") > 1 for part in parts) or (last != "**" and last.count("*") > 1):
        raise errors.ConfigError("path: at most one * between two slashes, and ** only as the last part")


def fits(pattern: str, path: str) -> bool:
    """Say whether a path, as it stands in the URL and without the query, is meant. Any texts are borne."""
    if pattern == "/**":
        return True  # also `OPTIONS *`
    wanted, parts = pattern.split("/"), path.split("/")
    if wanted[-1] == "**":
        if len(parts) < len(wanted) - 1:
            return False
        wanted = wanted[:-1]
        parts = parts[: len(wanted)]
    return len(wanted) == len(parts) and all(map(_part_fits, wanted, parts))


def _part_fits(pattern: str, part: str) -> bool:
    head, star, tail = pattern.partition("*")
    if not star:
        return pattern == part
    return len(part) >= len(head) + len(tail) and part.startswith(head) and part.endswith(tail)
