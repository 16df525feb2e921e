"""Scheduling centres that are dead, lied about or hijacked, on real networks: what the client does, and why it works.

Two real centres, a gateway and an engine run beside the origin; the client is a program of its own on the device. What
it did is read from its log (whom it asked, who answered) and from its calls' stories; that others saw nothing, from
their counters.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormline.client.store import Store
from stormline.core import limits_network
from stormline.dispatch import rules as dispatch_rules
from stormline.lab import faults, platform, specs, workload
from stormline.lab.hijack import Lie
from stormline.lab.platform import APP, BOX, CENTRE_NAME, CENTRES, ENGINE, LIES, PLAIN_PORT, PORT, Platform
from stormline.lab.profiles_model import Profile, ServerSpec, link
from stormline.lab.specs import DnsSpec
from stormline.lab.stage import Stage
from stormline.net.clock import SystemClock
from stormline.wire import plan
from stormline.wire.bundle import Bundle, Centre, encode
from stormline.wire.plan import Carrier, Endpoint, Plan

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

PROFILE = Profile(name="test", about="A test.", wifi=link(rtt_ms=40), server=ServerSpec(v4=2))
ONE, TWO = CENTRES
TRIES = 3
"""How often it is shown what a machine that stands still for a second would hide."""
LATE_S = 6.0
"""Longest that an order may take whose steps take one to three seconds on a machine that does nothing else."""
MORNING_S = 6 * 3600
MONTH_S = 30 * 86_400


class Device:
    """The device of a stage, with a program that has one client at a time."""

    def __init__(self, stage: Stage) -> None:
        words = [sys.executable, "-m", "stormline.lab.dispatch_client", stage.base_url, str(stage.ca_file)]
        self.process = stage.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def do(self, order: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": order, **more}).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def get(self, number: int = 1) -> dict[str, Any]:
        return self.do("get", number=number)

    def close(self) -> None:
        """Let the app end."""
        if self.process.poll() is None:
            self.do("close")


class Scene:
    """A stage with a platform on it."""

    def __init__(self, stage: Stage, there: Platform, device: Device) -> None:
        self.stage = stage
        self.platform = there
        self.device = device

    @contextlib.contextmanager
    def suffering(self, *happening: faults.Fault) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for fault in happening:
                fault.apply(self.stage)
                stack.callback(fault.undo, self.stage)
            yield

    @property
    def resolver(self) -> str:
        return self.stage.dns_servers[0]

    def counts(self) -> tuple[int, int]:
        """Give how many requests the attacker saw, and how many questions plain DNS."""
        report = self.stage.origin.report()
        return report.captive_requests, report.dns_questions


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[Scene]:
    with (
        Stage(PROFILE, 1, folder=folder / "keys", names=platform.NAMES) as stage,
        Platform(stage, folder / "platform") as there,
    ):
        device = Device(stage)
        with device.process:
            yield Scene(stage, there, device)
            device.process.kill()


@pytest.fixture(name="scene", scope="module")
def _scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One platform for all tests that leave it as it was."""
    with playing(tmp_path_factory.mktemp("scene")) as scene:
        scene.platform.start(BOX)
        yield scene


Start = Callable[..., Device]


@pytest.fixture(name="client")
def _client(tmp_path: Path) -> Iterator[Start]:
    """Give what starts a client on a scene's device, as an app starts."""
    with contextlib.ExitStack() as stack:

        def start(scene: Scene, bundle: Bundle | None = None, *, doh: bool = False, store: str = "") -> Device:
            path = tmp_path / "bundle.json"
            path.write_bytes(encode(bundle or scene.platform.bundle()))
            servers = [[scene.stage.doh_url, list(scene.stage.dns_servers)]] if doh else []
            scene.device.do("open", bundle=str(path), store=str(tmp_path / store) if store else "", doh=servers)
            stack.callback(scene.device.close)
            return scene.device

        yield start


def asked(told: dict[str, Any]) -> list[str]:
    """Give whom it asked, in order."""
    return [line.removeprefix("dispatch: asking ") for line in told["log"] if line.startswith("dispatch: asking ")]


def answered(told: dict[str, Any]) -> list[str]:
    """Give who answered it well."""
    return [line[10 : -len(" has answered")] for line in told["log"] if line.endswith(" has answered")]


def failed(told: dict[str, Any], way: str) -> str:
    """Give why a way failed, empty where it did not."""
    start = f"dispatch: {way}: "
    return next((line.removeprefix(start) for line in told["log"] if line.startswith(start)), "")


def story(told: dict[str, Any]) -> str:
    return "\n".join(told["story"])


def way(host: str, port: int = PORT, how: str = "") -> str:
    return f"{host}:{port}{how}"


CLEAR = " in clear HTTP"
LYING = faults.DnsUnwell(dns=DnsSpec(lie_pct=100))
ALL_DEAD = faults.Unreachable(hosts=CENTRES)


# -- poisoned names ---------------------------------------------------------------------------------------------------
def test_poisoned_names_of_centre_and_origin_are_not_even_asked_for(scene: Scene, client: Start) -> None:
    """The bundle has addresses of centres, the signed plan those of the origin: DNS has no part in it."""
    before = scene.counts()
    with scene.suffering(LYING):
        told = client(scene).get()
    assert told["right"], told
    assert set(answered(told)) <= {way(ONE), way(TWO)}
    assert f"plan version {told['version']}: 2 endpoints" in story(told)
    assert scene.counts() == before


def test_poisoned_names_alone_lead_to_no_answer_and_tell_the_attacker_nothing(scene: Scene, client: Start) -> None:
    """Who knows a centre by name alone, and has no other resolver, gets an error and not a lie."""
    before = scene.counts()
    with scene.suffering(LYING):
        told = client(scene, scene.platform.bundle(Centre(host=CENTRE_NAME, port=PORT))).get()
    assert not told["right"]
    assert told["version"] is None
    assert "certificate" in failed(told, way(CENTRE_NAME, how=" by DNS"))
    attacker, questions = scene.counts()
    assert attacker == before[0]
    assert questions > before[1]


# -- hijacked clear HTTP ----------------------------------------------------------------------------------------------
REASONS = {
    Lie.PAGE: "malformed signed text",
    Lie.FORGED: "wrong signature",
    Lie.ALTERED: "wrong signature",
    Lie.TRUNCATED: "(signature)",
    Lie.OLDER: "stale-version",
    Lie.OTHER_APP: "wrong-app",
}


def clear_centres(scene: Scene) -> Bundle:
    return scene.platform.bundle(*(Centre(host=host, port=PORT, plain_port=PLAIN_PORT) for host in CENTRES))


def hijack(lie: Lie, *hosts: str) -> tuple[faults.Fault, ...]:
    """Close the centres' port of TLS, and lead the clear one of these hosts to the box."""
    shut = faults.Unreachable(hosts=CENTRES, port=PORT, refused=True)
    return shut, faults.Diverted(hosts=hosts, port=PLAIN_PORT, to=f"{BOX}:{LIES[lie]}")


@pytest.mark.parametrize("lie", list(Lie))
def test_hijacked_clear_answer_is_refused_and_the_other_centre_asked(scene: Scene, client: Start, lie: Lie) -> None:
    here = client(scene, clear_centres(scene))
    before = scene.counts()
    version = scene.platform.publish()
    if lie is Lie.OLDER:
        assert here.do("refresh")["version"] == version
    with scene.suffering(*hijack(lie, ONE)):
        told = here.do("refresh")
        then = here.get()
    assert REASONS[lie] in failed(told, way(ONE, PLAIN_PORT, CLEAR))
    assert answered(told) == [way(TWO, PLAIN_PORT, CLEAR)]
    assert told["version"] == version
    assert told["took_s"] < LATE_S
    assert then["right"], then
    assert f"plan version {version}: 2 endpoints" in story(then)
    assert scene.counts() == before


@pytest.mark.parametrize("lie", [Lie.FORGED, Lie.OLDER])
def test_where_every_answer_is_hijacked_the_stored_plan_serves(scene: Scene, client: Start, lie: Lie) -> None:
    version = scene.platform.publish()
    earlier = client(scene, clear_centres(scene), store="kept")
    assert earlier.get()["version"] == version
    earlier.close()
    with scene.suffering(*hijack(lie, ONE, TWO)):
        here = client(scene, clear_centres(scene), store="kept")
        told = here.do("refresh")
        then = here.get()
    assert REASONS[lie] in told["error"]
    assert answered(told) == []
    assert then["right"], then
    assert f"plan version {version}: 2 endpoints" in story(then)


def test_where_every_answer_is_hijacked_and_nothing_stored_the_origin_is_found_by_dns(
    scene: Scene, client: Start
) -> None:
    attacker, _ = scene.counts()
    with scene.suffering(*hijack(Lie.FORGED, ONE, TWO)):
        told = client(scene, clear_centres(scene)).get()
    assert told["right"], told
    assert told["version"] is None
    assert "wrong signature" in story(told)
    assert f"{specs.SHOP}: 2 addresses from the system" in story(told)
    assert scene.counts()[0] == attacker


# -- one dead centre --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def ill(scene: Scene, how: str) -> Iterator[None]:
    """Let the first centre be blackholed, refuse, or take connections and say nothing."""
    if how == "hung":
        with scene.platform.hung(ONE):
            yield
    else:
        with scene.suffering(faults.Unreachable(hosts=(ONE,), refused=how == "refused")):
            yield


@pytest.mark.parametrize("how", ["blackholed", "hung", "refused"])
def test_dead_centre_costs_a_head_start_and_is_not_the_first_asked_again(scene: Scene, client: Start, how: str) -> None:
    for _ in range(TRIES):
        here = client(scene)
        with ill(scene, how):
            first, later = here.get(), here.do("refresh")
        assert first["right"], first
        assert (asked(first), answered(first)) == ([way(ONE), way(TWO)], [way(TWO)])
        assert first["took_s"] < LATE_S
        assert (asked(later)[0], answered(later)) == (way(TWO), [way(TWO)])
        # One that says nothing was not waited for: its time was not over when the other had answered.
        if bool(failed(first, way(ONE))) == (how == "refused"):
            return
    pytest.fail("it was waited for")


def test_healed_centre_is_asked_beside_and_then_first_again(scene: Scene, client: Start) -> None:
    here = client(scene)
    with ill(scene, "blackholed"):
        assert answered(here.get()) == [way(TWO)]
    for _ in range(200):
        told = here.do("refresh")
        told["log"] += here.do("pause", pause_s=0.2)["log"]
        if way(ONE) in answered(told):
            break
    else:
        pytest.fail("it was not asked again")
    assert asked(here.do("refresh"))[0] == way(ONE)


# -- all centres dead -------------------------------------------------------------------------------------------------
def test_start_with_a_stored_plan_asks_nobody(scene: Scene, client: Start) -> None:
    earlier = client(scene, store="kept")
    assert earlier.get()["right"]
    earlier.close()
    _, questions = scene.counts()
    with scene.suffering(ALL_DEAD):
        told = client(scene, store="kept").get()
    assert told["right"], told
    assert asked(told) == []
    assert (told["stale"], told["took_s"] < LATE_S) == (False, True)
    assert scene.counts()[1] == questions


def test_start_with_a_plan_of_last_month_serves_it_as_stale(scene: Scene, client: Start, tmp_path: Path) -> None:
    keep_old_plan(scene, tmp_path / "kept", MONTH_S)
    with scene.suffering(ALL_DEAD):
        here = client(scene, store="kept")
        told, then = here.get(), here.get(2)
    for each in (told, then):
        assert each["right"], each
        assert "plan version 1, stale: 2 endpoints" in story(each)
        assert each["stale"] is True
        assert each["took_s"] < LATE_S
    assert asked(told)[:2] == [way(ONE), way(TWO)]


def test_start_with_a_plan_of_this_morning_serves_it_before_a_second_centre_is_asked(
    scene: Scene, client: Start, tmp_path: Path
) -> None:
    keep_old_plan(scene, tmp_path / "kept", MORNING_S)
    with scene.suffering(ALL_DEAD):
        here = client(scene, store="kept")
        told, then = here.get(), here.do("pause", pause_s=limits_network.ASK_STAGGER_S + 0.5)
    assert told["right"], told
    assert "plan version 1, stale: 2 endpoints" in story(told)
    assert asked(told) in ([], [way(ONE)])
    assert asked(told) + asked(then) == [way(ONE), way(TWO)]


def keep_old_plan(scene: Scene, folder: Path, age_s: int) -> None:
    """Put into a store what a centre said then."""
    said_at = int(SystemClock().wall()) - age_s
    rules = scene.platform.rules()
    old = Plan(app=APP, version=1, issued_at=said_at, expires_at=said_at + 3600, hosts=rules.hosts)
    store = Store(folder, APP)
    store.open()
    store.save_plan(plan.sign(old, key=scene.platform.plan_key.key, kid=scene.platform.plan_key.kid))
    store.close()


def test_without_a_stored_plan_the_origin_is_found_by_dns(scene: Scene, client: Start) -> None:
    with scene.suffering(ALL_DEAD):
        told = client(scene).get()
    assert told["right"], told
    assert told["version"] is None
    assert asked(told)[:2] == [way(ONE), way(TWO)]
    assert failed(told, way(ONE))
    assert f"{specs.SHOP}: 2 addresses from the system" in story(told)
    assert told["took_s"] < 2 * LATE_S


# -- a centre's name --------------------------------------------------------------------------------------------------
def test_centre_is_found_by_doh_where_that_is_the_only_way(scene: Scene, client: Start) -> None:
    """The address of the bundle is dead and DNS lies."""
    attacker, _ = scene.counts()
    bundle = scene.platform.bundle(Centre(host=ONE, port=PORT), Centre(host=CENTRE_NAME, port=PORT))
    with scene.suffering(LYING, faults.Unreachable(hosts=(ONE,), refused=True)):
        told = client(scene, bundle, doh=True).get()
    assert told["right"], told
    assert answered(told) == [way(CENTRE_NAME, how=" by DNS over HTTPS")]
    assert f"plan version {told['version']}: 2 endpoints" in story(told)
    assert scene.counts()[0] == attacker


def test_centre_is_found_by_the_system_where_that_is_the_only_way(scene: Scene, client: Start) -> None:
    """The address of the bundle is dead and so is the server for DNS over HTTPS."""
    bundle = scene.platform.bundle(Centre(host=ONE, port=PORT), Centre(host=CENTRE_NAME, port=PORT))
    with scene.suffering(
        faults.Unreachable(hosts=(ONE,), refused=True),
        faults.Unreachable(hosts=(scene.resolver,), port=443, refused=True),
    ):
        told = client(scene, bundle, doh=True).get()
    assert told["right"], told
    assert answered(told) == [way(CENTRE_NAME, how=" by DNS")]
    assert failed(told, way(CENTRE_NAME, how=" by DNS over HTTPS"))
    assert f"plan version {told['version']}: 2 endpoints" in story(told)


# -- a changed plan ---------------------------------------------------------------------------------------------------
def test_changed_plan_comes_through_the_long_connection_where_no_centre_can_be_reached(
    scene: Scene, client: Start
) -> None:
    """And it counts: an address that it takes out of service is used no more."""
    first, second = scene.stage.addresses
    here = client(scene)
    assert here.get()["right"]
    before = here.do("connected")["version"]
    with rules_changed(scene), scene.suffering(ALL_DEAD):
        version = scene.platform.publish(endpoints=at(second))
        told, then = here.do("version", version=version), here.get(2)
        again = scene.platform.publish(endpoints=at(first))
        here.do("version", version=again)
        last = here.get(3)
    assert before < version == told["version"]
    assert "the long connection" in answered(told) + answered(then)
    assert [each["right"] for each in (then, last)] == [True, True]
    assert f"plan version {version}: 1 endpoints" in story(then)
    assert f"connected h2 {second}:443" in story(then)
    assert f"connected h2 {first}:443" in story(last)


@contextlib.contextmanager
def rules_changed(scene: Scene) -> Iterator[None]:
    """Give the others their rules back in the end."""
    try:
        yield
    finally:
        scene.platform.publish()


def at(*addresses: str) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(host=each, port=443, carrier=Carrier.H2) for each in addresses)


# -- standard clients -------------------------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_that_asks_a_centre_for_names_is_not_led_astray_by_poisoned_ones(scene: Scene, tmp_path: Path) -> None:
    """And follows the rules: it goes where the plans lead."""
    attacker, _ = scene.counts()
    with rules_changed(scene), scene.suffering(LYING):
        assert curl(scene, tmp_path)[0] != "200"
        assert curl(scene, tmp_path, "--doh-url", f"https://{ONE}/dns-query")[0] == "200"
        for address in scene.stage.addresses:
            scene.platform.publish(endpoints=at(address))
            answer = curl(scene, tmp_path, "--doh-url", f"https://{TWO}/dns-query")
            assert answer == ("200", address, workload.body(7, 1000))
    assert scene.counts()[0] == attacker


def curl(scene: Scene, folder: Path, *more: str) -> tuple[str, str, bytes]:
    """Ask the origin; give status, its address and the body."""
    trust, body = folder / "trust.pem", folder / "body"
    trust.write_text(scene.stage.ca_file.read_text() + scene.platform.pki.ca_pem)
    words = ["curl", "-4", "-s", "-m", "10", "--cacert", str(trust), "-o", str(body), "-w", "%{http_code} %{remote_ip}"]
    process = scene.stage.popen([*words, *more, f"{scene.stage.base_url}/item/7/1000"], stdout=subprocess.PIPE)
    said, _ = process.communicate()
    status, _, address = said.decode().partition(" ")
    return status, address, body.read_bytes() if body.exists() else b""


# -- writers ----------------------------------------------------------------------------------------------------------
def test_delayed_writer_does_not_overwrite_what_was_published_meanwhile(scene: Scene, client: Start) -> None:
    """A centre hangs with a change in its hands, and wakes after the other has published a newer one."""
    there = scene.platform
    version = there.publish()
    late, newer = (dispatch_rules.encode(there.rules(deadline_s=seconds)) for seconds in (71.0, 72.0))
    with contextlib.closing(there.connect(TWO)) as connection:
        with there.hung(TWO):
            connection.request("PUT", there.rules_path(), late, there.admin_headers(match=f'"{version}"'))
            status, _ = there.admin(ONE, "PUT", there.rules_path(), newer, match=f'"{version}"')
            assert status == 200
        refused, answer = platform.read_json(connection)
    assert (refused, answer["error"]["code"]) == (412, "changed")
    for host in CENTRES:
        there.wait_health(host, version=version + 1)
    told = client(scene).do("refresh")
    assert told["version"] == version + 1
    _, rules = there.admin(TWO, "GET", "/v1/admin/rules")
    assert rules["hosts"][specs.SHOP]["deadline_s"] == 72.0


# -- a dead engine ----------------------------------------------------------------------------------------------------
def test_centres_without_their_engine_serve_what_they_have_and_clients_never_go_back(
    tmp_path: Path, client: Start
) -> None:
    """The engine is killed while one centre is down that has missed the newest rules, and comes back without it."""
    with playing(tmp_path / "scene") as scene:
        there, here = scene.platform, scene.device
        older = there.publish()
        there.kill(ONE)
        newer = there.publish()
        client(scene, store="kept").get()
        assert here.do("connected")["version"] == newer
        there.kill(ENGINE)
        there.wait_health(TWO, status="ok", version=newer, stale=True)
        status, answer = there.admin(TWO, "PUT", there.rules_path(), dispatch_rules.encode(there.rules()), match="*")
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        through_gateway(here)
        there.start(ONE)
        assert there.health(ONE).items() >= {"status": "ok", "version": older, "stale": True}.items()
        # Who has seen the newer ones passes the centre that is behind ...
        client(scene, store="kept")
        told = here.do("refresh")
        assert "stale-version" in failed(told, way(ONE))
        assert (told["version"], answered(told)) == (newer, [way(TWO)])
        # ... also where there is no other: the plan kept serves.
        there.kill(TWO)
        client(scene, store="kept")
        assert "stale-version" in here.do("refresh")["error"]
        served(here, newer)
        # Who has seen nothing takes what there is.
        client(scene)
        served(here, older)
        there.start(ENGINE)
        there.wait_health(ONE, version=newer, stale=False)
        assert there.publish() == newer + 1


def through_gateway(here: Device) -> None:
    """Ask with a long connection: the gateway cannot pass it on, a centre answers itself."""
    told = here.do("refresh")
    assert asked(told)[0] == "the long connection"
    assert failed(told, "the long connection")
    assert answered(told) == [way(TWO)]


def served(here: Device, version: int) -> None:
    told = here.get()
    assert told["right"], told
    assert f"plan version {version}: 2 endpoints" in story(told)
