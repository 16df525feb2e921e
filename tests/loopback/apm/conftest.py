"""Roles in real processes, and devices that report to them."""

import base64
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.telemetry import report
from stormline.telemetry.timeline import AttemptRecord, CallRecord
from stormline.wire import jws, tokens

ADMIN_KEY = "admin-key-of-the-tests"


class Role:
    """A role in its own process, answering on `address`."""

    def __init__(self, spec: dict[str, Any], log: Path) -> None:
        self._log = log.open("ab")
        self._log_path = log
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("role.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(spec).encode())
        self.process.stdin.close()
        line = self.process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError(f"role did not start: {self.log_text()[-2000:]}")
        self.address = Address(*json.loads(line))

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def log_text(self) -> str:
        return self._log_path.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """Ask it to stop, give its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code


StartRole = Callable[[dict[str, Any]], Role]


@contextlib.contextmanager
def _roles(folder: Path) -> Iterator[StartRole]:
    roles: list[Role] = []
    logs = (folder / f"role-{number}.log" for number in itertools.count())

    def start(spec: dict[str, Any]) -> Role:
        role = Role(spec, next(logs))
        roles.append(role)
        return role

    try:
        yield start
    finally:
        for role in roles:
            role.end()


@pytest.fixture(name="start_role")
def _start_role(tmp_path: Path) -> Iterator[StartRole]:
    """Start roles for one test; those left at its end are stopped."""
    with _roles(tmp_path) as start:
        yield start


@pytest.fixture(name="shared_apm", scope="module")
def _shared_apm(tmp_path_factory: pytest.TempPathFactory, apm_spec: Callable[..., dict[str, Any]]) -> Iterator[Role]:
    """One APM for a module: tests keep apart by host name."""
    with _roles(tmp_path_factory.mktemp("apm")) as start:
        yield start(apm_spec())


class Devices:
    """Mints tokens as dispatch does."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = jws.b64url(self._key.public_key().public_bytes_raw())

    def token(self, device: str = "device-1", *, app: str = "demo", life_s: int = 600, kid: str = "k1") -> str:
        now = int(SystemClock().wall())
        claims = tokens.DeviceToken(app=app, device=device, user="ann", iat=now - 700, exp=now + life_s)
        return tokens.mint(claims, key=self._key, kid=kid)


@pytest.fixture(name="devices", scope="session")
def _devices() -> Devices:
    return Devices()


@pytest.fixture(name="apm_spec", scope="module")
def _apm_spec(tmp_path_factory: pytest.TempPathFactory, devices: Devices) -> Callable[..., dict[str, Any]]:
    """Settings of an APM with a fresh store, or with the folder given."""

    def spec(store: Path | None = None, **more: Any) -> dict[str, Any]:
        folder = store or tmp_path_factory.mktemp("store")
        return {
            "role": "apm",
            "store_path": str(folder),
            "token_keys": {"k1": devices.public},
            "admin_key": ADMIN_KEY,
            **more,
        }

    return spec


class Api:
    """The APM's HTTP API as tests use it."""

    def __init__(self, url: str, devices: Devices, verify: Any = True) -> None:
        self.client = httpx2.Client(base_url=url, timeout=20, trust_env=False, verify=verify)
        self.devices = devices

    def post(self, body: bytes, token: str | None = None, **headers: str) -> httpx2.Response:
        return self.client.post(
            "/v1/report",
            content=body,
            headers={
                "authorization": f"Bearer {token or self.devices.token()}",
                "content-type": report.MEDIA_TYPE,
                **{name.replace("_", "-"): value for name, value in headers.items()},
            },
        )

    def report(self, *calls: CallRecord, token: str | None = None, **fields: Any) -> httpx2.Response:
        return self.post(report.encode(report.Report(calls=list(calls), **fields)), token)

    def admin(self, path: str, key: str = ADMIN_KEY, **query: Any) -> httpx2.Response:
        return self.client.get(path, params=query, headers={"authorization": f"Bearer {key}"})

    def get(self, path: str, **query: Any) -> Any:
        answer = self.admin(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(name="make_api")
def _make_api(devices: Devices) -> Iterator[Callable[..., Api]]:
    with contextlib.ExitStack() as stack:

        def make(url: str, **more: Any) -> Api:
            api = Api(url, devices, **more)
            stack.enter_context(api.client)
            return api

        yield make


@pytest.fixture(name="make_call", scope="session")
def _make_call() -> Callable[..., CallRecord]:
    """A call record: a good one, changed as said."""
    serial = iter(range(1_000_000))

    def make(host: str = "api.example", *, ok: bool = True, **fields: Any) -> CallRecord:
        defaults: dict[str, Any] = {
            "call_id": base64.b32encode(next(serial).to_bytes(8, "big")).decode(),
            "started_at_ms": int(SystemClock().wall() * 1000) - 50,
            "method": "GET",
            "host": host,
            "path": "/v1/orders",
            "business": "orders",
            "status": 200 if ok else 0,
            "ok_network": ok,
            "ok_http": ok,
            "failure": "" if ok else "timeout",
            "phase": "" if ok else "connect",
            "network": "cell",
            "family": 4,
            "means": "long",
            "address": "127.0.0.1:443",
            "bytes_up": 120,
            "bytes_down": 900,
            "total_ms": 42.5,
            "stages_ms": {"queued": 0.5, "connect": 20.0, "tls": 10.0, "first_byte": 12.0},
            "attempts": [AttemptRecord(means="long", carrier="sl-tls", reused=True, duration_ms=42.0)],
        }
        return CallRecord(**(defaults | fields))

    return make
