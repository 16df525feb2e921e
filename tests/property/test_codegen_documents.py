"""Any document: a client that compiles and holds nothing but what the generator writes, or one error with a pointer."""

import ast
import keyword
import sys
import unicodedata
from types import ModuleType

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stormline.codegen.generate import generate
from stormline.codegen.names import Names, class_name, member_name
from stormline.codegen.text import docstring, literal
from stormline.core.errors import DocumentError

HOSTILE = [
    '"""\nboom()\n"""', "'''", "\\", '\\"', '"', "x = boom()", "\n    boom()\n", "\r boom()", "\x00", "\u2028boom()",
    "{boom()}", "#", "class", "self", "None", "__class__", "1abc", "ﬁeld", "Ünïcode", "订单", "a-b", "a_b", "aB", "",
    " ",
    "\u202eboom", "\\N{DASH}", "%s", "import os", "list", "str", "msgspec", "typed", "body", "business", "*/", '"""',
    "\U0001f600", "Client", "UNSET", "x" * 200, "]boom()[", "'boom()'",
]  # fmt: skip
texts = st.sampled_from(HOSTILE) | st.text(max_size=12)
PLAIN = [None, True, False, 0, 1, -3, 2**62, 2**70, -(2**70), 0.5, -1e308, [], {}, [1, "a", None], {"a": [1]}, [[]]]
values = st.sampled_from([*PLAIN, *HOSTILE])
NAMES = ["One", "two", "1three", "One ", "class", '"""boom()']
references = st.sampled_from(NAMES).map(lambda name: {"$ref": f"#/components/schemas/{name.replace('/', '~1')}"})
kinds = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])
words = st.fixed_dictionaries(
    {},
    optional={
        "type": kinds | st.lists(kinds, max_size=3),
        "format": st.sampled_from(["date-time", "date", "uuid", "byte", "binary", "decimal", "time", "int64"]) | texts,
        "description": texts,
        "enum": st.lists(values, max_size=3),
        "const": values,
        "default": values,
        "nullable": st.booleans(),
        "minimum": values,
        "exclusiveMinimum": values,
        "maxLength": values,
        "pattern": texts,
        "minItems": values,
        "multipleOf": values,
        "readOnly": st.booleans(),
        "writeOnly": st.booleans(),
        "deprecated": st.booleans(),
    },
)


def grown(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    some = st.lists(inner, max_size=3)
    return st.tuples(
        words,
        st.fixed_dictionaries(
            {},
            optional={
                "properties": st.dictionaries(texts, inner, max_size=4),
                "required": st.lists(texts, max_size=3),
                "items": inner,
                "additionalProperties": st.booleans() | inner,
                "allOf": some,
                "oneOf": some,
                "anyOf": some,
                "discriminator": st.fixed_dictionaries({"propertyName": texts}, optional={
                    "mapping": st.dictionaries(texts, texts | references.map(lambda each: each["$ref"]), max_size=2)}),
            },
        ),
    ).map(lambda pair: {**pair[0], **pair[1]})  # fmt: skip


schemas = st.recursive(references | words, grown, max_leaves=6)
MEDIA = [
    "application/json",
    "multipart/form-data",
    "application/x-www-form-urlencoded",
    "text/plain",
    "image/png",
    "*/*",
]
contents = st.dictionaries(st.sampled_from(MEDIA), st.fixed_dictionaries({"schema": schemas}), max_size=2)
parameters = st.lists(
    st.fixed_dictionaries(
        {"name": texts, "in": st.sampled_from(["query", "cookie", "header"])},
        optional={"schema": schemas, "description": texts, "required": st.booleans(), "explode": st.booleans()},
    ),
    max_size=4,
)
operations = st.fixed_dictionaries(
    {
        "responses": st.dictionaries(
            st.sampled_from(["200", "2XX", "404", "5XX", "default", "204"]),
            st.fixed_dictionaries({"description": texts}, optional={"content": contents}),
            max_size=3,
        )
    },
    optional={
        "operationId": texts,
        "summary": texts,
        "description": texts,
        "tags": st.lists(texts, max_size=2),
        "parameters": parameters,
        "requestBody": st.fixed_dictionaries({"content": contents}, optional={"required": st.booleans()}),
        "deprecated": st.booleans(),
    },
)
paths = st.dictionaries(
    texts.map(lambda text: "/" + text.replace("{", "").replace("}", "")),
    st.dictionaries(st.sampled_from(["get", "post", "put"]), operations, min_size=1, max_size=2),
    max_size=3,
)
schemes = st.dictionaries(
    texts,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["http", "apiKey", "oauth2", "mutualTLS"])},
        optional={"in": st.sampled_from(["query", "cookie"]), "name": texts, "scheme": texts, "description": texts},
    ),
    max_size=2,
)
documents = st.fixed_dictionaries(
    {
        "openapi": st.sampled_from(["3.0.3", "3.1.0"]),
        "info": st.fixed_dictionaries({"title": texts, "version": texts, "description": texts}),
        "paths": paths,
        "components": st.fixed_dictionaries(
            {"schemas": st.fixed_dictionaries(dict.fromkeys(NAMES, grown(schemas))), "securitySchemes": schemes}
        ),
    },
    optional={"servers": st.lists(st.fixed_dictionaries({"url": texts | st.just('https://x/"boom()')}), max_size=1)},
)
CALLED = {"typed", "msgspec", "super", "self", "stormline"}


def look(code: str) -> None:
    """Hold generated code to what the generator writes: no statement, name or call of another kind."""
    tree = ast.parse(code)
    for node in tree.body:
        assert isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.AnnAssign | ast.Expr)
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            root = node.func
            while not isinstance(root, ast.Name):
                root = root.value if isinstance(root, ast.Attribute | ast.Subscript) else root.func  # type: ignore[attr-defined]
            assert root.id in CALLED
        if isinstance(node, ast.ClassDef):
            names = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
            names += [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert len(set(names)) == len(names)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(documents)
def test_any_document_gives_code_of_the_generator_alone_or_one_error(document):
    try:
        made = generate(msgspec.json.encode(document))
    except DocumentError as error:
        assert error.pointer.startswith("#")
        return
    look(made.code)
    module = sys.modules["generated_any"] = ModuleType("generated_any")
    try:
        exec(compile(made.code, "generated", "exec"), module.__dict__)
        for each in list(vars(module).values()):
            if isinstance(each, type) and issubclass(each, msgspec.Struct) and each is not msgspec.Struct:
                msgspec.json.Decoder(each)
            if type(each).__name__ == "Operation":
                for answer in each.answers:
                    assert answer.media == "" or answer.decoder
    finally:
        del sys.modules["generated_any"]


@given(st.binary(max_size=60) | values.map(msgspec.json.encode))
def test_what_is_no_document_is_refused_with_a_pointer(data):
    with pytest.raises(DocumentError) as refused:
        generate(data)
    assert refused.value.pointer.startswith("#")


@given(st.lists(texts, max_size=8))
def test_names_are_valid_and_unique(wanted):
    members, classes = Names(), Names()
    for make, scope in ((member_name, members), (class_name, classes)):
        made = [scope.give(make(each)) for each in wanted]
        assert all(name.isidentifier() and not keyword.iskeyword(name) for name in made)
        assert [unicodedata.normalize("NFKC", name) for name in made] == made
        assert len(set(made)) == len(made)
        assert all(name[0].isupper() if make is class_name else not name[0].isupper() for name in made)


@given(texts, texts)
def test_docstrings_and_literals_hold_what_they_are_given(one, two):
    tree = ast.parse(f"def f():\n{docstring([one, two, 'end'], '    ')}")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert len(tree.body) == len(function.body) == 1
    assert ast.literal_eval(literal(one)) == one
