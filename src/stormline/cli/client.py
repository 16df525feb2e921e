"""What an app does, from the command line: `get`, `call`, `listen`; and `push`, what its backend does."""

import asyncio
import base64
import contextlib
import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from stormline.client.config import Config
    from stormline.client.trace import CallTrace

BundleOption = Annotated[
    Path | None,
    typer.Option(
        "--bundle", metavar="FILE", help="Client bundle; else STORMLINE_BUNDLE, else the running platform's.",
        show_default=False,
    ),
]  # fmt: skip
DeadlineOption = Annotated[
    float | None, typer.Option("--deadline", metavar="SECONDS", help="Time for all attempts.", show_default=False)
]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Tell the story of the request on standard error.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (get, call, listen):
        app.command(command.__name__, rich_help_panel="Client")(command)
    app.command("push", rich_help_panel="Business")(push)


def get(
    url: Annotated[str, typer.Argument(metavar="URL", help="http or https.")],
    method: Annotated[str, typer.Option("--method", "-X", help="HTTP method.")] = "GET",
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="Repeatable.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="Request body; '@FILE' reads a file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the body there.")] = None,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with 1 where the status is 400 or above.")] = False,
    verbose: VerboseFlag = False,
    deadline: DeadlineOption = None,
    bundle: BundleOption = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Request a URL by dispatch and the long connection, or directly where no platform knows it."""
    headers = [_header(text) for text in header or []]
    config = _config(bundle, state, deadline=deadline)
    content = _data(data)
    try:
        response, body, trace = asyncio.run(_get(config, method.upper(), url, headers, content))
    except errors.TransportError as error:
        if verbose and error.trace is not None:
            _tell(error.trace)
        raise
    if verbose:
        _tell(trace)
    if out is not None:
        out.expanduser().write_bytes(body)
    if json:
        output.print_json(_get_json(response, body, trace, written=out is not None))
    elif out is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(body + (b"\n" if sys.stdout.isatty() and not body.endswith(b"\n") else b""))
        sys.stdout.buffer.flush()
    if fail and response.status_code >= 400:
        raise errors.StormlineError(f"HTTP status {response.status_code}")


async def _get(
    config: "Config", method: str, url: str, headers: list[tuple[str, str]], content: bytes | None
) -> tuple[Any, bytes, "CallTrace"]:
    import httpx2

    from stormline.client.api import AsyncClient

    async with AsyncClient(config=config) as client:
        try:
            response = await client.request(method, url, headers=headers, content=content)
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise errors.ConfigError(f"URL {url!r}: {error}") from error
        return response, response.content, response.extensions["stormline"]


def _get_json(response: Any, body: bytes, trace: "CallTrace", *, written: bool) -> dict[str, Any]:
    import msgspec

    shown: dict[str, Any] = {
        "status": response.status_code,
        "http_version": response.http_version,
        "headers": [[name, value] for name, value in response.headers.multi_items()],
        "size_bytes": len(body),
        "timeline": msgspec.to_builtins(trace.record),
        "story": [{"at_ms": round(at * 1000, 3), "line": line} for at, line in trace.timeline.story],
    }
    if not written:
        try:
            shown["body"] = body.decode()
        except UnicodeDecodeError:
            shown["body_base64"] = base64.b64encode(body).decode("ascii")
    return shown


def call(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="RPC method, such as orders.create.")],
    params: Annotated[str, typer.Argument(metavar="JSON", help="Its parameters.")] = "null",
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Idempotency key: the call may be repeated.")] = "",
    verbose: VerboseFlag = False,
    deadline: DeadlineOption = None,
    bundle: BundleOption = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Call a business service over the long connection and print its answer."""
    answer = asyncio.run(_call(_config(bundle, state, deadline=deadline), method, _json(params), key))
    if json:
        output.print_json({"method": method, "result": answer})
    else:
        print(json_text.dumps(answer, indent=2, ensure_ascii=False))
    del verbose


async def _call(config: "Config", method: str, params: Any, key: str) -> Any:
    from stormline.client.api import AsyncClient

    async with AsyncClient(config=config) as client, client.channel() as channel:
        return await channel.call(method, params, idempotency_key=key)


def listen(
    device: Annotated[
        str, typer.Option("--device", metavar="ID", help="Be this device (needs the platform's admin key).")
    ] = "",
    user: Annotated[str, typer.Option("--user", metavar="ID", help="User logged in on the device.")] = "",
    count: Annotated[int, typer.Option("--count", metavar="N", help="End after so many pushes; 0 never.")] = 0,
    bundle: BundleOption = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Keep the long connection and print every push, acknowledged, until Ctrl-C."""
    config = _config(bundle, state, device=device, user=user)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_listen(config, count, json=json))


async def _listen(config: "Config", count: int, *, json: bool) -> None:
    from stormline.client.api import AsyncClient

    async with AsyncClient(config=config) as client, client.channel() as channel:
        session = await channel.wait_connected()
        if json:
            output.print_json({"event": "connected", "device": session.device, "session": session.session})
        else:
            print(f"listening as device {session.device}, Ctrl-C ends", flush=True)
        left = count
        async for push_ in channel.pushes():
            push_.ack()
            body = _shown(push_.body)
            if json:
                output.print_json({"event": "push", "id": push_.id, "topic": push_.topic, "body": body})
            else:
                print(json_text.dumps(body, ensure_ascii=False), flush=True)
            left -= 1
            if left == 0:
                return


def push(
    body: Annotated[str, typer.Argument(metavar="JSON", help="What to push.")],
    device: Annotated[str, typer.Option("--device", metavar="ID", help="Device to push to.")],
    topic: Annotated[str, typer.Option("--topic", metavar="NAME", help="What it belongs to.")] = "",
    push_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="Id of the message: pushed twice, it is shown once.")
    ] = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Push to a device of the running platform and say whether the device acknowledged it."""
    from stormline.cli import admin

    platform = admin.running(admin.place(output.environ(), state))
    request: dict[str, Any] = {"app": platform.app, "device": device, "topic": topic, "body": _json(body)}
    if push_id:
        request["id"] = push_id
    with admin.AdminApi(platform, "admin", platform.business_key) as api:
        result = api.call("POST", "/v1/push", body=request)
    if json:
        output.print_json(result)
        return
    print(f"{result['state']} (push {result['id']})")
    if result["state"] != "acked":
        raise errors.StormlineError(result.get("detail") or f"device {device} did not acknowledge the push")


# -- shared ----------------------------------------------------------------------------------------------------------


def _config(
    bundle: Path | None,
    state: Path | None,
    *,
    deadline: float | None = None,
    device: str = "",
    user: str = "",
) -> "Config":
    """Find the platform and make the client's config: bundle, token and where to keep things."""
    from stormline.client.config import Config
    from stormline.core import limits
    from stormline.core.values import Secret
    from stormline.settings import discovery, load

    environ = output.environ()
    discovered = discovery.find_bundle(environ, state=state) if bundle is None else None
    found = discovery.read_bundle(bundle.expanduser()) if bundle is not None else None
    if discovered is not None:
        found = discovered.bundle
    token = None
    if device:
        from stormline.cli import admin
        from stormline.cli.bundle import mint

        token = Secret(mint(admin.running(admin.place(environ, state)), device, user)["token"])
    elif user:
        raise errors.ConfigError("--user needs --device: a token is for a device")
    store = load.state_folder(environ, state) / "client" if found is not None else None
    return Config(
        bundle=found,
        token=token,
        store=store,
        deadline_s=deadline if deadline is not None else limits.CALL_DEADLINE_S,
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise errors.ConfigError(f"header {text!r}: expected 'NAME: VALUE'")
    return name.strip(), value.strip()


def _data(text: str | None) -> bytes | None:
    if text is None:
        return None
    return Path(text[1:]).expanduser().read_bytes() if text.startswith("@") else text.encode()


def _json(text: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError as error:
        raise errors.ConfigError(f"{text[:80]!r} is not JSON: {error}") from error


def _shown(body: bytes) -> Any:
    try:
        return json_text.loads(body)
    except ValueError:
        return {"base64": base64.b64encode(body).decode("ascii")}


def _tell(trace: "CallTrace") -> None:
    record = trace.record
    for at, line in trace.timeline.story:
        print(f"{at * 1000:8.1f} ms  {line}", file=sys.stderr)
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in record.stages_ms.items())
    print(f"{record.total_ms:8.1f} ms  in all: {stages} (ms)", file=sys.stderr)
