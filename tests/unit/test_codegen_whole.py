"""Whole documents: the shop's, the platform's own, and a large made one. What is written is checked as people would."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from stormline.codegen.generate import generate

ROOT = Path(__file__).parents[2]
RESOURCES = 42


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def json_of(schema: Any) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def schemas_of(name: str) -> dict[str, Any]:
    """Give the schemas of one resource: each form of JSON Schema that the generator knows, somewhere."""
    return {
        f"{name}Base": {
            "type": "object",
            "required": ["id", "created"],
            "properties": {
                "id": {"type": "string", "format": "uuid", "readOnly": True},
                "created": {"type": "string", "format": "date-time"},
                "day": {"type": "string", "format": "date"},
                "secret": {"type": "string", "writeOnly": True},
            },
        },
        f"{name}State": {"type": "string", "enum": ["new", "in use", "gone", 'with "quotes"']},
        f"{name}Dog": {"type": "object", "required": ["kind", "bark"],
                       "properties": {"kind": {"type": "string"}, "bark": {"type": "integer", "minimum": 0}}},
        f"{name}Cat": {"type": "object", "required": ["kind"],
                       "properties": {"kind": {"type": "string"}, "lives": {"type": "integer", "default": 9}}},
        f"{name}Pet": {"oneOf": [ref(f"{name}Dog"), ref(f"{name}Cat")],
                       "discriminator": {"propertyName": "kind", "mapping": {"dog": f"#/components/schemas/{name}Dog",
                                                                             "cat": f"{name}Cat"}}},
        f"{name}Amount": {"oneOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+$"}]},
        f"{name}Vague": {"anyOf": [ref(f"{name}Base"), ref(f"{name}Error")]},
        f"{name}Tree": {"type": "object", "properties": {"children": {"type": "array", "items": ref(f"{name}Tree")},
                                                         "parent": {"anyOf": [ref(f"{name}Tree"), {"type": "null"}]}}},
        name: {
            "allOf": [
                ref(f"{name}Base"),
                {
                    "type": "object",
                    "required": ["state", "class", "note"],
                    "properties": {
                        "state": ref(f"{name}State"),
                        "class": {"type": ["string", "null"], "maxLength": 40},
                        "note": {"type": "string", "nullable": True},
                        "pet": {"allOf": [ref(f"{name}Pet")], "description": "The pet."},
                        "amount": ref(f"{name}Amount"),
                        "vague": ref(f"{name}Vague"),
                        "tree": ref(f"{name}Tree"),
                        "size-of-it": {"type": "number", "minimum": 0, "exclusiveMaximum": 1e6},
                        "tags": {"type": "array", "items": {"type": "string"}, "default": [], "maxItems": 20},
                        "prices": {"type": "object", "additionalProperties": {"type": "string", "format": "decimal"}},
                        "data": {"type": "string", "format": "byte"},
                        "free": {"type": "object"},
                        "any": {},
                        "version": {"const": 3},
                        "inner": {"type": "object", "properties": {"list": {"type": "array", "items": {
                            "type": "object", "properties": {"x": {"type": "integer", "default": 0}}}}}},
                        "_hidden": {"type": "boolean", "default": True},
                    },
                },
            ]
        },
        f"{name}Error": {"type": "object", "required": ["code"], "properties": {"code": {"type": "integer"}}},
    }  # fmt: skip


def paths_of(name: str, tag: str) -> dict[str, Any]:
    """Give the operations of one resource: each place and style of a parameter, each kind of body and answer."""
    refused = {"default": {"description": "no", **json_of(ref(f"{name}Error"))}}
    ident = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "format": "uuid"}}
    well = {"200": {"description": "yes", **json_of(ref(name))}}
    page = {"type": "object", "required": ["items"], "properties": {"items": {"type": "array", "items": ref(name)},
                                                                    "next": {"type": ["string", "null"]}}}  # fmt: skip
    upload = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "more": {"type": "array", "items": {"type": "string", "format": "binary"}},
            "about": ref(f"{name}Cat"),
            "title": {"type": "string"},
        },
    }
    listed = [
        {"name": "state", "in": "query", "schema": {"type": "array", "items": ref(f"{name}State")}},
        {"name": "near", "in": "query", "style": "deepObject", "explode": True, "schema": ref(f"{name}Cat")},
        {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
        {"name": "session", "in": "cookie", "schema": {"type": "string"}},
        {"name": "from", "in": "query", "required": True, "schema": {"type": "string", "format": "date-time"}},
        {"name": "filter", "in": "query", "content": {"application/json": {"schema": {"type": "object"}}}},
    ]
    form = {"application/x-www-form-urlencoded": {"schema": ref(f"{name}Error")}}
    return {
        f"/{tag}": {
            "get": {"operationId": f"list{name}s", "tags": [tag], "parameters": listed,
                    "responses": {"200": {"description": "yes", **json_of(page)}, **refused}},
            "post": {"operationId": f"create{name}", "tags": [tag],
                     "requestBody": {"required": True, **json_of(ref(name))},
                     "parameters": [{"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}],
                     "responses": {"201": well["200"], "202": {"description": "later"}, **refused}},
        },
        f"/{tag}/{{id}}": {
            "parameters": [ident],
            "get": {"operationId": f"get{name}", "tags": [tag], "responses": {**well, "404": refused["default"]}},
            "patch": {"tags": [tag], "summary": "Change it.", "requestBody": {"content": form}, "responses": refused},
            "put": {"tags": [tag], "requestBody": {"content": {"multipart/form-data": {"schema": upload}}},
                    "responses": {"204": {"description": "done"}}, "security": [{"key": []}, {"user": []}]},
            "delete": {"tags": [tag], "responses": {"204": {"description": "gone"}}, "deprecated": True},
        },
    }  # fmt: skip


def large() -> dict[str, Any]:
    """Make a document of six operations for each of many resources."""
    names = [f"Thing{n:02}" for n in range(RESOURCES)]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Large", "version": "1"},
        "servers": [{"url": "https://{place}.example/api", "variables": {"place": {"default": "eu"}}}],
        "security": [{"token": []}],
        "paths": {path: item for n in names for path, item in paths_of(n, n.lower()).items()},
        "components": {
            "schemas": {key: schema for name in names for key, schema in schemas_of(name).items()},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Key"},
                "user": {"type": "http", "scheme": "basic"},
            },
        },
    }


def gateway_document() -> dict[str, Any]:
    """Give what the gateway's business API says of itself; none of it is called."""
    from stormline.core.values import Secret
    from stormline.gateway.access import Access
    from stormline.gateway.admin import AdminView, make_app
    from stormline.gateway.admin_upstreams import UpstreamsView

    none: Any = None
    upstreams = UpstreamsView(key=none, read=none, write=none, book=none, now=none, public_keys=none)
    view = AdminView(
        node="n1",
        unit="u1",
        access=Access(Secret("key"), ("shop",), none, none, none),
        business=none,
        revoke=none,
        sessions=none,
        counts=none,
        load=none,
        engine_connected=none,
        upstreams=upstreams,
        keys=none,
        audit=none,
    )
    return make_app(view).openapi()


def dispatch_document() -> dict[str, Any]:
    """Give what dispatch's admin API says of itself; none of it is called."""
    from stormline.core.values import Secret
    from stormline.dispatch.admin import make_app

    editor: Any = None
    return make_app(editor, key=Secret("k")).openapi()


def documents() -> dict[str, bytes]:
    from stormline.demo.pages import openapi

    made = {"large": large(), "gateway": gateway_document(), "dispatch": dispatch_document()}
    return {"shop": openapi(), **{name: msgspec.json.encode(each) for name, each in made.items()}}


def load(path: Path) -> ModuleType:
    name = f"generated_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients")
    for name, data in documents().items():
        (folder / f"{name}_client.py").write_text(generate(data).code, encoding="utf-8")
    return folder


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_written_clients_pass_strict_type_checks(written: Path) -> None:
    use = "import large_client\n\n\nasync def use(api: large_client.Client) -> large_client.Thing00:\n"
    use += "    made = await api.thing00.get_thing00('x')\n    return made\n"
    (written / "wrong_use.py").write_text(use)
    said = run("mypy", "--strict", "--cache-dir", str(written / ".cache"), ".", cwd=written)
    assert [line for line in said.splitlines() if ": error:" in line and "wrong_use" not in line] == []
    assert 'has incompatible type "str"; expected "UUID"' in said  # it did look
    (written / "wrong_use.py").unlink()


def test_written_clients_pass_lint_and_format(written: Path) -> None:
    config = str(ROOT / "pyproject.toml")
    assert run("ruff", "check", "--no-cache", "--config", config, ".", cwd=written) == ""
    assert run("ruff", "format", "--no-cache", "--diff", "--config", config, ".", cwd=written) == ""


def test_large_document_gives_every_operation_twice_and_documented(written: Path) -> None:
    module = load(written / "large_client.py")
    calls = [cls for name, cls in vars(module).items() if name.endswith("Calls")]
    methods = [
        method for cls in calls for name, method in vars(cls).items() if not name.startswith("_") and callable(method)
    ]
    assert len(methods) == 2 * 6 * RESOURCES >= 400
    assert all(inspect.getdoc(method) for method in methods)
    assert set(vars(module.Client("https://x.example", client=object()))) >= {"thing00", "thing41"}


@pytest.mark.parametrize("name", ["shop", "gateway", "dispatch", "large"])
def test_every_model_of_a_written_client_can_be_read_and_sent(written: Path, name: str) -> None:
    module = load(written / f"{name}_client.py")
    models = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    assert models
    for model in models:
        msgspec.json.Decoder(model)


def test_same_document_gives_the_same_text() -> None:
    data = msgspec.json.encode(large())
    assert generate(data) == generate(data)
