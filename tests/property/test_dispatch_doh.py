"""DNS over HTTPS given again from memory: never anything else than what would be answered anew."""

import asyncio
import base64
from typing import Any

import dns.edns
import dns.message
import dns.rdatatype
import msgspec
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from stormline.core import limits_platform as limits
from stormline.dispatch.doh import PATH, Doh, DohConfig
from stormline.dispatch.rules import Network, Region, RuleSet
from stormline.dispatch.zone import ClientNetwork, Resolver
from stormline.net.clock import SystemClock
from stormline.testing.simloop import SimRng
from stormline.wire.plan import Endpoint, HostPlan

NEAR, FAR = (
    Endpoint(host=f"192.0.2.{n}", port=443, carrier=carrier) for n, carrier in ((1, "h2"), (2, "h3"))
)  # fmt: skip
NAMED = Endpoint(host="edge.example", port=8443, carrier="h2")
RULES = RuleSet(
    version=1,
    hosts={"a.example": HostPlan(endpoints=(NEAR, FAR)), "n.example": HostPlan(endpoints=(NAMED,))},
    apps={"shop": frozenset({"a.example", "n.example"})},
)
PLACED = msgspec.structs.replace(
    RULES, version=2, regions={"a": Region(), "b": Region()}, networks={"198.51.100.0/24": Network(region="a")}
)
CHANGED = msgspec.structs.replace(RULES, version=3, hosts={"a.example": HostPlan(endpoints=(FAR,))})


class World:
    """The rules and the standing of endpoints as they are now."""

    def __init__(self) -> None:
        self.rules = RULES
        self.revision = 0

    def __call__(self, endpoints: tuple[Endpoint, ...], /) -> tuple[Endpoint, ...]:
        """Leave out the first of several in every second revision."""
        return endpoints[1:] if len(endpoints) > 1 and self.revision % 2 else endpoints

    def order(self, endpoints: tuple[Endpoint, ...], client: ClientNetwork) -> tuple[Endpoint, ...]:
        return endpoints if client.network.startswith("198.51.100.") else endpoints[::-1]

    def doh(self) -> Doh:
        return Doh(
            DohConfig(resolver=Resolver(name="dns.example", addresses=("192.0.2.9",), port=443)),
            lambda: self.rules, clock=SystemClock(), rng=SimRng(1), standing=self, order=self.order,
        )  # fmt: skip


async def ask(doh: Doh, data: bytes, address: str, method: str) -> list[Message]:
    told: list[Message] = []
    query = b"dns=" + base64.urlsafe_b64encode(data).rstrip(b"=") if method == "GET" else b""
    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": PATH, "query_string": query, "client": (address, 5),
        "headers": [(b"content-type", b"application/dns-message")],
    }  # fmt: skip

    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        told.append(message)

    await doh(scope, receive, send)
    return told


@st.composite
def questions(draw: st.DrawFn) -> bytes:
    name = draw(
        st.sampled_from(
            ["a.example", "A.Example", "n.example", "_443._https.a.example", "x.test", "_dns.resolver.arpa"]
        )
    )
    options = []
    if subnet := draw(st.sampled_from([None, "198.51.100.0", "203.0.113.0"])):
        options.append(dns.edns.ECSOption(subnet, 24))
    message = dns.message.make_query(
        name, draw(st.sampled_from(["A", "AAAA", "HTTPS", "SVCB", "TXT"])), id=draw(st.integers(0, 0xFFFF)),
        use_edns=draw(st.sampled_from([False, 0, 1])), options=options, want_dnssec=draw(st.booleans()),
        pad=draw(st.sampled_from([0, 128, limits.DOH_MADE_QUESTION_BYTES_MAX + 64])),
    )  # fmt: skip
    data = message.to_wire()
    return data[: draw(st.sampled_from([len(data), len(data) - 1, 1]))] if draw(st.booleans()) else data


addresses = st.sampled_from(["198.51.100.7", "203.0.113.7", "2001:db8::7"])
methods = st.sampled_from(["GET", "POST"])
steps = st.lists(
    st.one_of(st.sampled_from([RULES, PLACED, CHANGED, None]), st.tuples(questions(), addresses, methods)), max_size=12
)


@given(steps, st.data())
def test_answer_from_memory_is_what_would_be_answered_anew(steps: list[Any], data: st.DataObject) -> None:
    async def main() -> None:
        world = World()
        world.rules = data.draw(st.sampled_from([RULES, PLACED]))
        ours, asked = world.doh(), []
        for step in steps:
            if isinstance(step, RuleSet):
                world.rules = step
            elif step is None:
                world.revision += 1
            else:
                asked.append(step)
            if asked:
                again = data.draw(st.sampled_from(asked))
                question, address, method = again
                other_id = (data.draw(st.binary(min_size=2, max_size=2)) + question[2:], address, method)
                elsewhere = (question, data.draw(addresses), method)
                for each in (again, other_id, elsewhere):
                    assert await ask(ours, *each) == await ask(world.doh(), *each)
        await ours.close()

    asyncio.run(main())
