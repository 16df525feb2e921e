"""What a client gains by remembering networks: an app is started again and again on a device that moves between them.

Each start is a new process. One app keeps all that its client has written; beside it, on the same network a moment
later or earlier, the same app without what was learned of networks and names: plan and device token it keeps too.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

from stormline.core import errors
from stormline.lab import starts_client, starts_servers
from stormline.lab.chance import SeededRng
from stormline.lab.stage import Stage
from stormline.lab.starts_client import Told
from stormline.lab.starts_networks import NETWORKS, SHOP_WIFI, STAGE, Network, move

RESTARTS: Final = 20
AWAY_S: Final = 6 * 3600.0
"""Between two starts, by the clocks of device and centre: plans have expired, what is known of networks has aged."""
WAYS: Final = ("origin", "long", "names")
"""How the app's host is reached: at the origin's addresses from dispatch, over the long connection, or by its name
alone, without any platform."""
SUCCESS_PCT: Final = 99.9
REDUCTION_PCT: Final = 30.0
BEST_PCT: Final = 95.0
"""Returns whose first connection gives the first answer: a packet lost on the way lets another one be quicker."""
HARM_PCT: Final = 10.0
"""What remembering may seem to cost where nothing can be learned: so much is chance on a machine that others use."""
_NICE: Final = -10
"""Of what is measured: the machine's other work waits for it, as for the shaper."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One start of one app.

    Attributes:
        seed: of the series.
        network: where.
        way: how its host is reached.
        learns: it keeps what it learned.
        visit: 0 for the first time here.
        told: what became of it.
    """

    seed: int
    network: str
    way: str
    learns: bool
    visit: int
    told: Told

    @property
    def ok(self) -> bool:
        """All its first requests were answered within the user's patience."""
        return self.told.ok == starts_client.FIRST

    @property
    def straight(self) -> bool:
        """Its first connection was to the address that gave the first answer."""
        return self.told.begun[:1] == [self.told.address]

    def data(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {**asdict(self), "told": {key: _short(value) for key, value in asdict(self.told).items()}}


FIELDS: Final = "seed,network,way,learns,visit,first_s,all_s,ok,later_ok,straight,connections,waited_s,address"
"""Of `line`."""


def line(visit: Visit) -> str:
    """Give a start in one short line, to be kept."""
    told = visit.told
    values = (
        visit.seed, visit.network, visit.way, int(visit.learns), visit.visit, told.first_s, told.all_s, told.ok,
        told.later_ok, int(visit.straight), told.connections, told.waited_s, told.address,
    )  # fmt: skip
    return ",".join("" if each is None else str(_short(each)) for each in values)


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def journey(seed: int, restarts: int, networks: Sequence[Network] = NETWORKS) -> list[Network]:
    """Give the networks of the starts, in order: each once, then returns by chance, never twice the same in a row.

    Args:
        seed: of chance.
        restarts: on networks where something can be learned; the others come beside them, as often as one of those.
        networks: to move between.

    Raises:
        ConfigError: too few restarts to return to every network.
    """
    harsh = [each for each in networks if each.learnable]
    if restarts < 2 * len(harsh):
        raise errors.ConfigError(f"restarts: {2 * len(harsh)} or more, so that each network is returned to")
    rng = SeededRng("starts/journey", seed)
    rounds = -(-restarts // len(harsh))
    found: list[Network] = []
    for _ in range(rounds):
        order = sorted(networks, key=lambda _: rng.random())
        if found and found[-1] is order[0]:
            order.append(order.pop(0))
        found += order
    surplus = rounds * len(harsh) - restarts
    for each in [each for each in reversed(found) if each.learnable][:surplus]:
        found.reverse()
        found.remove(each)
        found.reverse()
    return found


class Cell(NamedTuple):
    """What the starts of one kind on one network took until the first right answer, medians in seconds.

    Attributes:
        network, way: see `Visit`.
        first_s: on the first visit.
        return_s: on later ones.
        without_s: on later ones, without what was learned.
        starts: of the app that learns.
        ok: of those that had all first requests answered within the user's patience.
        without_ok: the same of the app that does not learn, which starts as often.
    """

    network: str
    way: str
    first_s: float
    return_s: float
    without_s: float
    starts: int
    ok: int
    without_ok: int

    @property
    def reduction_pct(self) -> float:
        """How much less a return takes than the first visit."""
        return _less_pct(self.return_s, self.first_s)


def _less_pct(one: float, other: float) -> float:
    return 100.0 * (1.0 - one / other)


def median_s(visits: Iterable[Visit], *, learns: bool, again: bool) -> float:
    """Give the median time to the first right answer; a start without one counts as the user's whole patience.

    Args:
        visits: among others.
        learns: of the app that does, or of the other one.
        again: of returns, or of first visits.
    """
    return statistics.median(
        starts_client.PATIENCE_S if each.told.first_s is None else each.told.first_s
        for each in visits
        if each.learns is learns and (each.visit > 0) is again
    )


def cells(visits: Sequence[Visit]) -> list[Cell]:
    """Sum up by network and way, in the order of `NETWORKS` and `WAYS`."""
    found = []
    for network, way in ((network.name, way) for network in NETWORKS for way in WAYS):
        those = [each for each in visits if each.network == network and each.way == way]
        if not those:
            continue
        learners = [each for each in those if each.learns]
        found.append(
            Cell(
                network=network,
                way=way,
                first_s=median_s(those, learns=True, again=False),
                return_s=median_s(those, learns=True, again=True),
                without_s=median_s(those, learns=False, again=True),
                starts=len(learners),
                ok=sum(each.ok for each in learners),
                without_ok=sum(each.ok for each in those if not each.learns),
            )
        )
    return found


class Figure(NamedTuple):
    """One figure.

    Attributes:
        name: of it.
        value: with learning.
        unit: of all values.
        goal: what it is to reach.
        better: `higher` or `lower`.
        without: the same without learning.
    """

    name: str
    value: float
    unit: str
    goal: float
    better: Literal["lower", "higher"]
    without: float | None


def figures(visits: Sequence[Visit]) -> list[Figure]:
    """Give the figures: over all starts where something can be learned, by way and network, and the cost elsewhere."""
    harsh = {each.name for each in NETWORKS if each.learnable}
    there = [each for each in visits if each.network in harsh]
    returns = [each for each in there if each.visit]
    ok, without_ok = (_pct(each.ok for each in there if each.learns is learns) for learns in (True, False))
    best, without_best = (_pct(each.straight for each in returns if each.learns is learns) for learns in (True, False))
    found = [
        Figure("start30_success_pct", ok, "%", SUCCESS_PCT, "higher", without_ok),
        _reduction("return_median_reduction_pct", there),
        Figure("return_first_connection_best_pct", best, "%", BEST_PCT, "higher", without_best),
    ]
    found += [
        _reduction(f"return_{way}_reduction_pct", [each for each in there if each.way == way])
        for way in dict.fromkeys(each.way for each in there)
    ]
    for each in cells(visits):
        name = f"{each.network}_{each.way}"
        if each.network in harsh:
            most_ms = 1000.0 * each.first_s * (1.0 - REDUCTION_PCT / 100.0)
            times_ms = (1000.0 * each.return_s, 1000.0 * each.without_s)
            found.append(Figure(f"return_{name}_ms", times_ms[0], "ms", most_ms, "lower", times_ms[1]))
        else:
            more_pct = -_less_pct(each.return_s, each.without_s)
            found.append(Figure(f"harm_{name}_pct", more_pct, "%", HARM_PCT, "lower", None))
    return found


def _pct(those: Iterable[bool]) -> float:
    return 100.0 * statistics.fmean(those)


def _reduction(name: str, visits: Sequence[Visit]) -> Figure:
    """Give how much less returns take than first visits, in the median."""
    first_s = median_s(visits, learns=True, again=False)
    value, without = (_less_pct(median_s(visits, learns=learns, again=True), first_s) for learns in (True, False))
    return Figure(name, value, "%", REDUCTION_PCT, "higher", without)


class _Device:
    """The process that starts apps."""

    def __init__(self, stage: Stage) -> None:
        words = [sys.executable, "-m", "stormline.lab.starts_client"]
        self._process = stage.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        favour(self._process.pid)
        self._line()

    def start(self, start: starts_client.Start) -> Told:
        """Start an app and wait until it has ended.

        Raises:
            PlatformError: it did not end as it should.
        """
        if self._process.stdin is None:
            raise errors.PlatformError("starts: the device has no input")
        self._process.stdin.write(json.dumps(asdict(start)).encode() + b"\n")
        self._process.stdin.flush()
        return Told(**json.loads(self._line()))

    def _line(self) -> bytes:
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise errors.PlatformError("starts: the device's process has ended")
        return line

    def close(self) -> None:
        """End it."""
        _end(self._process)


def favour(pid: int) -> None:
    """Have what is measured go before the machine's other work, where the kernel shares cores out by session too."""
    os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def _end(process: "subprocess.Popen[bytes]") -> None:
    pipes: tuple[IO[bytes] | None, ...] = (process.stdin, process.stdout)
    process.kill()
    process.wait()
    for pipe in pipes:
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class _Platform:
    """The platform's servers in their process; `bundle` is the client's."""

    def __init__(self, process: "subprocess.Popen[bytes]", bundle: Path) -> None:
        self._process = process
        self.bundle = bundle

    def ready(self) -> None:
        """Wait until it is.

        Raises:
            PlatformError: it has ended.
        """
        if self._process.stdout is None or self._process.stdout.readline() != b"ready\n":
            raise errors.PlatformError("starts: the platform did not start, or has ended")

    def be_later(self, later_s: float) -> None:
        """Have the centre's day go on as the device's does."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"%r\n" % later_s)
            self._process.stdin.flush()
        self.ready()


@contextlib.contextmanager
def _platform(stage: Stage, folder: Path) -> Iterator[_Platform]:
    """Run the platform's servers.

    Raises:
        PlatformError: they did not start.
    """
    bundle = folder / "bundle.json"
    stage.topology.server.shell(starts_servers.addresses_script(stage.addresses))
    told = {
        "authority": str(stage.ca_file.parent),
        "bundle": str(bundle),
        "origin": stage.addresses[-1:] + stage.addresses[:-1],
        "upstream": f"http://{stage.dns_servers[0]}",
    }
    words = [sys.executable, "-m", "stormline.lab.starts_servers", json.dumps(told)]
    process = stage.topology.server.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        favour(process.pid)
        platform = _Platform(process, bundle)
        platform.ready()
        yield platform
    finally:
        _end(process)


class _App:
    """One app on the device, which learns or not."""

    def __init__(self, way: str, *, learns: bool, stage: Stage, bundle: Path, folder: Path) -> None:
        self.way = way
        self.learns = learns
        self._stage = stage
        self._bundle = "" if way == "names" else str(bundle)
        self._store = folder / f"{way}-{'learns' if learns else 'forgets'}"
        self._number = 0

    def start(self, device: _Device, later_s: float) -> Told:
        """Start it once."""
        if not self.learns:
            shutil.rmtree(self._store / "networks", ignore_errors=True)
            for path in self._store.glob("*.names"):
                path.unlink()
        base_url = f"https://{starts_servers.LONG_HOST}" if self.way == "long" else self._stage.base_url
        self._number += starts_client.FIRST + starts_client.LATER
        return device.start(
            starts_client.Start(
                base_url=base_url,
                ca_file=str(self._stage.ca_file),
                bundle=self._bundle,
                store=str(self._store),
                number=self._number,
                later_s=later_s,
            )
        )


def run(
    seed: int,
    folder: Path,
    *,
    restarts: int = RESTARTS,
    ways: Sequence[str] = WAYS,
    networks: Sequence[Network] = NETWORKS,
    on_visit: Callable[[Visit], None] = lambda _: None,
) -> list[Visit]:
    """Make one series of starts.

    Args:
        seed: of the journey, of the links and of who goes first.
        folder: an empty folder of its own.
        restarts: of each app on the networks where something can be learned.
        ways: of `WAYS`.
        networks: to move between.
        on_visit: told of each start.

    Raises:
        ConfigError: too few restarts.
        PlatformError: the laboratory cannot work here, or a process ended.
    """
    order = journey(seed, restarts, networks)
    rng = SeededRng("starts/first", seed)
    found: list[Visit] = []
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage(STAGE, seed, folder=folder / "keys"))
        favour(stage.origin.pid)
        platform = stack.enter_context(_platform(stage, folder))
        device = _Device(stage)
        stack.callback(device.close)
        apps = [
            _App(way, learns=learns, stage=stage, bundle=platform.bundle, folder=folder)
            for way in ways
            for learns in (True, False)
        ]
        move(stage, SHOP_WIFI)
        for app in apps:
            app.start(device, 0.0)
        visits = dict.fromkeys((each.name for each in networks), 0)
        for number, network in enumerate(order, start=1):
            move(stage, network)
            platform.be_later(number * AWAY_S)
            for app in sorted(apps, key=lambda _: rng.random()):
                visit = Visit(
                    seed=seed,
                    network=network.name,
                    way=app.way,
                    learns=app.learns,
                    visit=visits[network.name],
                    told=app.start(device, number * AWAY_S),
                )
                found.append(visit)
                on_visit(visit)
            visits[network.name] += 1
    return found


def run_all(
    seeds: Sequence[int],
    *,
    folder: Path,
    jobs: int,
    restarts: int = RESTARTS,
    ways: Sequence[str] = WAYS,
    on_visit: Callable[[Visit], None] = lambda _: None,
) -> list[Visit]:
    """Make a series for each seed, some side by side.

    Raises:
        ConfigError, PlatformError: see `run`.
    """

    def one(seed: int) -> list[Visit]:
        own = folder / str(seed)
        own.mkdir(parents=True)
        return run(seed, own, restarts=restarts, ways=ways, on_visit=on_visit)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return [each for series in pool.map(one, seeds) for each in series]
