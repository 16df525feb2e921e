"""Whatever URL a device asks for, it is refused or reaches a host of the configuration."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stormline.appgw.api import ApiGate
from stormline.appgw.port import Identity
from stormline.appgw.upstreams import Book, read_upstreams
from stormline.core.codes import Code
from stormline.core.errors import CallError, ConnectError
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.outbound.http1_codec import encode

OURS = [b"stormline-app", b"stormline-device", b"stormline-deadline-ms"]
HOST, ADDRESS = "api.example", Address("127.0.0.1", 8080)


class Sender:
    """Takes requests as far as their bytes, and notes where they would go."""

    def __init__(self):
        self.heads = []

    async def request(self, request, *, addresses, **times):
        assert addresses == (ADDRESS,)
        self.heads.append(encode(request).head)
        raise ConnectError("down", phase=Phase.CONNECT, maybe_delivered=False)


class Call:
    """A GET of some target."""

    identity = Identity("demo", "d1", "", "s")
    gate = "api"
    network = "unknown"
    deadline = body_deadline = 1e9

    def __init__(self, method, target, headers):
        self.method, self.target, self.headers = method, target, headers

    def whole_body(self):
        return b""


hosts = st.sampled_from(
    [HOST, "API.example.", "127.0.0.1", "other.example", "[::1]", "0x7f.1", "a@api.example", "api.example@x"]
)
targets = st.builds(
    lambda scheme, host, rest: f"{scheme}://{host}{rest}",
    st.sampled_from(["http", "https", "HTTP", "ftp", "", "http:"]),
    hosts,
    st.text("/?#%:@\\ \t\r\nax1[].é", max_size=12),
)
headers = st.lists(
    st.tuples(
        st.sampled_from(
            ["Host", "X-A", "stormline-user", "Stormline_User", "Connection", "x-forwarded-for", "Content-Length"]
        )
        | st.text(max_size=4),
        st.text(max_size=8),
    ),
    max_size=4,
).map(tuple)


@given(method=st.sampled_from(["GET", "POST", "G T", "CONNECT", ""]), target=targets | st.text(), headers=headers)
@example(method="GET", target="http://api.example:80\\@127.0.0.1/", headers=())
async def test_target_is_refused_or_goes_to_its_upstream_whole(method, target, headers):
    sender = Sender()
    gate = ApiGate(sender, Book(read_upstreams({HOST: f"http://{ADDRESS}"})), clock=SystemClock())
    with pytest.raises(CallError) as raised:
        await gate.handle(Call(method, target, headers))
    if not sender.heads:
        assert raised.value.code in (Code.CALL_BAD_REQUEST, Code.CALL_NOT_FOUND)
        return
    assert raised.value.code == Code.CALL_UPSTREAM
    lines = sender.heads[0].split(b"\r\n")
    assert lines[1] == b"Host: api.example"
    names = [line.partition(b":")[0].lower().replace(b"_", b"-") for line in lines[1:-2]]
    assert names.count(b"host") == 1
    assert [name for name in names if name.startswith(b"stormline")] == OURS
    assert b"x-forwarded-for" not in names
