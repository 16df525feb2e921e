"""Write `plans.json`: questions to dispatch and its signed answers, to test other implementations with.

.venv/bin/python tests/vectors/make_plans.py            write the file
.venv/bin/python tests/vectors/make_plans.py --check    exit 1 where it is stale
"""

import argparse
import json
import sys
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.wire import jws, plan
from stormline.wire.plan import Endpoint, Home, HostPlan, PathPlan, Plan, PlanRequest, Policy, Unchanged

FILE = Path(__file__).parent / "plans.json"
KEY = jws.SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))), "p1")
NOW = 1_800_000_000
HOSTS = ("api.shop.example", "img.shop.example")
API = HostPlan(
    endpoints=(
        Endpoint(host="192.0.2.1", port=8702, server_name="gw.shop.example", unit="u1", region="eu"),
        Endpoint(host="2001:db8::1", port=443, carrier="h2", weight=10),
    ),
    policy=Policy(deadline_s=9.0, disabled=("h3",)),
    paths=(
        PathPlan(path="/pay/**", methods=("POST",), policy=Policy(preset="key", tries={"clear": 0}, urgency=0)),
        PathPlan(query={"trace": None}, headers={"x-plan": "gold"}, business="home", policy=Policy(sample=1.0)),
    ),
    ttl_s=600,
)


def _named(made: Plan) -> Plan:
    return msgspec.structs.replace(made, digest=plan.content_digest(made))


def make() -> str:
    """Give the text of the file."""
    fields = {"app": "shop", "issued_at": NOW, "expires_at": NOW + 600, "unit": "u1"}
    held = _named(Plan(version=7, hosts={HOSTS[0]: API, HOSTS[1]: HostPlan(dns=True)}, **fields))  # type: ignore[arg-type]
    now = _named(Plan(version=8, hosts={HOSTS[0]: API}, unknown=HOSTS[1:], dns_only=False, **fields))  # type: ignore[arg-type]
    unchanged = Unchanged(
        app="shop", version=9, issued_at=NOW, expires_at=NOW + 600, held=held.digest,
        asked=plan.question_digest("shop", HOSTS),
    )  # fmt: skip
    home = Home(app="shop", user="ann", unit="u2", epoch=3, issued_at=NOW, expires_at=NOW + 3600)
    signing = {"key": KEY.key, "kid": KEY.kid}
    texts = {
        "plan": plan.sign(held, **signing),  # type: ignore[arg-type]
        "changes": plan.sign(plan.changes(plan.host_digests(held), held.digest, now), **signing),  # type: ignore[arg-type]
        "unchanged": plan.sign_unchanged(unchanged, **signing),  # type: ignore[arg-type]
        "home": plan.sign_home(home, **signing),  # type: ignore[arg-type]
    }
    content = {
        "about": "Answers of dispatch, signed by the key below; 'changes' and 'unchanged' are for who holds 'plan'.",
        "key": {"kid": KEY.kid, "public": KEY.public_text},
        "now": NOW,
        "hosts": HOSTS,
        "question": msgspec.to_builtins(
            PlanRequest(app="shop", hosts=HOSTS, version=7, held=held.digest, changes=True)
        ),
        "answers": texts,
        "after_changes": msgspec.to_builtins(now),
    }
    return json.dumps(content, indent=1, ensure_ascii=True) + "\n"


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description="Write the vectors of dispatch's answers.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is stale")
    text = make()
    if parser.parse_args().check:
        return 0 if FILE.exists() and FILE.read_text(encoding="utf-8") == text else 1
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
