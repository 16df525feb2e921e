"""What is read of a plan for one request: looked up once for each host, by its paths where there are some."""

import logging

import pytest

from stormline.client.commands import Commands
from stormline.core import limits, limits_means
from stormline.outbound.messages import HttpRequest
from stormline.policy.means import Means
from stormline.wire.plan import Endpoint, HostPlan, PathPlan, Plan, Policy


def request(target=b"/", host="a.test", method="GET", headers=()):
    return HttpRequest(method, "https", host, 443, target, headers, None)


def test_host_without_a_policy_commands_nothing():
    commands, plan = Commands(), HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=443),))
    assert commands.find(plan, request(), "") is None
    assert commands.find(plan, request(b"/other"), "") is None


def test_host_s_policy_is_read_once_for_each_plan_of_it():
    commands, plan = Commands(), HostPlan(policy=Policy(urgency=1), deadline_s=3.0)
    found = commands.find(plan, request(), "")
    assert (found.policy.urgency, found.policy.deadline_s) == (1, 3.0)
    assert commands.find(plan, request(b"/other"), "") is found
    newer = HostPlan(policy=Policy(urgency=2))
    assert commands.find(newer, request(), "").policy.urgency == 2
    assert commands.find(plan, request(host="b.test"), "").policy.urgency == 1


def test_hosts_kept_are_bounded():
    commands = Commands()
    for number in range(limits.PLAN_HOSTS_MAX + 9):
        commands.find(HostPlan(deadline_s=1.0), request(host=f"h{number}.test"), "")
    assert len(commands._of_host) == limits.PLAN_HOSTS_MAX
    for number in range(limits.PLAN_HOSTS_MAX + 9):
        commands.find(HostPlan(deadline_s=1.0 + number), request(), "")
    assert len(commands._made) == limits.PLAN_HOSTS_MAX


@pytest.mark.parametrize(
    ("target", "headers", "business", "urgency"),
    [
        (b"/a/x", (), "", 1),
        (b"/a/x?q=a%20b&q=c", (), "", 2),
        (b"/b?empty=", (), "", 3),
        (b"/b?full=1", (), "", 7),
        (b"/b", ((b"X-Kind", b"big"),), "", 4),
        (b"/b", ((b"x-kind", b"small"),), "", 7),
        (b"/b", (), "pay", 5),
        (b"/%", (), "", 7),
        (b"", (), "", 7),
    ],
)
def test_first_path_that_fits_lies_over_the_host_s(target, headers, business, urgency):
    plan = HostPlan(
        policy=Policy(urgency=7, tries={"direct": 2}),
        paths=(
            PathPlan(query={"q": "a b"}, policy=Policy(urgency=2)),
            PathPlan(query={"empty": None}, policy=Policy(urgency=3)),
            PathPlan(path="/a/**", policy=Policy(urgency=1)),
            PathPlan(headers={"x-Kind": "big"}, policy=Policy(urgency=4)),
            PathPlan(business="pay", policy=Policy(urgency=5)),
        ),
    )
    found = Commands().find(plan, request(target, headers=headers), business)
    assert found.policy.urgency == urgency
    assert found.preset.direct == 2


def test_numbers_of_a_plan_are_held_to_what_the_client_does():
    tries = {"attempts": 0, "direct": 100, "ip-direct": 100, "long": 9, "clear": 9, "original": 9}
    preset = Commands().find(HostPlan(policy=Policy(tries=tries)), request(), "").preset
    assert (preset.attempts, preset.direct, preset.long) == (1, limits_means.PLAN_ATTEMPTS_MAX, 1)
    assert (preset.clear, preset.original) == (limits_means.MEANS_TRIES_MAX,) * 2
    login = Commands().find(HostPlan(policy=Policy(preset="login", tries={"clear": 2})), request(), "").preset
    assert (login.tls_only, login.clear) == (True, 0)


def test_unknown_names_are_left_out_with_one_line_for_each(caplog):
    caplog.set_level(logging.WARNING)
    commands = Commands()
    for number in range(3):
        policy = Policy(preset="swift", order=("pigeon", "direct"), tries={"pigeon": 1}, disabled=("warp", "h2"))
        found = commands.find(HostPlan(policy=policy, deadline_s=1.0 + number), request(), "")
        assert (found.preset, found.order, found.off) == (None, (Means.DIRECT,), {"h2"})
    commands.read(Plan(app="demo", version=1, issued_at=0, expires_at=1, disabled=("warp", "weft", "h3")))
    assert [message.partition("'")[2].partition("'")[0] for message in caplog.messages] == [
        "warp", "pigeon", "swift", "weft",
    ]  # fmt: skip
    for number in range(100):
        commands.read(Plan(app="demo", version=1, issued_at=0, expires_at=1, disabled=(f"n{number}",)))
    assert len(caplog.messages) == limits_means.PLAN_NAMES_TOLD_MAX


def test_permission_for_a_relay_is_kept():
    relays = (Endpoint(host="192.0.2.9", port=443),)
    found = Commands().find(HostPlan(policy=Policy(relay=True, relays=relays)), request(), "")
    assert (found.policy.relay, found.policy.relays) == (True, relays)
