"""What must not stand in a log: credentials in URLs, and in free text.

httpx and httpx2 log each whole URL at INFO, credentials and all, themselves, above whatever transport lies below; they
know no switch for it (encode/httpx #2760).
"""

import logging
import re
from typing import Any, Final

_MASK: Final = "***"
_URL: Final = re.compile(
    r"(?s)(?P<scheme>[^:/?#]*://)?(?:[^/?#]*@)?(?P<place>[^?#]*)(?:\?(?P<query>[^#]*))?(?P<rest>#.*)?"
)
_MODULES: Final = ("httpx", "httpx2")
_URL_WORD: Final = re.compile(r"(?<!\S)\S*(?:[?@]|://)\S*")
_FIELD: Final = re.compile(
    r"(?i)((?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]{0,32}(?:key|token|auth|secret)[a-z-]{0,32})"
    r"(\b[\"']?\s*[:=,]\s*)\S[^\n]*"
)
"""A header that holds a credential, to the end of its line."""
_SCHEME: Final = re.compile(r"(?i)\b(bearer|basic|digest)(\s+)[A-Za-z0-9._~+/=-]{6,}")
_PAIR: Final = re.compile(
    r"(?i)((?:token|secret|passw(?:or)?d|passphrase|pwd|api[_-]?key|access[_-]?key|private[_-]?key|session(?:[_-]?id)?"
    r"|signature|credentials?|jwt|\botp|\bpin\b)[\w-]{0,32}[\"']?\s*[=:]\s*)(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&)}\]]+)"
)
_WORDS: Final = (
    "auth", "cookie", "key", "token", "secret", "passw", "passphrase", "pwd", "session", "signature", "credential",
    "jwt", "otp", "pin", "bearer", "basic", "digest",
)  # fmt: skip
"""One of these is in whatever the three above find: looking for them first is a tenth of the work."""
_OPAQUE: Final = re.compile(r"[A-Za-z0-9_+=-]{20,}")
"""Longer than any name; where it has letters and digits it is a key, a token, a digest."""


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


def mask_text(text: str) -> str:
    """Give a text without what looks like a credential: in URLs, header lines, `name=value` pairs, and opaque words.

    It errs on the safe side: digests and long ids go too. What only its owner can know to be secret stays.
    """
    if "?" in text or "@" in text or "://" in text:
        text = _URL_WORD.sub(_masked_word, text)
    lower = text.lower()
    if any(word in lower for word in _WORDS):
        text = _PAIR.sub(rf"\1{_MASK}", _FIELD.sub(rf"\1\2{_MASK}", _SCHEME.sub(rf"\1\2{_MASK}", text)))
    return _OPAQUE.sub(_masked_opaque, text)


def _masked_word(found: re.Match[str]) -> str:
    return mask_url(found[0])


def _masked_opaque(found: re.Match[str]) -> str:
    word = found[0]
    mixed = any(char.isdigit() for char in word) and any(char.isalpha() for char in word)
    return _MASK if mixed else word


def _mask_field(field: str) -> str:
    name, equals, _ = field.partition("=")
    return f"{name}={_MASK}" if equals else _MASK if name else ""


def _is_url(value: Any) -> bool:
    return type(value).__name__ == "URL" and type(value).__module__.partition(".")[0] in _MODULES
