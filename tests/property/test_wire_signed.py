"""Signed texts and what travels in them, under any input: the documented error or the truth, nothing else."""

import contextlib

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors, limits, limits_platform
from stormline.wire import bundle, hostname, jws, plan, strictjson, tokens
from stormline.wire.plan import Endpoint, HostPlan, PathPlan, Plan, PlanRequest, Policy

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = {"k": KEY.public_key()}
NOW = 1_800_000_000
TYP = "test+jws"

# What JSON can carry: any Unicode text without lone surrogates.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
names = text.filter(lambda name: 0 < len(name.encode()) <= limits.NAME_BYTES_MAX)
counts = st.integers(0, 2**53 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
endpoints = st.builds(
    Endpoint, host=text, port=st.integers(1, 65535), carrier=text, server_name=text, unit=text, weight=counts,
    region=text, operator=text, role=text,
)  # fmt: skip
timeouts = st.none() | st.floats(min_value=1e-3, max_value=1e6)
texts = st.lists(text, max_size=3).map(tuple)
policies = st.builds(
    Policy, preset=text, order=texts, tries=st.dictionaries(text, st.integers(0, 100), max_size=3),
    connect_timeout_s=timeouts, read_timeout_s=timeouts, deadline_s=timeouts, relay=st.none() | st.booleans(),
    relays=st.lists(endpoints, max_size=2).map(tuple), clear=st.none() | st.booleans(),
    sample=st.none() | st.floats(0, 1), urgency=st.none() | st.integers(0, 7), disabled=texts,
)  # fmt: skip
conditions = st.dictionaries(text, st.none() | text, max_size=2)
path_plans = st.builds(
    PathPlan, path=text | st.sampled_from(["/**", "/a/*", "/a/**"]), methods=texts, query=conditions,
    headers=conditions, business=text, policy=policies,
)  # fmt: skip
host_plans = st.builds(
    HostPlan, endpoints=st.lists(endpoints, max_size=3).map(tuple), connect_timeout_s=timeouts, deadline_s=timeouts,
    policy=st.none() | policies, paths=st.lists(path_plans, max_size=3).map(tuple), ttl_s=st.none() | counts,
    dns=st.booleans(),
)  # fmt: skip
plans = st.builds(
    Plan,
    app=text,
    version=counts,
    issued_at=st.just(NOW),
    expires_at=st.integers(NOW, 2**53 - 1),
    unit=text,
    hosts=st.dictionaries(text, host_plans, max_size=3),
    unknown=st.lists(text, max_size=3).map(tuple),
    report=st.none() | endpoints,
    disabled=st.lists(text, max_size=3).map(tuple),
)
device_tokens = st.builds(
    tokens.DeviceToken,
    app=names,
    device=names,
    user=st.just("") | names,
    iat=st.integers(0, NOW),
    exp=st.integers(NOW + 1, 2**53 - 1),
    nbf=st.integers(0, NOW),
)


def forge(header: bytes, payload: bytes) -> bytes:
    signed = f"{jws.b64url(header)}.{jws.b64url(payload)}"
    return f"{signed}.{jws.b64url(KEY.sign(signed.encode()))}".encode()


def check_jws(data: str | bytes) -> bytes:
    return jws.verify(data, keys=KEYS, typ=TYP, size_max=10_000)


@given(st.binary(max_size=2000))
def test_base64url_round_trips(data: bytes) -> None:
    assert jws.b64url_decode(jws.b64url(data)) == data


@given(st.binary(max_size=60) | st.text("AZaz09-_=+/\n.", max_size=60).map(str.encode))
def test_base64url_of_any_bytes_is_canonical_or_refused(data: bytes) -> None:
    try:
        decoded = jws.b64url_decode(data)
    except ValueError:
        return
    assert jws.b64url(decoded).encode() == data


@given(st.binary(max_size=3000))
def test_jws_round_trips(payload: bytes) -> None:
    assert check_jws(jws.sign(payload, key=KEY, kid="k", typ=TYP)) == payload


@given(st.binary(max_size=400) | st.text(max_size=400) | st.text("abcEJ.-_{}=", max_size=200))
def test_jws_of_any_input_is_a_signature_error(data: str | bytes) -> None:
    with pytest.raises(errors.SignatureError):
        check_jws(data)


@given(st.binary(max_size=200) | json_values.map(msgspec.json.encode))
def test_jws_with_any_header_is_a_signature_error(header: bytes) -> None:
    with pytest.raises(errors.SignatureError):
        check_jws(forge(header, b"x"))


@given(st.data(), st.binary(max_size=80))
def test_jws_with_one_bit_flipped_is_refused(data: st.DataObject, payload: bytes) -> None:
    signed = jws.sign(payload, key=KEY, kid="k", typ=TYP).encode()
    at = data.draw(st.integers(0, len(signed) * 8 - 1), label="bit")
    flipped = bytearray(signed)
    flipped[at // 8] ^= 1 << at % 8
    with pytest.raises(errors.SignatureError):
        check_jws(bytes(flipped))


def test_jws_with_any_single_bit_flipped_is_refused() -> None:
    signed = jws.sign(b"hello", key=KEY, kid="k", typ=TYP).encode()
    for at in range(len(signed) * 8):
        flipped = bytearray(signed)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(errors.SignatureError):
            check_jws(bytes(flipped))


@given(st.data())
def test_jws_cut_or_grown_anywhere_is_refused(data: st.DataObject) -> None:
    signed = jws.sign(b"hello", key=KEY, kid="k", typ=TYP).encode()
    start = data.draw(st.integers(0, len(signed) - 1))
    end = data.draw(st.integers(start + 1, len(signed)))
    more = data.draw(st.binary(min_size=1, max_size=4))
    for changed in (signed[:start] + signed[end:], signed[:start] + more + signed[start:]):
        with pytest.raises(errors.SignatureError):
            check_jws(changed)


@given(device_tokens)
def test_token_round_trips(token: tokens.DeviceToken) -> None:
    assert tokens.verify(tokens.mint(token, key=KEY, kid="k"), keys=KEYS, wall=NOW) == token


@given(
    st.binary(max_size=200)
    | json_values.map(msgspec.json.encode)
    | st.fixed_dictionaries(dict.fromkeys(("aud", "sub", "user", "iat", "exp", "nbf"), json_values)).map(
        msgspec.json.encode
    ),
    st.floats(0, 2**40),
)
def test_token_with_any_signed_payload_is_claims_or_a_signature_error(payload: bytes, wall: float) -> None:
    signed = jws.sign(payload, key=KEY, kid="k", typ=tokens.TYP)
    try:
        token = tokens.verify(signed, keys=KEYS, wall=wall)
    except errors.SignatureError:
        return
    assert token.app
    assert token.device
    assert wall < token.exp


@given(plans)
def test_plan_round_trips(value: Plan) -> None:
    signed = plan.sign(value, key=KEY, kid="k")
    asked = [*value.hosts, *value.unknown]
    assert plan.verify(signed, keys=KEYS, app=value.app, hosts=asked, version_min=0, wall=NOW) == value


@given(plans, plans)
def test_changes_over_what_is_held_give_the_whole(old: Plan, new: Plan) -> None:
    old, new = (msgspec.structs.replace(each, app="shop", digest=plan.content_digest(each)) for each in (old, new))
    signed = plan.sign(plan.changes(plan.host_digests(old), old.digest, new), key=KEY, kid="k")
    got = plan.verify(signed, keys=KEYS, app="shop", hosts=new.hosts, version_min=0, wall=NOW, held=old)
    left = {host: each for host, each in new.hosts.items() if host in got.hosts}
    assert got == msgspec.structs.replace(new, hosts=left)
    assert new.hosts.keys() - left.keys() <= set(new.unknown)


@given(host_plans, text, text, st.lists(st.tuples(text, text), max_size=3), text)
def test_policy_of_any_request_is_the_first_paths_over_the_hosts(
    host: HostPlan, method: str, path: str, pairs: list[tuple[str, str]], business: str
) -> None:
    found = plan.policy_for(host, method, path, pairs, pairs, business)
    alone = [plan.policy_for(msgspec.structs.replace(host, paths=(each,)), method, path, pairs, pairs, business)
             for each in host.paths]  # fmt: skip
    none = plan.policy_for(msgspec.structs.replace(host, paths=()), method, path, pairs, pairs, business)
    assert found == next((each for each in alone if each != none), none)
    assert set(host.policy.disabled if host.policy else ()) <= set(found.disabled)


@given(
    st.binary(max_size=200) | json_values.map(msgspec.json.encode),
    st.sampled_from([plan.TYP_CHANGES, plan.TYP_UNCHANGED]),
)
def test_any_signed_answer_to_who_holds_a_plan_is_a_plan_or_rejected(payload: bytes, typ: str) -> None:
    held = Plan(app="shop", version=1, issued_at=NOW, expires_at=NOW, digest="d")
    signed = jws.sign(payload, key=KEY, kid="k", typ=typ)
    with contextlib.suppress(errors.AnswerRejected):
        plan.verify(signed, keys=KEYS, app="shop", hosts=[], version_min=0, wall=NOW, held=held)


@given(
    st.binary(max_size=200)
    | json_values.map(msgspec.json.encode)
    | st.fixed_dictionaries(
        {"app": st.just("shop") | json_values},
        optional=dict.fromkeys(("version", "issued_at", "expires_at", "hosts", "unknown", "report"), json_values),
    ).map(msgspec.json.encode),
    st.floats(0, 2**40),
)
def test_plan_with_any_signed_payload_is_a_plan_or_rejected(payload: bytes, wall: float) -> None:
    signed = jws.sign(payload, key=KEY, kid="k", typ=plan.TYP)
    try:
        value = plan.verify(signed, keys=KEYS, app="shop", hosts=["a.example"], version_min=0, wall=wall)
    except errors.AnswerRejected:
        return
    assert value.app == "shop"
    assert "a.example" in value.hosts or "a.example" in value.unknown


@given(st.binary(max_size=300) | st.text(max_size=300))
def test_plan_of_any_input_is_rejected(data: str | bytes) -> None:
    with pytest.raises(errors.AnswerRejected):
        plan.verify(data, keys=KEYS, app="shop", hosts=[], version_min=0, wall=NOW)


@given(st.builds(PlanRequest, app=text, hosts=st.lists(text, max_size=5).map(tuple), version=counts))
def test_plan_request_round_trips(request: PlanRequest) -> None:
    assert plan.decode_request(msgspec.json.encode(request)) == request


@given(st.binary(max_size=300) | json_values.map(msgspec.json.encode))
def test_plan_request_of_any_bytes_is_one_or_a_value_error(data: bytes) -> None:
    try:
        request = plan.decode_request(data)
    except ValueError:
        return
    assert isinstance(request, PlanRequest)


@given(
    st.binary(max_size=300)
    | json_values.map(msgspec.json.encode)
    | st.fixed_dictionaries(
        dict.fromkeys(("app", "dispatch_name", "dispatch_keys"), json_values) | {"dispatch": st.lists(text, max_size=3)}
    ).map(msgspec.json.encode)
)
def test_bundle_of_any_bytes_is_one_or_a_bundle_error(data: bytes) -> None:
    try:
        held = bundle.decode(data)
    except errors.BundleError:
        return
    assert held.addresses()
    assert bundle.decode(bundle.encode(held)) == held


@given(json_values)
def test_strict_json_reads_what_was_written(value: object) -> None:
    data = msgspec.json.encode(value)
    assert strictjson.decode(data, msgspec.json.Decoder()) == msgspec.json.decode(data)


@given(st.text(max_size=80) | st.from_regex(r"[A-Za-z0-9_.:-]{1,80}", fullmatch=True))
def test_host_of_any_text_has_one_form_or_is_refused(name: str) -> None:
    try:
        host = hostname.normalise(name)
    except errors.ConfigError:
        return
    assert hostname.normalise(host) == host
    assert host == host.lower()
    assert len(host) <= limits_platform.HOST_CHARS_MAX


@given(st.text(st.characters(min_codepoint=0xE0, max_codepoint=0x2FF, categories=["Ll"]), min_size=1, max_size=20))
def test_host_with_a_true_a_label_is_accepted(label: str) -> None:
    a_label = "xn--" + label.encode("punycode").decode()
    if len(a_label) <= 63:
        assert hostname.normalise(f"WWW.{a_label}.example.") == f"www.{a_label}.example"
