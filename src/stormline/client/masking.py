"""What httpx and httpx2 print of URLs: their clients log each whole one at INFO, credentials and all.

They do so themselves, above whatever transport lies below, and know no switch for it (encode/httpx #2760).
"""

import logging
import re
from typing import Any, Final

_MASK: Final = "***"
_URL: Final = re.compile(
    r"(?s)(?P<scheme>[^:/?#]*://)?(?:[^/?#]*@)?(?P<place>[^?#]*)(?:\?(?P<query>[^#]*))?(?P<rest>#.*)?"
)
_MODULES: Final = ("httpx", "httpx2")


class MaskUrls(logging.Filter):
    """Takes user, password, query values and fragment out of the URLs in a logger's lines; host and path stay.

    `stormline.AsyncClient` and `stormline.Client` put one on the logger `httpx2`, which is theirs by descent. It masks
    the lines of every httpx2 client in the process, and hides none. Who gives a client of httpx or httpx2 a stormline
    transport decides about that client's log: `logging.getLogger("httpx").addFilter(stormline.MaskUrls())`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record's arguments that are URLs of httpx or httpx2; let every record pass."""
        if isinstance(record.args, tuple):
            record.args = tuple(mask_url(str(each)) if _is_url(each) else each for each in record.args)
        return True


_ONE: Final = MaskUrls()


def mask_logger(name: str) -> None:
    """Have the lines of a logger masked; once, however often it is asked for."""
    logging.getLogger(name).addFilter(_ONE)


def mask_url(url: str) -> str:
    """Give a URL without user, password, query values and fragment: `https://***@a.test/feed?token=***`."""
    parts = _URL.fullmatch(url)
    if parts is None:
        return _MASK
    user = f"{_MASK}@" if "@" in url[: parts.start("place")] else ""
    query = ""
    if parts["query"] is not None:
        query = "?" + "&".join(_mask_field(field) for field in parts["query"].split("&"))
    fragment = f"#{_MASK}" if parts["rest"] else ""
    return f"{parts['scheme'] or ''}{user}{parts['place']}{query}{fragment}"


def _mask_field(field: str) -> str:
    name, equals, _ = field.partition("=")
    return f"{name}={_MASK}" if equals else _MASK if name else ""


def _is_url(value: Any) -> bool:
    return type(value).__name__ == "URL" and type(value).__module__.partition(".")[0] in _MODULES
