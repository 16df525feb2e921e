"""Loads a rule set as a centre does, in a process: `python -m stormline.bench.loading FILE APP HOST`.

It prints the CPU time from the file to the first signed plan (seconds), and the most memory that the process ever held
(KiB).
"""

import resource
import sys
import time
from pathlib import Path
from typing import Final

from stormline.bench import centre
from stormline.dispatch import rules
from stormline.dispatch.rules import RuleSet
from stormline.wire.plan import Endpoint, HostPlan, PlanRequest, Policy

HOSTS: Final = 100_000


def rule_set(hosts: int = HOSTS) -> RuleSet:
    """Give a large rule set: each host with two endpoints and a policy of its own, in ten apps."""
    names = [f"host-{number}.example.org" for number in range(hosts)]
    plans = {
        name: HostPlan(
            endpoints=(
                Endpoint(host=f"192.0.{number % 250}.{number % 251}", port=443, carrier="h2", unit="u1"),
                Endpoint(host=f"198.51.{number % 250}.{number % 251}", port=443, carrier="h2", unit="u2", weight=0),
            ),
            policy=Policy(connect_timeout_s=1.0 + number % 7, tries={"direct": 2}, order=("long", "direct")),
        )
        for number, name in enumerate(names)
    }
    return RuleSet(version=1, hosts=plans, apps={f"app{at}": frozenset(names[at::10]) for at in range(10)})


def _load(file: Path, app: str, host: str) -> float:
    began = time.process_time()
    service = centre.service(rules.decode(file.read_bytes()))
    service.answer(PlanRequest(app=app, hosts=(host,)))
    return time.process_time() - began


if __name__ == "__main__":
    took_s = _load(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{took_s} {most_kib}\n")
