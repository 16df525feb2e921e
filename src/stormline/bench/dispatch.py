"""What dispatch costs: its answers in CPU time of its own process, large rule sets, and how soon a change arrives.

Questions and bare requests take turns; a row is the pair of neighbouring turns whose ratio is the median. All go over
kept connections of clear HTTP, as what TLS costs is the same for each, and some are always under way: a server that has
nothing to do between two requests goes to sleep, and waking it costs more than the answer. Bare is a small JSON, the
least that this server can answer at all. Plans are asked for by ever other devices, with the key they trust, so that
no two questions in a row are the same bytes; the answers have been signed before.
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from stormline.bench import centre, loading, push
from stormline.bench.onecore import one_core
from stormline.bench.results import Row, row
from stormline.bench.served import Asked, served
from stormline.core import errors
from stormline.dispatch import rules
from stormline.wire import dns, dns_server
from stormline.wire.plan import PlanRequest

GOAL_PLAN_US: Final = 60.0
"""A plan for ten hosts that has been signed before."""
GOAL_PLAN_RATIO: Final = 1.5
"""The same, as a multiple of the bare answer."""
GOAL_DOH_US: Final = 60.0
"""An answer of HTTPS records."""
GOAL_LOAD_S: Final = 5.0
"""CPU time from the file of 100,000 hosts to the first plan."""
GOAL_RULES_MB: Final = 300.0
"""The most memory a process holds meanwhile, all of it counted."""
GOAL_PUSH_S: Final = 2.0
"""From the operator's change to the plan in a client's hands, the jitter of the gateways included."""
DEVICES: Final = 500
"""Devices that ask in turn: some for each of the groups among which equal endpoints are shared out."""
_BARE: Final = "bare JSON answer of the same server"
_QUERY_BLOCK_BYTES: Final = 128


def run() -> list[Row]:
    """Measure; takes a minute and a half on a quiet machine."""
    asked = dns.question(centre.HOSTS[0], dns.RecordType.HTTPS)[dns_server.HEADER_BYTES :]
    query = dns_server.forward_query(
        0, asked, dnssec_ok=False, checking_disabled=False, block_bytes=_QUERY_BLOCK_BYTES
    )  # padded, as browsers ask
    questions = tuple(
        msgspec.json.encode(
            PlanRequest(app=centre.APP, hosts=centre.HOSTS, device=f"bench-device-{number:06}", kids=(centre.PLAN_KID,))
        )
        for number in range(DEVICES)
    )
    plan = Asked("/v1/plan", questions, "application/json")
    bare = Asked("/bare", questions, "application/json")
    doh = Asked("/dns-query", (query,), "application/dns-message")
    with one_core(), served(centre.__name__) as running:
        plan_us, bare_us = running.pair(plan, bare)
        doh_us, bare_doh_us = running.pair(doh, bare)
    return [
        row("plan_us", plan_us, "us", goal=GOAL_PLAN_US, peer=_BARE, peer_value=bare_us),
        row("plan_ratio", plan_us / bare_us, "x", goal=GOAL_PLAN_RATIO, peer=_BARE, peer_value=1.0),
        row("doh_us", doh_us, "us", goal=GOAL_DOH_US, peer=_BARE, peer_value=bare_doh_us),
        *_loading(),
        _pushing(),
    ]


def _loading() -> list[Row]:
    """Say what a large rule set costs that is read from its file, in a process that does nothing else."""
    rule_set = loading.rule_set()
    app = min(rule_set.apps)
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as folder:
        file = Path(folder) / "rules.json"
        file.write_bytes(rules.encode(rule_set))
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", loading.__name__, file, app, min(rule_set.apps[app])],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise errors.PlatformError("bench: the rules could not be loaded; what was said stands above")
    took_s, most_kib = map(float, done.stdout.split())
    return [
        row("rules_load_s", took_s, "s", goal=GOAL_LOAD_S),
        row("rules_mb", most_kib * 1024 / 1e6, "MB", goal=GOAL_RULES_MB),
    ]


def _pushing() -> Row:
    """Say how long a changed plan takes until a client holds it, at the 99th of a hundred."""
    waits = push.waits_s()
    return row("plan_push_p99_s", waits[math.ceil(0.99 * len(waits)) - 1], "s", goal=GOAL_PUSH_S)
