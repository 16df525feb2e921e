"""What a caller would not like to read in a log never gets into one, nor into errors, reprs, stories or reports."""

import base64
import itertools

import msgspec
import pytest

import stormline
from stormline.core.codes import Code
from stormline.core.values import Secret
from stormline.testing.gateway import answering
from stormline.testing.world import BOTH, wait_until
from stormline.wire import events as e

pytestmark = pytest.mark.loopback

MARKS = {
    "user": "MARKUSER",
    "password": "MARKPASSWORD",
    "query": "MARKQUERY",
    "fragment": "MARKFRAGMENT",
    "authorization": "MARKAUTHORIZATION",
    "cookie": "MARKCOOKIE",
    "header": "MARKHEADER",
    "body": "MARKBODY",
    "token": "MARKTOKEN",
    "answer header": "MARKANSWERHEADER",
    "answer body": "MARKANSWERBODY",
    "push": "MARKPUSH",
    "parameters": "MARKPARAMETERS",
}
BASIC = base64.b64encode(f"{MARKS['user']}:{MARKS['password']}".encode()).decode()


def found(text):
    return sorted({name for name, mark in MARKS.items() if mark in text} | ({"basic"} if BASIC in text else set()))


def chain(error):
    """Everything a traceback would print of an error's own words, its causes' too."""
    while error is not None:
        yield f"{error!r} {error} {getattr(error, '__notes__', '')}"
        error = error.__cause__ or error.__context__


async def ask(client, base):
    url = base.replace("http://", f"http://{MARKS['user']}:{MARKS['password']}@")
    return await client.post(
        f"{url}?q={MARKS['query']}#{MARKS['fragment']}",
        content=MARKS["body"].encode(),
        headers={"X-Key": MARKS["header"], "Cookie": MARKS["cookie"]},
    )


def all_that_was_said(caplog):
    # httpx and httpx2 log the URL themselves, whatever lies under them; what we say is judged here.
    lines = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert lines
    return "\n".join(f"{record.getMessage()} {record.exc_text or ''}" for record in lines)


async def test_success_tells_no_secret(world, all_logs, records):
    async def handle(end, call):
        if call.gate == "rpc":
            end.reply(call, b'"' + MARKS["answer body"].encode() + b'"', status=0)
            return
        end.machine.send_push("m1", MARKS["push"].encode())
        end.reply(call, MARKS["answer body"].encode(), headers=(("x-answer", MARKS["answer header"]),))

    here = await world(answering(handle))
    seen = []
    async with here.client(report=True, token=Secret(MARKS["token"])) as client, client.channel() as channel:
        await channel.wait_connected()
        response = await ask(client, f"http://{BOTH}/path")
        await channel.call("orders.create", MARKS["parameters"])
        seen.append(await anext(aiter(channel.pushes())))
        runtime = client._storm.runtime()
        trace = response.extensions["stormline"]
        objects = [
            seen, trace, trace.record, runtime, runtime.config, runtime.scheduling, runtime.scheduling.plan,
            runtime.longline, channel, client._storm, here.gateway.ends[0].hello, here.bundle,
        ]  # fmt: skip
        said = all_that_was_said(all_logs)
    assert response.status_code == 200
    assert found(said) == []
    assert found(" ".join(map(repr, objects))) == []
    assert found(msgspec.json.encode(records).decode()) == []
    assert found(str(trace.timeline.story)) == []
    assert records[0].path == "/path"


FAILURES = ["refused", "lost", "failed", "mute", "half"]


@pytest.mark.parametrize("failure", FAILURES)
async def test_failure_tells_no_secret(world, all_logs, records, failure):
    async def script(end):
        if failure == "refused":
            await end.refuse(Code.TOKEN_INVALID, "the token is not genuine")
            return
        await end.welcome()
        call = await end.next(e.CallReceived)
        if failure == "lost":
            end.abort()
        elif failure == "failed":
            end.machine.send_fail(call.call_id, Code.CALL_UPSTREAM, "no answer", maybe_delivered=True)
        elif failure == "half":
            end.machine.send_reply(call.call_id, 200, body=MARKS["answer body"].encode(), more=True)
            end.flush()
            end.abort()
        end.flush()
        await end.stay()

    here = await world(script)
    config = {"report": True, "token": Secret(MARKS["token"]), "disabled": frozenset({"direct"})}
    async with here.client(**config, read_timeout_s=0.2, deadline_s=2) as client:
        with pytest.raises(stormline.errors.TransportError) as caught:
            await ask(client, f"http://{BOTH}/path")
        await wait_until(lambda: records)
        said = all_that_was_said(all_logs)
    assert found(said) == []
    assert found(" ".join(chain(caught.value))) == []
    assert found(msgspec.json.encode(records).decode()) == []


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Bad", "a\r\nb: MARKHEADER"),
        ("MARKHEADER\n", "x"),
        ("Content-Length", "MARKHEADER"),
        ("Host", "MARKHEADER\0"),
    ],
)
async def test_request_that_cannot_be_sent_tells_no_secret(origin, all_logs, header, value):
    there = await origin()
    async with stormline.AsyncClient() as client:
        with pytest.raises(stormline.errors.LocalProtocolError) as caught:
            await client.get(there.url("/?q=MARKQUERY"), headers={header: value})
    texts = itertools.chain(chain(caught.value), (record.getMessage() for record in all_logs.records))
    ours = " ".join(texts)
    assert "MARKQUERY" not in ours.replace(there.url("/?q=MARKQUERY"), "")


async def test_direct_failure_tells_no_secret(origin, all_logs):
    async def drop(request, writer):
        writer.close()

    there = await origin(drop)
    async with stormline.AsyncClient() as client:
        with pytest.raises(stormline.errors.ReadError) as caught:
            await ask(client, there.url("/path"))
    assert found(" ".join(chain(caught.value))) == []


def test_config_and_bundle_mask_their_tokens(pki):
    from stormline.testing.world import CLOSED_ADDRESS, bundle_for

    bundle = bundle_for(pki, CLOSED_ADDRESS, token=MARKS["token"])
    config = stormline.Config(bundle=bundle, token=Secret(MARKS["token"]))
    assert found(f"{config!r} {config} {bundle!r} {bundle}") == []
