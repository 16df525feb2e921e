"""What a document says, in the terms of the client to be written. Plain values; `writer` makes them text."""

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Type:
    """A Python type.

    Attributes:
        text: as it stands in code.
        kinds: what it looks like in JSON: `null`, `bool`, `int`, `float`, `str`, `array`, `map`, `struct`, `any`, or
            `file`, which is of multipart bodies alone.
        models: keys of the models it is of, where it is of models.
        base: the plain type below it, empty for unions.
        values: what it may be, where that is an enumeration.
        note: why it says less than the document, for the reader of the code; empty where it does not.
    """

    text: str
    kinds: frozenset[str]
    models: tuple[str, ...] = ()
    base: str = ""
    values: tuple[str | int | None, ...] | None = None
    note: str = ""

    @property
    def nullable(self) -> bool:
        """Whether it takes None."""
        return bool(self.kinds & {"null", "any"})

    def or_none(self) -> "Type":
        """Give the type that takes None as well."""
        if self.nullable:
            return self
        return dataclasses.replace(self, text=f"{self.text} | None", kinds=self.kinds | {"null"})


ANY = Type(text="Any", kinds=frozenset({"any"}))
NONE = Type(text="None", kinds=frozenset({"null"}))
FREE = Type(text="dict[str, Any]", kinds=frozenset({"map"}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A member of a model: `default` is its code, empty where it must be given."""

    name: str
    json: str
    type: Type
    default: str
    doc: str


@dataclass(kw_only=True, slots=True)
class Model:
    """A struct. `tag_field` and `tag` are what tells it apart in a union, empty and None where nothing does."""

    name: str
    doc: str
    tag_field: str = ""
    tag: str | int | None = None
    fields: list[Field] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """A name for a type."""

    name: str
    type: Type
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """An argument that goes into path, query, header or cookie; `where` says which, `style` how."""

    name: str
    json: str
    where: str
    style: str
    explode: bool
    required: bool
    type: Type
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """What a request carries."""

    media: str
    type: Type
    required: bool
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What may come back under a status (`200`, `4XX`, `default`); no `media` where there is no body."""

    status: str
    media: str
    type: Type


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One call of the API. `group` is the name of its tag."""

    name: str
    group: str
    method: str
    path: str
    doc: str
    parameters: tuple[Parameter, ...]
    body: Body | None
    answers: tuple[Answer, ...]
    security: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a caller shows who it is: `kind` is `bearer`, `basic`, or where an API key goes."""

    name: str
    json: str
    kind: str
    key: str
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Api:
    """All of a client."""

    title: str
    version: str
    doc: str
    server: str
    models: tuple[Model, ...]
    aliases: tuple[Alias, ...]
    operations: tuple[Operation, ...]
    schemes: tuple[Scheme, ...]
