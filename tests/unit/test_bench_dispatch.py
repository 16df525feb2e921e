"""What the bench of dispatch asks and loads."""

import msgspec

from stormline.bench import loading
from stormline.bench.served import Asked
from stormline.dispatch import rules


def test_large_rule_set_is_one_that_a_centre_takes() -> None:
    made = loading.rule_set(200)
    assert rules.decode(rules.encode(made)) == made
    assert (len(made.hosts), len(made.apps)) == (200, 10)
    assert sum(map(len, made.apps.values())) == 200


def test_questions_are_sent_each_with_its_own_length() -> None:
    asked = Asked("/v1/plan", (b"{}", msgspec.json.encode({"app": "shop"})), "application/json")
    for request, body in zip(asked.requests(), asked.bodies, strict=True):
        head, _, rest = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/plan HTTP/1.1\r\n")
        assert (rest, int(head.rpartition(b"content-length: ")[2])) == (body, len(body))
