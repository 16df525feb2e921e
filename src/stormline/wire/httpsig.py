"""Signed HTTP answers: HTTP Message Signatures (RFC 9421) over a digest of the content (RFC 9530).

What a client needs to believe an answer that came without TLS, and no more: Ed25519 and HMAC-SHA256, fields as they
stand and the derived components of section 2.2; the parameters `sf`, `key`, `bs` and `tr` of a component are not
known, and a signature that needs them proves nothing here. Structured fields (RFC 9651) are read strictly and bounded.

    verdict = check_answer(asked, status, headers, body, keys=keys, nonce=nonce, now_s=wall_s)
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from stormline.core import errors, limits, limits_means

Fields: TypeAlias = Iterable[tuple[bytes, bytes]]
ALGORITHMS: Final = ("ed25519", "hmac-sha256")
"""RFC 9421 section 6.2.2."""
_HMAC_BYTES_MIN: Final = 16
_DIGESTS: Final = {"sha-256": hashlib.sha256, "sha-512": hashlib.sha512}
"""RFC 9530 section 7.2: those that are not deprecated."""

_KEY: Final = re.compile(r"[a-z*][a-z0-9_\-.*]{0,63}")
_NUMBER: Final = re.compile(r"-?(?:\d{1,12}\.\d{1,3}|\d{1,15})(?![\d.])", re.ASCII)
_STRING: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_TOKEN: Final = re.compile(r"[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*")
_BYTES: Final = re.compile(r":([A-Za-z0-9+/=]*):")
_BLANKS: Final = re.compile(r"[ \t]*")


class Token(str):
    """A token of a structured field, told apart from a string."""

    __slots__ = ()


Bare: TypeAlias = int | str | bytes | bool | Token
Params: TypeAlias = dict[str, Bare]


class Item(NamedTuple):
    """A bare item with its parameters."""

    value: Bare
    params: Params


class InnerList(NamedTuple):
    """A list of items, with parameters of its own."""

    items: tuple[Item, ...]
    params: Params


Member: TypeAlias = Item | InnerList


class Asked(NamedTuple):
    """The request an answer is for, as it went on the wire.

    Attributes:
        method: as it was sent.
        scheme: `http` or `https`.
        authority: host, in lower case, with its port where that is not the scheme's own (RFC 9421 section 2.2.3).
        target: path and query.
        headers: field lines.
    """

    method: str
    scheme: str
    authority: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Verdict(NamedTuple):
    """Whether an answer is the origin's.

    Attributes:
        trusted: it is.
        why: whose signature it has, or what is wrong with it.
        covered: names of the field lines that the signature covers, lower case. No other may be believed.
    """

    trusted: bool
    why: str
    covered: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A key whose signatures are trusted. Its `repr` shows no key.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        key: the Ed25519 public key, 32 bytes; or the shared secret of the HMAC, 16 bytes or more. Whoever has the
            secret of an HMAC can sign: one that every copy of an app carries proves little.

    Raises:
        ConfigError: another algorithm, or a key that cannot be one.
    """

    algorithm: str
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Check the values."""
        if self.algorithm not in ALGORITHMS:
            raise errors.ConfigError(f"algorithm {self.algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
        if not isinstance(self.key, bytes):
            raise errors.ConfigError(f"key: expected bytes, not {type(self.key).__name__}")
        if self.algorithm == "ed25519" and len(self.key) != 32:
            raise errors.ConfigError(f"key: an Ed25519 public key has 32 bytes, not {len(self.key)}")
        if self.algorithm == "hmac-sha256" and len(self.key) < _HMAC_BYTES_MIN:
            raise errors.ConfigError(f"key: a secret has at least {_HMAC_BYTES_MIN} bytes, not {len(self.key)}")

    def verifies(self, signature: bytes, base: bytes) -> bool:
        """Say whether a signature is this key's."""
        if self.algorithm == "hmac-sha256":
            return hmac.compare_digest(hmac.digest(self.key, base, "sha256"), signature)
        # Imported at need: a client that asks nobody in clear does not load it.
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.key).verify(signature, base)
        except (InvalidSignature, ValueError):
            return False
        return True


# -- structured fields (RFC 9651) --------------------------------------------------------------------------------------
class _Reader:
    """Reads one field's text from left to right; raises ValueError where it breaks the grammar or a bound."""

    def __init__(self, text: str) -> None:
        if len(text) > limits_means.SIGNATURE_FIELD_CHARS_MAX:
            raise ValueError(f"a field of more than {limits_means.SIGNATURE_FIELD_CHARS_MAX} characters")
        self._text = text.strip(" ")
        self._at = 0

    def dictionary(self) -> dict[str, Member]:
        found: dict[str, Member] = {}
        while self._at < len(self._text):
            name = self._match(_KEY, "a key")[0]
            value = self._member() if self._take("=") else Item(True, self._params())
            found.pop(name, None)  # the last of one name counts, at its place (RFC 9651 section 4.2.2)
            found[name] = value
            if len(found) > limits_means.SIGNATURE_MEMBERS_MAX:
                raise ValueError(f"more than {limits_means.SIGNATURE_MEMBERS_MAX} members")
            self._match(_BLANKS, "")
            if self._at == len(self._text):
                break
            if not self._take(","):
                raise ValueError("members without a comma between them")
            self._match(_BLANKS, "")
            if self._at == len(self._text):
                raise ValueError("a comma at the end")
        return found

    def _member(self) -> Member:
        if not self._take("("):
            return Item(self._bare(), self._params())
        items: list[Item] = []
        while True:
            while self._take(" "):
                pass
            if self._take(")"):
                return InnerList(tuple(items), self._params())
            if items and self._text[self._at - 1] != " ":
                raise ValueError("items without a space between them")
            items.append(Item(self._bare(), self._params()))
            if len(items) > limits_means.SIGNATURE_COMPONENTS_MAX:
                raise ValueError(f"more than {limits_means.SIGNATURE_COMPONENTS_MAX} components")

    def _params(self) -> Params:
        params: Params = {}
        while self._take(";"):
            while self._take(" "):
                pass
            name = self._match(_KEY, "a parameter")[0]
            value = self._bare() if self._take("=") else True
            params.pop(name, None)
            params[name] = value
            if len(params) > limits_means.SIGNATURE_PARAMS_MAX:
                raise ValueError(f"more than {limits_means.SIGNATURE_PARAMS_MAX} parameters")
        return params

    def _bare(self) -> Bare:
        char = self._text[self._at : self._at + 1]
        if char == '"':
            return self._match(_STRING, "a string")[1].replace('\\"', '"').replace("\\\\", "\\")
        if char == ":":
            try:
                return base64.b64decode(self._match(_BYTES, "bytes")[1], validate=True)
            except binascii.Error:
                raise ValueError("bytes that are no base64") from None
        if char == "?":
            value = self._text[self._at : self._at + 2]
            if value not in ("?0", "?1"):
                raise ValueError("neither ?0 nor ?1")
            self._at += 2
            return value == "?1"
        if char == "-" or char.isdigit():
            text = self._match(_NUMBER, "a number")[0]
            if "." in text:
                raise ValueError("a decimal number")
            return int(text)
        return Token(self._match(_TOKEN, "an item")[0])

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError(f"expected {what} at {self._at}")
        self._at = found.end()
        return found

    def _take(self, char: str) -> bool:
        if self._text.startswith(char, self._at):
            self._at += 1
            return True
        return False


def parse_dictionary(text: str) -> dict[str, Member]:
    """Read a dictionary (RFC 9651 section 4.2.2) of items and inner lists.

    Decimals, dates and display strings are not read: no field here has one.

    Raises:
        ValueError: it breaks the grammar, or a bound of `limits_means`; the message says what.
    """
    if not text.isascii():
        raise ValueError("characters beyond ASCII")
    return _Reader(text).dictionary()


def _bare_text(value: Bare) -> str:
    match value:
        case bool():
            return "?1" if value else "?0"
        case int():
            return str(value)
        case bytes():
            return f":{base64.b64encode(value).decode('ascii')}:"
        case Token():
            return str(value)
        case _:
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _params_text(params: Params) -> str:
    return "".join(f";{name}" if value is True else f";{name}={_bare_text(value)}" for name, value in params.items())


def serialize(member: Member) -> str:
    """Write an item or inner list (RFC 9651 section 4.1)."""
    if isinstance(member, Item):
        return _bare_text(member.value) + _params_text(member.params)
    return f"({' '.join(serialize(item) for item in member.items)}){_params_text(member.params)}"


# -- digests (RFC 9530) -----------------------------------------------------------------------------------------------
def content_digest(body: bytes, algorithm: str = "sha-256") -> str:
    """Give a `Content-Digest` for a body.

    Args:
        body: as it goes on the wire, content codings applied.
        algorithm: `sha-256` or `sha-512`.
    """
    return f"{algorithm}={_bare_text(_DIGESTS[algorithm](body).digest())}"


def digest_fits(value: str, body: bytes) -> bool:
    """Say whether a `Content-Digest` or `Repr-Digest` is a body's: all in it that are known, and one at least."""
    try:
        found = parse_dictionary(value)
    except ValueError:
        return False
    known = [(_DIGESTS[name], member) for name, member in found.items() if name in _DIGESTS]
    return bool(known) and all(
        isinstance(member, Item)
        and isinstance(member.value, bytes)
        and hmac.compare_digest(make(body).digest(), member.value)
        for make, member in known
    )


# -- signatures (RFC 9421) --------------------------------------------------------------------------------------------
def signature_base(covered: InnerList, *, asked: Asked, status: int | None = None, headers: Fields = ()) -> bytes:
    """Give the bytes that a signature signs (section 2.5).

    Args:
        covered: components and parameters.
        asked: the request.
        status: of the answer; None where the request itself is signed: then `headers` are not looked at.
        headers: of the answer.

    Raises:
        ValueError: a component is unknown, named twice or absent from the message.
    """
    message = asked.headers if status is None else tuple(headers)
    lines: list[str] = []
    seen: set[str] = set()
    for item in covered.items:
        name = serialize(item)
        if name in seen:
            raise ValueError(f"{name} is covered twice")
        seen.add(name)
        lines.append(f"{name}: {_component(item, asked, status, message)}")
    lines.append(f'"@signature-params": {serialize(covered)}')
    return "\n".join(lines).encode("latin-1")


def _component(item: Item, asked: Asked, status: int | None, message: Sequence[tuple[bytes, bytes]]) -> str:
    name = item.value
    if not isinstance(name, str) or isinstance(name, Token) or name != name.lower():
        raise ValueError("a component that is no string in lower case")
    of_request = item.params.get("req") is True
    if set(item.params) - {"req"} or (of_request and status is None):
        raise ValueError(f"component {serialize(item)}: parameters that are not known")
    if not name.startswith("@"):
        return _field(name, asked.headers if of_request else message)
    if name == "@status":
        if status is None or of_request:
            raise ValueError("@status of a request")
        return str(status)
    if status is not None and not of_request:
        raise ValueError(f"{name} of an answer")
    path, mark, query = asked.target.partition("?")
    derived = {
        "@method": asked.method,
        "@target-uri": f"{asked.scheme}://{asked.authority}{asked.target}",
        "@authority": asked.authority,
        "@scheme": asked.scheme,
        "@request-target": asked.target,
        "@path": path or "/",
        "@query": f"?{query}" if mark else "?",
    }
    if name not in derived:
        raise ValueError(f"component {name} is not known")
    return derived[name]


def _field(name: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    values = [value.decode("latin-1").strip(" \t") for each, value in headers if each.lower() == name.encode("ascii")]
    if not values:
        raise ValueError(f"field {name} is covered and absent")
    if any("\n" in value or "\r" in value for value in values):
        raise ValueError(f"field {name} has line breaks")
    return ", ".join(values)


def accept_signature(nonce: str) -> bytes:
    """Give the `Accept-Signature` that asks for what `check_answer` wants (RFC 9421 section 5.1)."""
    return f'sl={serialize(_wanted())};created;nonce="{nonce}"'.encode("ascii")


def _wanted(names: Iterable[str] = ()) -> InnerList:
    req: Params = {"req": True}
    of_answer = (Item("@status", {}), *(Item(name, {}) for name in names), Item("content-digest", {}))
    of_request = (Item("@method", req), Item("@authority", req), Item("@request-target", req))
    return InnerList((*of_answer, *of_request), {})


def check_answer(
    asked: Asked,
    status: int,
    headers: Fields,
    body: bytes,
    *,
    keys: Mapping[str, VerifyKey],
    nonce: str,
    now_s: float,
) -> Verdict:
    """Say whether an answer is the origin's own, to this very request. Takes any bytes, raises nothing.

    It is where one signature of a trusted key covers its status, a digest that is the body's, and the request's method
    and target (so that no answer passes for another's), and is fresh: it carries our nonce; or it has none and was made
    within `limits_means.CLEAR_SIGNATURE_AGE_S`, by our wall clock.

    Args:
        asked: the request as it went on the wire.
        status: of the answer.
        headers: its field lines.
        body: its whole content as it came, content codings applied.
        keys: by key id.
        nonce: sent with the request.
        now_s: wall clock, seconds since 1970.
    """
    lines = tuple(headers)
    try:
        inputs = parse_dictionary(_field("signature-input", lines))
        signatures = parse_dictionary(_field("signature", lines))
    except ValueError as error:
        return Verdict(False, f"not signed: {error}")
    why = "not signed by any key that is trusted"
    for label, covered in inputs.items():
        signed = signatures.get(label)
        if not isinstance(covered, InnerList) or not isinstance(signed, Item) or not isinstance(signed.value, bytes):
            continue
        keyid = covered.params.get("keyid")
        key = keys.get(keyid) if isinstance(keyid, str) else None
        if key is None:
            continue
        fault = _fault(covered, asked, status, lines, body, nonce, now_s)
        if fault:
            why = fault
            continue
        if covered.params.get("alg", key.algorithm) != key.algorithm:
            why = "signed by another algorithm than its key's"
            continue
        try:
            base = signature_base(covered, asked=asked, status=status, headers=lines)
        except (ValueError, UnicodeEncodeError) as error:
            why = str(error)
            continue
        if key.verifies(signed.value, base):
            names = {item.value for item in covered.items if isinstance(item.value, str) and not item.params}
            return Verdict(True, f"signed by {keyid!r}", frozenset(name for name in names if name[0] != "@"))
        why = "the signature is not that of its key"
    return Verdict(False, why)


def _fault(
    covered: InnerList,
    asked: Asked,
    status: int,
    headers: Fields,
    body: bytes,
    nonce: str,
    now_s: float,
) -> str:
    """Say what keeps a signature from proving anything, if it is one; empty where nothing does."""
    answer = {item.value for item in covered.items if not item.params}
    request = {item.value for item in covered.items if item.params == {"req": True}}
    if "" in answer:
        return "a component without a name"
    if "@status" not in answer:
        return "the signature does not cover the status"
    whole = {"@target-uri"} <= request
    path = {"@request-target"} <= request or {"@path", "@query"} <= request
    if not path and "?" not in asked.target:
        path = {"@path"} <= request
    if "@method" not in request or not (whole or (path and "@authority" in request)):
        return "the signature does not cover what was asked"
    # A whole answer's representation is its content; of a part, or another status, only the content has come.
    digests = ["content-digest", *(["repr-digest"] if status == 200 else [])]
    named = [name for name in digests if name in answer]
    if not named:
        return "the signature does not cover a digest of the content"
    for name in named:
        try:
            value = _field(name, headers)
        except ValueError as error:
            return str(error)
        if not digest_fits(value, body):
            return f"the {name} is not the body's"
    return _age_fault(covered.params, nonce, now_s)


def _age_fault(params: Params, nonce: str, now_s: float) -> str:
    created, expires, theirs = params.get("created"), params.get("expires"), params.get("nonce")
    if theirs is not None:
        # Made for this very request, a moment ago: whatever the two clocks say.
        same = isinstance(theirs, str) and hmac.compare_digest(theirs.encode(), nonce.encode())
        return "" if same else "the signature is for another request"
    if isinstance(created, bool) or not isinstance(created, int):
        return "the signature has neither our nonce nor a time"
    if isinstance(expires, int) and now_s > expires + limits.CLOCK_SKEW_S:
        return "the signature has expired"
    if not -limits.CLOCK_SKEW_S <= now_s - created <= limits_means.CLEAR_SIGNATURE_AGE_S:
        return f"the signature is {now_s - created:.0f} s old"
    return ""


def sign_answer(
    asked: Asked,
    status: int,
    headers: Fields,
    body: bytes,
    *,
    keyid: str,
    sign: "Signer",
    created: int,
    nonce: str | None = None,
    cover: Sequence[str] = (),
) -> tuple[tuple[bytes, bytes], ...]:
    """Give the field lines that sign an answer, for an origin's side: `Content-Digest`, `Signature-Input`, `Signature`.

    Args:
        asked: the request.
        status: of the answer.
        headers: its field lines so far.
        body: its content, content codings applied.
        keyid: names the key.
        sign: signs bytes.
        created: wall clock, whole seconds since 1970.
        nonce: that of the request's `Accept-Signature`, where it has one.
        cover: field lines that the client shall believe, lower case: `content-type`, `content-encoding`.
    """
    digest = (b"content-digest", content_digest(body).encode("ascii"))
    params: Params = {"created": created, "keyid": keyid}
    if nonce is not None:
        params["nonce"] = nonce
    covered = InnerList(_wanted(cover).items, params)
    base = signature_base(covered, asked=asked, status=status, headers=(*headers, digest))
    return (
        digest,
        (b"signature-input", f"sl={serialize(covered)}".encode("ascii")),
        (b"signature", b"sl=" + _bare_text(sign(base)).encode("ascii")),
    )


class Signer:
    """Signs bytes by one of the two algorithms.

    Args:
        algorithm: one of `ALGORITHMS`.
        key: the Ed25519 private key, 32 bytes, or the shared secret.
    """

    __slots__ = ("_algorithm", "_key")

    def __init__(self, algorithm: str, key: bytes) -> None:
        if algorithm not in ALGORITHMS:
            raise errors.ConfigError(f"algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
        self._algorithm = algorithm
        self._key = key

    def __call__(self, base: bytes) -> bytes:
        """Give the signature of some bytes."""
        if self._algorithm == "hmac-sha256":
            return hmac.digest(self._key, base, "sha256")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._key).sign(base)


def nonce_of(value: bytes) -> str | None:
    """Give the nonce that an `Accept-Signature` asks for, None where there is none that can be read."""
    try:
        found = parse_dictionary(value.decode("latin-1"))
    except ValueError:
        return None
    for member in found.values():
        nonce = member.params.get("nonce")
        if isinstance(nonce, str) and not isinstance(nonce, Token):
            return nonce
    return None
