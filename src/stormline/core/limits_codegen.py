"""Bounds of the code generator and of the clients it writes.

The rest of the product's bounds is in `limits`.
"""

from typing import Final

# -- generated clients ------------------------------------------------------------------------------------------------
CODEGEN_DOCUMENT_BYTES_MAX: Final = 32 * 1024 * 1024
"""An OpenAPI document; the largest published ones have some 10 MB."""
CODEGEN_OPERATIONS_MAX: Final = 5000
"""Operations in a document; the largest published ones have about a thousand."""
CODEGEN_MODELS_MAX: Final = 20_000
"""Models made from a document: a few for each operation."""
CODEGEN_DEPTH_MAX: Final = 48
"""Schemas inside schemas, and references that lead to references."""
CODEGEN_UNION_MAX: Final = 200
"""Members of one union or enumeration that are told apart; larger ones are taken as their plain type."""
CODEGEN_NAME_CHARS_MAX: Final = 60
"""Characters of a name in generated code; what is longer is cut and numbered."""
CODEGEN_TEXT_CHARS_MAX: Final = 4000
"""Characters of one description that reach a docstring."""
CODEGEN_GROUPED_FROM: Final = 25
"""Operations from which on they are grouped by their tags instead of standing all on the client."""
