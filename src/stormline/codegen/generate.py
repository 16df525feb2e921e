"""From a document to a module, in one call."""

from dataclasses import dataclass

from stormline.codegen import document, operations
from stormline.codegen.names import member_name
from stormline.codegen.writer import Writer
from stormline.core.errors import DocumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A written client: its module's name, its text, and how much it holds."""

    name: str
    code: str
    operations: int
    models: int


def generate(data: bytes, *, name: str = "") -> Generated:
    """Write the client of an OpenAPI document; the same document gives the same text.

    Args:
        data: the document, JSON.
        name: of the module; empty: made from the document's title.

    Raises:
        DocumentError: the document cannot be made into a client; it says where and why.
    """
    try:
        api = operations.read(document.parse(data))
    except RecursionError:
        raise DocumentError("#", "schemas are too deep") from None
    code = Writer(api, "stormline codegen").write()
    return Generated(
        name=member_name(name or api.title),
        code=code,
        operations=len(api.operations),
        models=len(api.models) + len(api.aliases),
    )
