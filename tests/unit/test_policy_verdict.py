"""The verdicts on a network, each from the evidence that tells it; and when probes are asked for, and when not."""

import itertools
from dataclasses import replace

import pytest

from stormline.core import limits_network as limits
from stormline.core.values import Address
from stormline.policy.diagnosis import Cause
from stormline.policy.hints import HINTS, hint
from stormline.policy.network import KINDS, NetworkInfo
from stormline.policy.verdict import Condition, Confidence, Finding, Met, Probe, ProbeKind, VerdictMachine

HIGH, LOW = Confidence.HIGH, Confidence.LOW
WIFI = NetworkInfo(kind="wifi", interface="wlan0", index=3, gateway="192.168.1.1", routed=True, id="w", signal_dbm=-60)
NAME_SERVER = Address("9.9.9.9", 53)
SHOP = Address("203.0.113.10", 443)
OTHER = Address("203.0.113.20", 443)
GONE = dict.fromkeys(ProbeKind, Finding.SILENT)


class Story:
    """A machine, its clock, and what its probes would find."""

    def __init__(
        self, info: NetworkInfo = WIFI, *, captive: bool = True, name_server: Address = NAME_SERVER, known: int = 2
    ) -> None:
        self.now = 1000.0
        self.machine = VerdictMachine(captive=captive, name_servers=[name_server])
        self.machine.changed(info, self.now)
        for host, address in (("shop", SHOP), ("other", OTHER))[:known]:
            self.machine.answered(host, self.now, took_s=0.1, server=address, tls=True)
        self.asked: list[Probe] = []

    def fail(self, *met: Met, host: str = "shop") -> None:
        for each in met:
            self.now += 0.5
            self.machine.observe(host, each, self.now)

    def probe(self, found: dict[ProbeKind | str, Finding]) -> list[Probe]:
        """Run one round: a finding by kind, or by host for a server's; what is missing is silent."""
        self.asked = self.machine.wanted(self.now)
        if not self.asked:
            return []
        pairs = [(each, found.get(each.host) or found.get(each.kind) or Finding.SILENT) for each in self.asked]
        self.now += 4.0
        self.machine.take(pairs, self.now)
        return self.asked

    def last(self, met: Met, found: dict[ProbeKind | str, Finding], *, seconds: float = 30.0) -> None:
        """Fail and probe for a while."""
        until = self.now + seconds
        while self.now < until:
            self.fail(met)
            self.probe(found)

    def says(self) -> tuple[Condition, Confidence]:
        verdict = self.machine.judge(self.now)
        assert verdict.hint == hint(verdict.condition, self.machine.info.kind)
        return verdict.condition, verdict.confidence


# -- without probes ---------------------------------------------------------------------------------------------------
def test_answers_make_a_network_ok_and_slow_ones_slow() -> None:
    story = Story()
    assert story.says() == (Condition.OK, HIGH)
    for _ in range(limits.VERDICT_TIMES):
        story.machine.answered("shop", story.now, took_s=1.5)
    assert story.says() == (Condition.SLOW, HIGH)
    story.now += limits.VERDICT_MEMORY_S + 1
    assert story.says() == (Condition.OK, LOW)


def test_no_route_is_no_network_or_flight_mode() -> None:
    story = Story()
    story.now += limits.VERDICT_SURE_S
    story.machine.changed(NetworkInfo(routed=False), story.now)
    assert story.says() == (Condition.NO_NETWORK, HIGH)
    story.machine.changed(NetworkInfo(routed=False, airplane=True), story.now)
    assert story.says() == (Condition.AIRPLANE, HIGH)
    story.machine.changed(NetworkInfo(routed=False, denied=True), story.now)
    assert story.says() == (Condition.PERMISSION, HIGH)


def test_flight_mode_with_wifi_is_no_flight_mode() -> None:
    story = Story(replace(WIFI, airplane=True))
    assert story.says() == (Condition.OK, HIGH)


def test_sockets_that_are_refused_are_a_matter_of_permission() -> None:
    story = Story()
    story.fail(Met.DENIED, Met.DENIED)
    assert story.says() == (Condition.PERMISSION, HIGH)
    assert story.machine.wanted(story.now) == []
    story.fail(Met.SILENT)
    assert story.says()[0] is not Condition.PERMISSION


def test_unreachable_where_nobody_can_look_is_no_network_and_not_sure() -> None:
    story = Story(NetworkInfo(), captive=False, known=0)
    story.fail(Met.UNREACHABLE, Met.UNREACHABLE)
    assert story.says() == (Condition.NO_NETWORK, LOW)


def test_one_host_that_fails_beside_one_that_answers_is_its_own_fault() -> None:
    story = Story()
    story.fail(Met.SILENT, Met.SILENT, Met.SILENT)
    story.now += 1
    story.machine.answered("other", story.now)
    story.fail(Met.SILENT, Met.SILENT)
    assert story.says() == (Condition.SERVER_FAULT, LOW)  # what was under way in a tunnel fails late
    story.now += limits.VERDICT_SETTLE_S
    story.fail(Met.SILENT, Met.SILENT, Met.SILENT)
    assert story.says() == (Condition.SERVER_FAULT, HIGH)
    assert story.machine.judge(story.now).host == "shop"
    story.machine.answered("shop", story.now)
    assert story.says() == (Condition.OK, HIGH)


# -- probes -----------------------------------------------------------------------------------------------------------
def test_nothing_is_probed_while_all_is_well_or_after_one_failure() -> None:
    story = Story()
    assert story.machine.wanted(story.now) == []
    story.fail(Met.SILENT)
    assert story.machine.wanted(story.now) == []
    assert story.machine.next_round_at(story.now) is None
    story.fail(Met.SILENT)
    kinds = [each.kind for each in story.machine.wanted(story.now)]
    assert kinds == [ProbeKind.GATEWAY, ProbeKind.SERVER, ProbeKind.SERVER, ProbeKind.DNS, ProbeKind.CAPTIVE]
    assert story.machine.wanted(story.now) == []


def test_rounds_are_rare_become_rarer_and_end_when_nobody_asks_any_more() -> None:
    story = Story()
    story.fail(Met.SILENT, Met.SILENT)
    rounds = []
    for _ in range(3600):
        story.now += 1
        if story.machine.wanted(story.now):
            rounds.append(story.now)
    pauses = [after - before for before, after in itertools.pairwise(rounds)]
    assert len(rounds) == limits.PROBE_ROUNDS_QUIET_MAX
    assert pauses == [10.0, 20.0]
    assert story.machine.next_round_at(story.now) is None
    story.fail(Met.SILENT)
    assert story.machine.next_round_at(story.now) is not None


def test_servers_that_do_not_fail_are_asked_first_and_few() -> None:
    story = Story()
    for number in range(10):
        story.machine.answered(f"h{number}", story.now, server=Address(f"198.51.100.{number}", 443), tls=True)
    story.fail(Met.SILENT, Met.SILENT, host="h9")
    hosts = [each.host for each in story.machine.wanted(story.now) if each.kind is ProbeKind.SERVER]
    assert len(hosts) == limits.PROBE_TARGETS_MAX
    assert "h9" not in hosts


def test_findings_that_come_after_an_answer_say_nothing() -> None:
    story = Story()
    story.fail(Met.SILENT, Met.SILENT)
    wanted = story.machine.wanted(story.now)
    story.machine.answered("shop", story.now)
    story.machine.take([(each, Finding.SILENT) for each in wanted], story.now)
    assert story.says() == (Condition.OK, HIGH)


# -- what they find ---------------------------------------------------------------------------------------------------
def test_page_instead_of_the_check_is_a_captive_portal() -> None:
    story = Story()
    story.fail(Met.BAD_CERTIFICATE, Met.BAD_CERTIFICATE)
    story.probe({ProbeKind.CAPTIVE: Finding.FOREIGN})
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)


def test_status_511_is_a_captive_portal() -> None:
    story = Story(known=0)
    story.fail(Met.FOREIGN)
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)


def test_strangers_at_addresses_of_two_hosts_are_a_captive_portal() -> None:
    story = Story(captive=False)
    story.fail(Met.BAD_CERTIFICATE, Met.BAD_CERTIFICATE)
    assert story.says() == (Condition.CAPTIVE_PORTAL, LOW)
    story.probe({ProbeKind.SERVER: Finding.FOREIGN, ProbeKind.DNS: Finding.ANSWERED})
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)


def test_host_that_is_genuine_at_its_old_address_has_a_false_name() -> None:
    story = Story()
    story.fail(Met.BAD_CERTIFICATE, Met.BAD_CERTIFICATE)
    story.probe({ProbeKind.SERVER: Finding.ANSWERED, ProbeKind.CAPTIVE: Finding.ANSWERED})
    assert story.says() == (Condition.DNS_ONLY_BROKEN, HIGH)


def test_stranger_without_a_portal_is_a_false_name_and_not_sure() -> None:
    story = Story(known=0)
    story.fail(Met.BAD_CERTIFICATE, Met.BAD_CERTIFICATE)
    story.probe({ProbeKind.CAPTIVE: Finding.ANSWERED})
    assert story.says() == (Condition.DNS_ONLY_BROKEN, LOW)
    story.machine.names_lie("shop")
    assert story.says() == (Condition.DNS_ONLY_BROKEN, HIGH)


@pytest.mark.parametrize("met", [Met.DNS_SILENT, Met.DNS_FAILED, Met.DNS_ABSENT])
def test_names_that_fail_while_servers_answer_are_dns_only(met: Met) -> None:
    story = Story()
    story.fail(met, met)
    assert story.says()[1] is LOW
    story.probe({ProbeKind.SERVER: Finding.ANSWERED})
    assert story.says() == (Condition.DNS_ONLY_BROKEN, LOW)  # once may be chance
    story.last(met, {ProbeKind.SERVER: Finding.ANSWERED})
    assert story.says() == (Condition.DNS_ONLY_BROKEN, HIGH)
    story = Story()
    story.fail(met, met)
    story.probe({ProbeKind.SERVER: Finding.ANSWERED, ProbeKind.DNS: Finding.ANSWERED})
    assert story.says() == (Condition.DNS_ONLY_BROKEN, LOW)


def test_router_that_does_not_answer_on_its_link_is_at_fault() -> None:
    for info, confidence in (
        (WIFI, HIGH),
        (replace(WIFI, kind="wired", signal_dbm=None), HIGH),
        (replace(WIFI, signal_dbm=None), LOW),  # out of reach looks the same
    ):
        story = Story(info)
        story.fail(Met.SILENT, Met.SILENT)
        story.probe(GONE)
        assert story.says() == (Condition.ROUTER_FAULT, LOW)  # a lift looks the same
        story.last(Met.UNREACHABLE, GONE)
        assert story.says() == (Condition.ROUTER_FAULT, confidence)


def test_router_that_is_silent_at_a_weak_signal_is_out_of_reach() -> None:
    story = Story(replace(WIFI, signal_dbm=-88))
    story.last(Met.SILENT, GONE)
    assert story.says() == (Condition.DEAD_WIFI, LOW)


@pytest.mark.parametrize("gateway", [Finding.ANSWERED, Finding.UNKNOWN])
def test_link_on_which_nothing_passes_beyond_the_router_is_dead(gateway: Finding) -> None:
    story = Story()
    story.fail(Met.SILENT, Met.SILENT)
    story.probe({**GONE, ProbeKind.GATEWAY: gateway})
    assert story.says() == (Condition.DEAD_WIFI, LOW)
    story.last(Met.SILENT, {**GONE, ProbeKind.GATEWAY: gateway})
    assert story.says() == (Condition.DEAD_WIFI, HIGH)


def test_one_silent_target_makes_no_certainty() -> None:
    story = Story(known=1, captive=False, name_server=Address("192.168.1.1", 53))
    story.last(Met.SILENT, {**GONE, ProbeKind.GATEWAY: Finding.ANSWERED})
    assert story.says() == (Condition.DEAD_WIFI, LOW)


def test_darkness_shorter_than_a_tunnel_is_never_sure() -> None:
    story = Story()
    began = story.now
    story.fail(Met.SILENT, Met.SILENT)
    while story.now < began + limits.VERDICT_SURE_S:
        assert story.says() != (Condition.DEAD_WIFI, HIGH)
        story.fail(Met.SILENT)
        story.probe({**GONE, ProbeKind.GATEWAY: Finding.ANSWERED})


def test_server_that_is_silent_while_others_take_connections_is_at_fault() -> None:
    story = Story()
    story.fail(Met.SILENT, Met.SILENT, Met.BROKEN)
    found: dict[ProbeKind | str, Finding] = {
        "other": Finding.ANSWERED, ProbeKind.DNS: Finding.ANSWERED, ProbeKind.CAPTIVE: Finding.ANSWERED
    }  # fmt: skip
    story.probe(found)
    assert story.says() == (Condition.SERVER_FAULT, LOW)
    story.last(Met.SILENT, found)
    assert story.says() == (Condition.SERVER_FAULT, HIGH)
    story = Story(known=0, captive=False)
    story.fail(Met.REFUSED, Met.REFUSED, Met.REFUSED)
    story.probe({ProbeKind.DNS: Finding.ANSWERED})
    assert story.says() == (Condition.SERVER_FAULT, LOW)


def test_name_server_on_the_router_says_nothing_of_what_is_beyond() -> None:
    story = Story(known=0, captive=False, name_server=Address("192.168.1.1", 53))
    story.fail(Met.DNS_FAILED, Met.DNS_FAILED)
    story.probe({ProbeKind.GATEWAY: Finding.ANSWERED, ProbeKind.DNS: Finding.FAILED})
    assert story.says() == (Condition.DNS_ONLY_BROKEN, LOW)


def test_failures_of_another_sort_begin_anew() -> None:
    story = Story()
    story.last(Met.BAD_CERTIFICATE, {ProbeKind.CAPTIVE: Finding.FOREIGN})
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)
    story.fail(Met.SILENT)
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)
    story.fail(Met.SILENT)
    assert story.says() == (Condition.DEAD_WIFI, LOW)
    story.fail(Met.BAD_CERTIFICATE, Met.SILENT, Met.BAD_CERTIFICATE)  # a mixture is of neither
    assert story.says()[1] is LOW


def test_other_network_forgets_what_the_old_one_met() -> None:
    story = Story()
    story.last(Met.SILENT, GONE)
    story.machine.changed(replace(WIFI, id="other"), story.now)
    assert story.says() == (Condition.OK, HIGH if story.now - 1000 < limits.VERDICT_MEMORY_S else LOW)
    assert story.machine.next_round_at(story.now) is None


# -- hints ------------------------------------------------------------------------------------------------------------
def test_every_verdict_has_a_hint_for_every_kind_of_network() -> None:
    told = {each.value for each in (*Condition, *Cause)} - {"dns_broken", "server_side"}  # by a condition's hint
    assert {key.partition("/")[0] for key in HINTS} == told
    assert {key.partition("/")[2] for key in HINTS} <= {"", *KINDS}
    texts = [hint(each, kind) for each in Condition for kind in KINDS]
    assert all(text.endswith(".") for text in texts)


def test_hints_may_be_in_another_language_and_incomplete() -> None:
    german = {"airplane": "Der Flugmodus ist an."}
    assert hint("airplane", "cell", german) == "Der Flugmodus ist an."
    assert hint("ok", "cell", german) == HINTS["ok"]


def test_single_failure_of_a_host_that_may_have_healed_makes_no_certainty() -> None:
    story = Story()
    story.fail(*[Met.SILENT] * 3)
    story.machine.answered("other", story.now)
    story.now += limits.VERDICT_SETTLE_S
    story.fail(*[Met.SILENT] * 4)
    assert story.says() == (Condition.SERVER_FAULT, HIGH)
    story.now += limits.VERDICT_AGAIN_S
    story.machine.answered("other", story.now)
    story.fail(Met.SILENT)  # a packet lost on a network that is well
    assert story.says() == (Condition.SERVER_FAULT, LOW)
    story.fail(Met.SILENT)
    assert story.says() == (Condition.SERVER_FAULT, HIGH)


@pytest.mark.parametrize("answer", [False, True])
def test_new_trouble_is_probed_as_soon_as_the_first(answer: bool) -> None:
    story = Story()
    foreign: dict[ProbeKind | str, Finding] = {ProbeKind.CAPTIVE: Finding.FOREIGN}
    story.last(Met.BAD_CERTIFICATE, foreign, seconds=2.0 * limits.PROBE_PAUSE_S_MAX)
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)
    while not story.probe(foreign):
        story.fail(Met.BAD_CERTIFICATE)
    if answer:
        story.machine.answered("shop", story.now)
    story.fail(Met.SILENT, Met.SILENT)  # two questions were lost
    story.fail(Met.BAD_CERTIFICATE, Met.BAD_CERTIFICATE)
    assert story.says() == (Condition.CAPTIVE_PORTAL, LOW)
    assert story.probe(foreign) == []  # one round in ten seconds at most
    story.now += limits.PROBE_PAUSE_S
    assert story.probe(foreign)
    assert story.says() == (Condition.CAPTIVE_PORTAL, HIGH)
