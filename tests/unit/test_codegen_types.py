"""Schemas and what becomes of them; documents that cannot be made into a client; the command."""

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from stormline.cli import main
from stormline.codegen.generate import generate
from stormline.core import limits_codegen as limits
from stormline.core.errors import DocumentError


def document(schemas: dict[str, Any] | None = None, paths: dict[str, Any] | None = None, **more: Any) -> bytes:
    said = {"openapi": "3.1.0", "info": {"title": "Small"}, "paths": paths or {}, **more}
    return msgspec.json.encode({**said, "components": {"schemas": schemas or {}}})


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def annotation(schema: dict[str, Any], **others: Any) -> str:
    """Give the type that a required member of this schema gets."""
    whole = {"type": "object", "required": ["it"], "properties": {"it": schema}}
    return line_of(generate(document({"Holder": whole, **others})).code, "Holder", "it")


def line_of(code: str, model: str, member: str) -> str:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef) and node.name == model:
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == member:
                    default = f" = {ast.unparse(each.value)}" if each.value else ""
                    return ast.unparse(each.annotation).replace("'", '"') + default
    raise AssertionError(f"{model}.{member} is not there")


def load(data: bytes) -> Any:
    module = sys.modules["generated_small"] = ModuleType("generated_small")
    exec(compile(generate(data).code, "generated", "exec"), module.__dict__)
    return module


A = {"type": "object", "required": ["k"], "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}}
B = {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["b"]}, "y": {"type": "string"}}}
PLAIN = {"type": "object", "properties": {"z": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "str"),
        ({"type": "integer", "format": "int64"}, "int"),
        ({"type": "number"}, "float"),
        ({"type": "boolean"}, "bool"),
        ({"type": "null"}, "None"),
        ({}, "Any"),
        ({"type": "string", "format": "date-time"}, "datetime.datetime"),
        ({"type": "string", "format": "date"}, "datetime.date"),
        ({"type": "string", "format": "uuid"}, "uuid.UUID"),
        ({"type": "string", "format": "byte"}, "bytes"),
        ({"type": "string", "contentEncoding": "base64"}, "bytes"),
        ({"type": "string", "nullable": True}, "str | None"),
        ({"type": ["string", "null"]}, "str | None"),
        ({"type": ["string", "integer"]}, "str | int"),
        ({"type": "array", "items": {"type": "integer"}}, "list[int]"),
        ({"type": "array"}, "list[Any]"),
        ({"type": "object"}, "dict[str, Any]"),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, "dict[str, bool]"),
        ({"type": "string", "enum": ["a", "b", "a"]}, 'Literal["a", "b"]'),
        ({"type": "string", "nullable": True, "enum": ["a", None]}, 'Literal["a"] | None'),
        ({"enum": [1, "x"]}, 'Literal[1, "x"]'),
        ({"type": "number", "enum": [0.5]}, "float"),
        ({"const": "only"}, 'Literal["only"]'),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 9}, "Annotated[int, msgspec.Meta(ge=1, lt=9)]"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "Annotated[int, msgspec.Meta(gt=1)]"),
        ({"type": "integer", "minimum": 2**70}, "int"),
        ({"type": "string", "pattern": "("}, "str"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 3},
         "Annotated[list[str], msgspec.Meta(max_length=3)]"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, "str | int | None"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "format": "date"}]}, "str"),
        ({"oneOf": [{"type": "integer"}, {"enum": [1]}]}, "int"),
        ({"anyOf": [ref("A"), ref("B")]}, "A | B"),
        ({"anyOf": [ref("A"), {"type": "null"}]}, "A | None"),
        ({"anyOf": [ref("A"), ref("Plain")]}, "dict[str, Any]"),
        ({"anyOf": [ref("A"), {"type": "array", "items": ref("A")}]}, "A | list[A]"),
        ({"allOf": [ref("A")], "description": "x", "nullable": True}, "A | None"),
        ({"allOf": [ref("A"), {"properties": {"more": {}}}]}, "HolderIt"),
    ],
    ids=str,
)  # fmt: skip
def test_schema_becomes_type(schema: dict[str, Any], expected: str) -> None:
    assert annotation(schema, A=A, B=B, Plain=PLAIN) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "str | UnsetType = UNSET"),
        ({"type": "string", "nullable": True}, "str | UnsetType | None = UNSET"),
        ({"type": "string", "nullable": True, "default": None}, "str | None = None"),
        ({"type": "integer", "default": 3}, "int = 3"),
        ({"type": "integer", "default": "three"}, "int | UnsetType = UNSET"),
        ({"enum": ["a", "b"], "default": "b"}, 'Literal["a", "b"] = \'b\''),
        ({"type": "array", "items": {}, "default": []}, "list[Any] = msgspec.field(default_factory=list)"),
    ],
    ids=str,
)
def test_optional_member_has_a_default(schema: dict[str, Any], expected: str) -> None:
    code = generate(document({"Holder": {"type": "object", "properties": {"it": schema}}})).code
    assert line_of(code, "Holder", "it") == expected


def test_inexact_types_say_why() -> None:
    code = generate(document({"A": A, "P": PLAIN, "Which": {"anyOf": [ref("A"), ref("P")]}})).code
    assert "# Not exact: variants that nothing tells apart.\nWhich: TypeAlias = dict[str, Any]\n" in code


def test_all_of_is_flattened_and_children_are_told_apart_by_their_parents_discriminator() -> None:
    pet = {"type": "object", "required": ["kind"], "discriminator": {"propertyName": "kind"},
           "properties": {"kind": {"type": "string"}, "name": {"type": "string"}}}  # fmt: skip
    module = load(
        document({
            "Pet": pet,
            "Cat": {"allOf": [ref("Pet"), {"properties": {"lives": {"type": "integer"}}}]},
            "Dog": {"allOf": [ref("Pet"), {"required": ["bark"], "properties": {"bark": {"type": "string"}}}]},
            "Home": {"type": "object", "properties": {"pet": ref("Pet")}},
        })
    )  # fmt: skip
    cat = msgspec.json.decode(b'{"pet": {"kind": "Cat", "name": "Tom", "lives": 9}}', type=module.Home)
    assert cat.pet == module.Cat(name="Tom", lives=9)
    assert msgspec.json.encode(module.Dog(bark="wow")) == b'{"kind":"Dog","bark":"wow"}'


def test_variants_of_an_object_with_members_of_its_own_have_both() -> None:
    whole = {
        "type": "object",
        "required": ["id"],
        "properties": {"id": {"type": "integer"}},
        "oneOf": [ref("A"), ref("B")],
    }
    module = load(document({"A": A, "B": B, "Whole": whole}))
    read = msgspec.json.decode(b'{"id": 1, "k": "b", "y": "z"}', type=module.Whole)
    assert (read.id, read.y) == (1, "z")


def test_recursion_is_kept_through_models_and_cut_elsewhere() -> None:
    tree = {"type": "object", "properties": {"left": ref("Tree"), "many": {"type": "array", "items": ref("Tree")}}}
    loop = {"oneOf": [{"type": "string"}, {"type": "array", "items": ref("Loop")}]}
    module = load(document({"Tree": tree, "Loop": loop}))
    read = msgspec.json.decode(b'{"left": {"many": [{}]}}', type=module.Tree)
    assert read == module.Tree(left=module.Tree(many=[module.Tree()]))
    assert msgspec.json.decode(b'["a", ["b"]]', type=module.Loop) == ["a", ["b"]]


def test_members_keep_their_json_names() -> None:
    odd = {name: {"type": "integer"} for name in ("class", "a-b", "aB", "a_b", "int", "_x", "1")}
    module = load(document({"Odd": {"type": "object", "properties": odd}}))
    data = b'{"class":1,"a-b":2,"aB":3,"a_b":4,"int":5,"_x":6,"1":7}'
    read = msgspec.json.decode(data, type=module.Odd)
    assert msgspec.json.encode(read) == data
    assert (read.class_, read.a_b, read.int_) == (1, 2, 5)
    assert annotation({"type": "object", "properties": {"": {}}}) == annotation({"type": "object"})


def paths(**node: Any) -> dict[str, Any]:
    return {"/x/{id}": {"get": {"responses": {}, "parameters": [{"name": "id", "in": "path"}], **node}}}


@pytest.mark.parametrize(
    ("data", "pointer"),
    [
        (b"openapi: 3.0.0", "#"),
        (b"[]", "#"),
        (b'{"openapi": "2.0"}', "#/openapi"),
        (b" " * (limits.CODEGEN_DOCUMENT_BYTES_MAX + 1), "#"),
        (document({"A": {"properties": {"x": {"$ref": "https://evil.example/a.json"}}}}),
         "#/components/schemas/A/properties/x/$ref"),
        (document({"A": {"$ref": "other.json#/A"}}), "#/components/schemas/A/$ref"),
        (document({"A": ref("Gone")}), "#/components/schemas/A/$ref"),
        (document({"A": ref("B"), "B": ref("A")}), "#/components/schemas/A"),
        (document({"A": {"allOf": [ref("A"), PLAIN]}}), "#/components/schemas/A"),
        (document({"A": {"type": "text"}}), "#/components/schemas/A/type"),
        (document({"A": {"properties": {"x": 1}}}), "#/components/schemas/A/properties/x"),
        (document(paths={"x": {}}), "#/paths/x"),
        (document(paths={"/x/{id}": {"get": {"responses": {}}}}), "#/paths/~1x~1{id}/get"),
        (document(paths=paths(responses={"often": {}})), "#/paths/~1x~1{id}/get/responses/often"),
        (document(paths=paths(parameters=[{"in": "path"}])), "#/paths/~1x~1{id}/get/parameters/0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_document_that_cannot_be_made_is_refused_with_the_place(data: bytes, pointer: str) -> None:
    with pytest.raises(DocumentError) as refused:
        generate(data)
    assert refused.value.pointer == pointer


def test_schemas_without_end_are_refused() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(limits.CODEGEN_DEPTH_MAX + 2):
        deep = {"type": "array", "items": deep}
    with pytest.raises(DocumentError, match="deep"):
        generate(document({"Deep": deep}))


def test_parts_of_parts_without_end_are_refused() -> None:
    deep = b'{"allOf": [' * 400 + b"{}" + b"]}" * 400
    data = b'{"openapi": "3.1.0", "paths": {}, "components": {"schemas": {"A": ' + deep + b"}}}"
    with pytest.raises(DocumentError):
        generate(data)


def test_variants_that_contain_their_whole_are_refused() -> None:
    whole = {"properties": {"a": {}}, "oneOf": [ref("Whole"), ref("A")]}
    with pytest.raises(DocumentError, match="deep"):
        generate(document({"A": A, "Whole": whole}))


def test_null_by_name_is_none() -> None:
    assert annotation({"anyOf": [ref("Null"), {"type": "null"}]}, Null={"const": None}) == "None"


def test_all_of_that_doubles_itself_costs_no_more_than_its_text() -> None:
    doubled = {f"S{n}": {"allOf": [ref(f"S{n + 1}"), ref(f"S{n + 1}")]} for n in range(40)}
    assert generate(document({**doubled, "S40": PLAIN})).models == 41


def test_command_writes_once_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, place = tmp_path / "openapi.json", tmp_path / "out"
    source.write_bytes(document({"Plain": PLAIN}))
    words = ["codegen", str(source), "--out", str(place)]
    assert main.run([*words, "--check"]) == 1
    assert not place.exists()
    assert main.run(words) == 0
    assert main.run([*words, "--check", "--json"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert msgspec.json.decode(said)["file"] == str(place / "small.py")
    assert (place / "small.py").read_text() == generate(source.read_bytes()).code
    assert main.run([*words[:2], "--out", str(tmp_path / "mine.py")]) == 0
    source.write_bytes(document({"Plain": A}))
    assert main.run([*words, "--check"]) == 1
    assert main.run(["codegen", str(tmp_path / "gone.json")]) == 1


def test_golden_client_is_what_the_shops_document_gives() -> None:
    from stormline.demo.pages import openapi

    golden = Path(__file__).parents[1] / "vectors" / "demo_shop_client.txt"
    assert generate(openapi()).code == golden.read_text(encoding="utf-8")
