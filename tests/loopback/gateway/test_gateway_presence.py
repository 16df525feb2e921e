"""Who is online, asked over HTTP: one device, a user's devices, lists in pages, numbers; and what businesses hear."""

import asyncio
import json

import pytest

from stormline.core import limits
from stormline.core.ids import subject_token

pytestmark = pytest.mark.loopback


async def ask(gateway, path, **query):
    answer = await gateway.admin.get(f"/v1/presence{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def arrive(gateway, mint, device, *, user="", **fields):
    connected = await gateway.open()
    await connected.hello(app="demo", token=mint(device, user=user), **fields)
    return connected


def names(answer):
    return [one["device"] for one in answer["devices"]]


class TestQueries:
    async def test_device_is_shown_with_what_it_said_of_itself_on_every_node(
        self, gateway, second, bus, mint, eventually
    ):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        device = await arrive(
            second, mint, "a/ü >", user="ann", network="cell", app_version="3.1", tags=("kiosk", "süd", "kiosk", " ")
        )

        async def known():
            return (await ask(gateway, "/devices/a%2F%C3%BC%20%3E"))["online"]

        await eventually(known)
        shown = await ask(gateway, "/devices/a%2F%C3%BC%20%3E")
        assert shown["epoch"] > 10**12
        assert shown["seen_ms"] >= shown["epoch"]
        del shown["epoch"], shown["seen_ms"]
        assert shown == {
            "app": "demo",
            "device": "a/ü >",
            "online": True,
            "user": "ann",
            "unit": "u1",
            "node": "n2",
            "session": device.welcome.session,
            "network": "cell",
            "client": "test",
            "version": "3.1",
            "tags": ["kiosk", "süd"],
        }

    async def test_device_that_left_is_offline_and_last_seen(self, gateway, bus, mint, eventually):
        await gateway.start(bus.connect)
        device = await arrive(gateway, mint, "d1", user="ann", app_version="3.1")
        assert (await ask(gateway, "/devices/d1"))["online"] is True  # at once: it is here
        await eventually(lambda: indexed(gateway, "ann"))
        await device.close()

        async def offline():
            return not (await ask(gateway, "/devices/d1"))["online"]

        await eventually(offline)
        shown = await ask(gateway, "/devices/d1")
        assert (shown["version"], shown["user"], shown["node"]) == ("3.1", "ann", "n1")
        assert shown["seen_ms"] >= shown["epoch"] > 0
        assert (await ask(gateway, "/devices/never"))["epoch"] == 0

    async def test_users_devices_are_those_where_the_user_is_now(self, gateway, second, bus, mint, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        for number, node in enumerate((gateway, second, second)):
            await arrive(node, mint, f"d{number}", user="ann")
        await arrive(second, mint, "other", user="annabel")

        async def all_known():
            found = await ask(gateway, "/users/ann")
            return sorted(names(found)) == ["d0", "d1", "d2"] and all(one["online"] for one in found["devices"])

        await eventually(all_known)
        await arrive(second, mint, "d0", user="bob")  # the device has another user, on another node

        async def moved():
            return sorted(names(await ask(gateway, "/users/ann"))) == ["d1", "d2"]

        await eventually(moved)
        assert names(await ask(gateway, "/users/bob")) == ["d0"]
        assert names(await ask(gateway, "/users/nobody")) == []

    async def test_list_comes_in_pages_over_all_nodes_and_is_filtered(self, gateway, second, bus, mint, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        await asyncio.gather(
            *(
                arrive(
                    (gateway, second)[number % 2],
                    mint,
                    f"d{number:02}",
                    app_version="2" if number < 5 else "1",
                    network="wifi" if number % 3 else "cell",
                    tags=("beta",) if number in (3, 4) else (),
                )
                for number in range(23)
            )
        )
        everybody = {f"d{number:02}" for number in range(23)}

        async def complete():
            return len(names(await ask(gateway, "", limit=100))) == 23

        await eventually(complete)
        for node in (gateway, second):
            for limit in (1, 4, 22, 23, 24):
                found, cursor = [], ""
                while True:
                    page = await ask(node, "", limit=limit, cursor=cursor)
                    assert 0 < len(page["devices"]) <= limit
                    found += names(page)
                    cursor = page["cursor"]
                    if not cursor:
                        break
                assert len(found) == 23
                assert set(found) == everybody
        assert sorted(names(await ask(gateway, "", tag="beta"))) == ["d03", "d04"]
        assert sorted(names(await ask(gateway, "", tag="beta", node="n2"))) == ["d03"]
        assert sorted(names(await ask(gateway, "", version="2", network="cell"))) == ["d00", "d03"]
        assert names(await ask(gateway, "", version="9")) == []

    async def test_counts_are_sums_over_living_nodes(self, gateway, second, bus, mint, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        for number in range(6):
            await arrive(
                (gateway, second)[number % 2],
                mint,
                f"d{number}",
                app_version=f"{number // 4}",
                network="cell" if number else "satellite",
            )

        async def six():
            return (await ask(gateway, "/counts"))["devices"] == 6

        await eventually(six)
        counts = await ask(gateway, "/counts")
        assert counts == {
            "app": "demo",
            "devices": 6,
            "units": {
                "u1": {
                    "devices": 6,
                    "nodes": 2,
                    "versions": {"0": 4, "1": 2},
                    "networks": {"cell": 5, "unknown": 1},
                }
            },
        }
        await second.stop()  # and says so: its numbers are gone before a lease is over
        await eventually(lambda: counted(gateway, 3, nodes=1))

    async def test_questions_that_cannot_be_are_refused(self, gateway, bus):
        await gateway.start(bus.connect)
        for path, query in (
            ("", {"cursor": "nonsense!"}),
            ("", {"cursor": "bm9uc2Vuc2U"}),
            ("", {"limit": 0}),
            ("", {"network": "satellite"}),
            ("/devices/" + "d" * (limits.NAME_BYTES_MAX + 1), {}),
            ("/users/" + "%C3%BC" * limits.NAME_BYTES_MAX, {}),
        ):
            answer = await gateway.admin.get(f"/v1/presence{path}", params=query)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad-request"), (path, query)
        answer = await gateway.admin.get("/v1/presence/counts", params={"app": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not-found")

    async def test_engine_away_what_is_here_is_known_and_all_is_well_afterwards(
        self, gateway, second, bus, mint, eventually
    ):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        await arrive(gateway, mint, "here")
        await arrive(second, mint, "there")
        await eventually(lambda: counted(gateway, 2, nodes=2))
        await bus.cut()

        async def away():
            return (await gateway.admin.get("/v1/presence/devices/there")).status_code == 503

        await eventually(away)
        assert (await ask(gateway, "/devices/here"))["online"] is True
        assert names(await ask(gateway, "", node="n1")) == ["here"]
        await bus.heal()

        async def back():
            answer = await gateway.admin.get("/v1/presence/devices/there")
            return answer.status_code == 200 and answer.json()["online"]

        await eventually(back)
        await eventually(lambda: counted(gateway, 2, nodes=2))


class TestEvents:
    @pytest.mark.parametrize("bus", ["nats"], indirect=True)
    async def test_business_hears_of_each_device_that_comes_moves_and_goes(
        self, gateway, second, bus, mint, service, eventually
    ):
        heard = []

        async def take(message):
            heard.append((message.subject, json.loads(message.data)))

        await service._client.subscribe("presence.u1.demo.>", cb=take)
        await service._client.flush()
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        first = await arrive(gateway, mint, "d>1", user="ann", network="wifi", app_version="7", tags=("a",))
        await eventually(lambda: len(heard) == 1)
        moved = await arrive(second, mint, "d>1", user="ann")
        await eventually(lambda: len(heard) == 2)
        await first.wait_closed()
        await moved.close()
        await eventually(lambda: len(heard) == 3)
        await arrive(second, mint, "d2")
        await eventually(lambda: len(heard) == 4)
        who = f"{subject_token('ann')}.{subject_token('d>1')}"
        assert [subject for subject, _ in heard] == [
            f"presence.u1.demo.online.{who}",
            f"presence.u1.demo.online.{who}",
            f"presence.u1.demo.offline.{who}",
            f"presence.u1.demo.online._.{subject_token('d2')}",
        ]
        came, went = heard[0][1], heard[2][1]
        assert came["epoch"] < heard[1][1]["epoch"] == went["epoch"]
        assert (went["node"], went["reason"]) == ("n2", "ended")
        del came["epoch"], came["at_ms"], came["session"]
        assert came == {
            "event": "online",
            "unit": "u1",
            "app": "demo",
            "device": "d>1",
            "user": "ann",
            "node": "n1",
            "network": "wifi",
            "version": "7",
            "tags": ["a"],
        }


async def counted(gateway, devices, *, nodes):
    counts = await ask(gateway, "/counts")
    return (counts["devices"], counts["units"]["u1"]["nodes"]) == (devices, nodes)


async def indexed(gateway, user):
    return bool(names(await ask(gateway, f"/users/{user}")))
