"""A platform on a stage: two scheduling centres, a gateway and an engine, each a process at an address of its own.

    with Stage(profile, 1, folder=folder, names=platform.NAMES) as stage, Platform(stage, folder) as platform:
        platform.bundle()                       # for clients on the device
        platform.publish(ttl_s=60)
        platform.kill("engine")

Where it is started too, a box (`lab.hijack`) stands beside them, to which the network may lead who asks a centre in
clear HTTP.
"""

import contextlib
import http.client
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from stormline.assembly import authority, keys, layout
from stormline.assembly.names import SERVER_NAMES
from stormline.core import errors, limits_lab
from stormline.core.values import Address
from stormline.dispatch import rules as dispatch_rules
from stormline.dispatch.rules import RuleSet
from stormline.lab import platform_roles as roles
from stormline.lab import specs
from stormline.lab.hijack import Lie
from stormline.lab.namespaces import Namespace
from stormline.lab.stage import Stage
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles
from stormline.wire.bundle import Bundle, Centre
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Carrier, Endpoint, HostPlan, PlanRequest

APP: Final = "lab"
OTHER_APP: Final = "other"
CENTRES: Final = ("203.0.113.50", "203.0.113.51")
GATEWAY: Final = "203.0.113.52"
BOX: Final = "203.0.113.60"
PORT: Final = 443
PLAIN_PORT: Final = 80
CENTRE_NAME: Final = "dispatch.lab.test"
"""A name of both centres in DNS; their certificates are for another one, as the bundle says."""
NAMES: Final[Mapping[str, tuple[str, ...]]] = {CENTRE_NAME: CENTRES}
"""What DNS must know."""
LIES: Final[Mapping[Lie, int]] = {lie: 8000 + number for number, lie in enumerate(Lie)}
"""The box's ports."""
ENGINE: Final = "engine"
_ENGINE_PORT: Final = 4222


class Platform:
    """Its processes and what they are told; a context manager.

    Attributes:
        pki: keys and certificates.
        plan_key: signs plans.
    """

    def __init__(self, stage: Stage, folder: Path) -> None:
        """Plan it; nothing is started yet.

        Args:
            stage: where; entered, and made with `names=NAMES`.
            folder: for its state; made where it is not there.
        """
        self._stage = stage
        self._place = layout.Layout(folder)
        self._clock = SystemClock()
        self._roles: dict[str, roles.Role] = {}
        self._running: dict[str, _Process] = {}
        self._changes = 0

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            PlatformError: a part does not start.
        """
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process; again is harmless."""
        while self._running:
            _, process = self._running.popitem()
            process.kill()

    def _build(self) -> None:
        place, rng = self._place, SystemRng()
        place.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        addresses = "\n".join(f"ip address add {host}/32 dev lo" for host in (*CENTRES, GATEWAY, BOX))
        self._stage.topology.server.shell(addresses)
        self.pki = authority.ensure_authority(place.pki, clock=self._clock, rng=rng)
        self.plan_key = authority.ensure_signing_key(place.plan_key, "plan")
        token_key = authority.ensure_signing_key(place.token_key, "token")
        admin_key = self._admin_key = keys.ensure_keys(place, rng=rng).admin
        # Standard clients that ask a centre for names know it by its address.
        centre_tls = self.pki.issue("dispatch", names=[SERVER_NAMES["dispatch"]], ips=CENTRES)
        gateway_tls = self.pki.issue("gateway", names=[SERVER_NAMES["gateway"]])
        layout.write(place.rules, dispatch_rules.encode(self.rules()))
        self._roles[ENGINE] = roles.EngineRole(folder=str(place.nats), port=_ENGINE_PORT)
        answers = self.start(ENGINE)
        if answers.engine is None:
            raise errors.PlatformError("the engine does not say how it is reached")
        for host in CENTRES:
            self._roles[host] = self._centre(host, centre_tls, token_key, admin_key, answers.engine)
        self._roles[GATEWAY] = roles.GatewayRole(
            host=GATEWAY,
            port=PORT,
            certificate=str(gateway_tls.certificate),
            certificate_key=str(gateway_tls.key),
            apps={APP: {token_key.kid: token_key.public_text}},
            admin_key=admin_key,
            engine=answers.engine,
        )
        self.start(*CENTRES, GATEWAY)
        self._roles[BOX] = roles.BoxRole(
            host=BOX,
            ports=dict(LIES),
            centre=(CENTRES[1], PLAIN_PORT),
            forger=(self._stage.captive, 443),
            other_app=OTHER_APP,
            record=PlanRequest(app=APP, hosts=(specs.SHOP,)),
        )

    def _centre(
        self, host: str, tls: TlsFiles, token_key: SigningKey, admin_key: str, engine: roles.EngineAt
    ) -> roles.CentreRole:
        place = self._place
        return roles.CentreRole(
            host=host,
            port=PORT,
            plain_port=PLAIN_PORT,
            certificate=str(tls.certificate),
            certificate_key=str(tls.key),
            plan_key=str(place.plan_key),
            plan_kid=self.plan_key.kid,
            token_key=str(place.token_key),
            token_kid=token_key.kid,
            admin_key=admin_key,
            rules=str(place.rules),
            held=str(place.state / f"held-{host}.json"),
            engine=engine,
        )

    # -- what clients and centres are told ----------------------------------------------------------------------------
    def bundle(self, *centres: Centre, **change: Any) -> Bundle:
        """Give a bundle: of both centres by address over TLS, or of these."""
        fields: dict[str, Any] = {
            "app": APP,
            "dispatch": () if centres else tuple(str(Address(host, PORT)) for host in CENTRES),
            "dispatch_name": SERVER_NAMES["dispatch"],
            "dispatch_keys": {self.plan_key.kid: self.plan_key.public_text},
            "ca_pem": self.pki.ca_pem,
            "centres": centres,
        }
        return Bundle(**(fields | change))

    def rules(self, **host: Any) -> RuleSet:
        """Give rules: the shop at the origin's addresses, the gateway for the long connection.

        Args:
            host: more for the shop's `HostPlan`.
        """
        shop = tuple(Endpoint(host=each, port=443, carrier=Carrier.H2) for each in self._stage.addresses)
        gateway = Endpoint(
            host=GATEWAY, port=PORT, carrier=Carrier.LONG_TLS, server_name=SERVER_NAMES["gateway"], unit=roles.UNIT
        )
        return dispatch_rules.check(
            RuleSet(
                version=1,
                unit=roles.UNIT,
                hosts={specs.SHOP: HostPlan(**({"endpoints": shop} | host))},
                apps={APP: frozenset({specs.SHOP}), OTHER_APP: frozenset({specs.SHOP})},
                gateways={APP: (gateway,)},
            )
        )

    def publish(self, **host: Any) -> int:
        """Give everybody other rules, by the first centre that runs.

        Args:
            host: more for the shop's `HostPlan`; the deadline differs each time, so that nothing is published twice.

        Returns:
            Their version, once all centres that run answer from it.

        Raises:
            PlatformError: they were refused, or do not reach every centre.
        """
        self._changes += 1
        rules = dispatch_rules.encode(self.rules(deadline_s=15.0 + self._changes / 10, **host))
        centres = [each for each in CENTRES if each in self._running]
        status, answer = self.admin(centres[0], "PUT", self.rules_path(), rules, match="*")
        if status != 200:
            raise errors.PlatformError(f"the rules were not taken: {status} {answer}")
        version: int = answer["version"]
        for centre in centres:
            self.wait_health(centre, version=version)
        return version

    @staticmethod
    def rules_path() -> str:
        """Give where rules are put."""
        return "/v1/admin/rules?who=lab&why=a+test&force=true"

    # -- asking centres from beside them, whatever the device's network does ------------------------------------------
    def connect(self, host: str) -> http.client.HTTPSConnection:
        """Connect to a centre over TLS; the caller closes it."""
        context = ssl.create_default_context(cadata=self.pki.ca_pem)
        plug = self._stage.topology.server.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection = http.client.HTTPSConnection(host, PORT)
        try:
            plug.settimeout(limits_lab.LAB_ORIGIN_ANSWER_S)
            plug.connect((host, PORT))
            connection.sock = context.wrap_socket(plug, server_hostname=SERVER_NAMES["dispatch"])
        except BaseException:
            plug.close()
            raise
        return connection

    def admin_headers(self, *, match: str = "") -> dict[str, str]:
        """Give the headers of a question to the admin API; `match` is the version that a change was made from."""
        return {"authorization": f"Bearer {self._admin_key}", **({"if-match": match} if match else {})}

    def admin(self, host: str, method: str, path: str, body: bytes = b"", *, match: str = "") -> tuple[int, Any]:
        """Ask a centre's admin API; give status and answer."""
        with contextlib.closing(self.connect(host)) as connection:
            connection.request(method, path, body, self.admin_headers(match=match))
            return read_json(connection)

    def health(self, host: str) -> dict[str, Any]:
        """Give what a centre says of itself."""
        with contextlib.closing(self.connect(host)) as connection:
            connection.request("GET", "/healthz")
            answer: dict[str, Any] = read_json(connection)[1]
            return answer

    def wait_health(self, host: str, *, wait_s: float = limits_lab.LAB_READY_S, **wanted: Any) -> None:
        """Wait until a centre says this of itself.

        Raises:
            PlatformError: it did not within `wait_s`.
        """
        end_s = self._clock.monotonic() + wait_s
        while not wanted.items() <= (health := self.health(host)).items():
            if self._clock.monotonic() > end_s:
                raise errors.PlatformError(f"{host} says {health}, not {wanted}")
            time.sleep(limits_lab.LAB_CLEANUP_PAUSE_S)

    # -- processes ----------------------------------------------------------------------------------------------------
    def start(self, *names: str) -> roles.Answers:
        """Start parts side by side, by `ENGINE` or address, and wait until they answer; give what the last one says.

        Raises:
            PlatformError: one does not answer in time.
        """
        for name in names:
            log = self._place.state / f"{name}.log"
            self._running[name] = _Process(name, self._stage.topology.server, self._roles[name], log, self._clock)
        return [self._running[name].wait() for name in names][-1]

    def kill(self, name: str) -> None:
        """Kill a part at once, as a crash does; `start` brings it back."""
        self._running.pop(name).kill()

    @contextlib.contextmanager
    def hung(self, *names: str) -> Iterator[None]:
        """Have parts hang while the block runs: the kernel takes connections for them, and nobody says anything."""
        for name in names:
            self._running[name].send(signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self._running[name].send(signal.SIGCONT)


def read_json(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    """Read an answer that is JSON; give its status too."""
    answer = connection.getresponse()
    return answer.status, msgspec.json.decode(answer.read())


class _Process:
    """A role's process."""

    def __init__(self, name: str, place: Namespace, role: roles.Role, log: Path, clock: SystemClock) -> None:
        self._name = name
        self._log = log
        self._clock = clock
        with log.open("ab") as errors_file:
            self._process = place.popen(
                [sys.executable, "-m", "stormline.lab.platform_roles"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors_file,
                start_new_session=True,
            )
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        with contextlib.suppress(OSError):  # it has ended: `wait` says why
            self._process.stdin.write(msgspec.json.encode(role) + b"\n")
            self._process.stdin.flush()

    def wait(self) -> roles.Answers:
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        readable, _, _ = select.select([self._process.stdout], (), (), limits_lab.LAB_READY_S)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            raise errors.PlatformError(f"{self._name} does not answer: {self._last_words()}")
        return msgspec.json.decode(line, type=roles.Answers)

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        return self._log.read_bytes()[-limits_lab.LAB_TAIL_BYTES :].decode("utf-8", "replace").strip()
