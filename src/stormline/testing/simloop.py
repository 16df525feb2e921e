"""An asyncio loop on virtual time: hours pass in milliseconds, and the same seed does the same things.

    async def main() -> str:
        await asyncio.sleep(3600)
        return "an hour later"

    outcome = simloop.run(main)            # outcome.result == "an hour later", outcome.end_s == 3600.0

A run fails with `SimulationFailed` where something is wrong that a test on real time would not notice: a deadlock
(nothing is ready and nothing is scheduled), tasks left over, exceptions nobody took, coroutines nobody awaited, error
lines in our log, real sockets or threads, and time or steps beyond their bound.
"""

import asyncio
import contextlib
import functools
import gc
import hashlib
import inspect
import logging
import random
import selectors
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from stormline.core import errors, limits_lab

T = TypeVar("T")

WALL_START_S: Final = 1_800_000_000.0
"""The wall clock at virtual time 0, seconds since 1970: a fixed day, so that signed times repeat too."""
_CLEAN_UP_S: Final = 120.0
_CLEAN_UP_STEPS: Final = 10_000
_SETTLE_TURNS: Final = 64
"""Turns of the loop that what was cancelled at the end of a run gets to finish."""


class SimulationFailed(errors.StormlineError):
    """A run on virtual time went wrong.

    Attributes:
        problems: each in a line or more.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class SimDescriptor(Protocol):
    """A simulated socket: what `add_reader` and `add_writer` of the loop take instead of a real one."""

    def watch_reading(self, callback: Callable[[], object] | None) -> None:
        """Call back while there is something to read; None ends it."""
        ...

    def watch_writing(self, callback: Callable[[], object] | None) -> None:
        """Call back while there is room to write; None ends it."""
        ...


class _Selector(selectors.BaseSelector):
    """Waits for nothing: where the loop would sleep, time moves on."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Take the loop's own wake-up pipe and nothing else."""
        if self._keys:
            _refuse("a real descriptor")
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget the wake-up pipe."""
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move time on by `timeout`; there is never anything to read."""
        self._loop.turn(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Give what is registered."""
        return self._keys


def _refuse(what: str) -> NoReturn:
    raise SimulationFailed([f"{what} was used on virtual time"])


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Make it by `run`, or by `asyncio.Runner(loop_factory=VirtualLoop)` for a test of its own.

    Args:
        time_max_s: virtual seconds after which the run counts as stuck.
        steps_max: turns of the loop after which it counts as spinning.
    """

    def __init__(
        self, *, time_max_s: float = limits_lab.SIM_TIME_MAX_S, steps_max: int = limits_lab.SIM_STEPS_MAX
    ) -> None:
        self._virtual_s = 0.0
        self._time_max_s = time_max_s
        self._steps_max = steps_max
        self._hash = hashlib.blake2b(digest_size=16)
        self._listeners: list[Callable[[float, str], None]] = []
        self.steps = 0
        self.problems: list[str] = []
        super().__init__(_Selector(self))
        self.set_exception_handler(self._take_unhandled)

    # -- time --------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Give virtual seconds since the loop was made."""
        return self._virtual_s

    def turn(self, timeout_s: float | None) -> None:
        """Selector only: begin a turn, `timeout_s` later; None where there is nothing to wait for.

        Raises:
            SimulationFailed: deadlock, or a bound is passed.
        """
        if timeout_s is None:
            raise SimulationFailed(["deadlock: nothing is ready and nothing is scheduled", *self.waiting()])
        self.steps += 1
        self._virtual_s += max(0.0, timeout_s)
        if self._virtual_s > self._time_max_s:
            raise SimulationFailed([f"not over after {self._time_max_s:.0f} virtual seconds", *self.waiting()])
        if self.steps > self._steps_max:
            raise SimulationFailed(
                [f"not over after {self._steps_max} steps, at {self._virtual_s:.3f} s", *self.waiting()]
            )

    def extend(self) -> None:
        """Give a run that is over some more time and steps, to clean up."""
        self._time_max_s = self._virtual_s + _CLEAN_UP_S
        self._steps_max = self.steps + _CLEAN_UP_STEPS

    def waiting(self) -> list[str]:
        """Say of each task that is not done where it waits."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        return [f"  task {task.get_name()!r} waits at {_place(task)}" for task in tasks]

    def timers(self, modules: tuple[str, ...]) -> list[str]:
        """Name the callbacks of these modules, given by how they begin, that are scheduled and not cancelled."""
        names = []
        for handle in self._scheduled:  # type: ignore[attr-defined]
            if not handle.cancelled():
                function: Any = handle._callback
                while isinstance(function, functools.partial):
                    function = function.func
                if str(getattr(function, "__module__", "")).startswith(modules):
                    names.append(f"{function.__module__}.{function.__qualname__}")
        return sorted(names)

    # -- trace -------------------------------------------------------------------------------------------------------

    def trace(self, *parts: object) -> None:
        """Add an event to the run's hash: the moment and `parts`, which must not hold addresses of objects."""
        line = " ".join(str(part) for part in parts)
        self._hash.update(f"{self._virtual_s:.9f} {line}\n".encode("utf-8", "surrogateescape"))
        for listener in self._listeners:
            listener(self._virtual_s, line)

    def on_trace(self, listener: Callable[[float, str], None]) -> None:
        """Have every traced event told, for a log of one seed."""
        self._listeners.append(listener)

    @property
    def trace_hash(self) -> str:
        """The hash of all events up to now: equal runs have equal ones."""
        return self._hash.hexdigest()

    # -- what has no place here --------------------------------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Watch a simulated socket; refuse a real one."""
        _simulated(fd).watch_reading(functools.partial(callback, *args))

    def remove_reader(self, fd: Any) -> bool:
        """Watch it no longer."""
        _simulated(fd).watch_reading(None)
        return True

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Watch a simulated socket; refuse a real one."""
        _simulated(fd).watch_writing(functools.partial(callback, *args))

    def remove_writer(self, fd: Any) -> bool:
        """Watch it no longer."""
        _simulated(fd).watch_writing(None)
        return True

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Refuse: there are no threads."""
        _refuse("a thread")

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Refuse: there are no threads."""
        _refuse("a thread")

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Close a generator that nobody will finish, as every loop does; here without a thread's call."""
        if not self.is_closed():
            self.call_soon(self.create_task, agen.aclose())

    # -- problems ----------------------------------------------------------------------------------------------------

    def _take_unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, SimulationFailed):
            self.problems += error.problems
            return
        what = f": {type(error).__name__}: {error}{_where(error)}" if error is not None else ""
        task = context.get("task") or context.get("future")
        named = f" in task {task.get_name()!r}" if isinstance(task, asyncio.Task) else ""
        self.problems.append(f"unhandled{named}: {context['message']}{what}")


def _simulated(fd: Any) -> SimDescriptor:
    if not hasattr(fd, "watch_reading"):
        _refuse("a real descriptor")
    return fd  # type: ignore[no-any-return]


def _place(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack()
    if not stack:
        return "its start"
    frame = stack[-1]
    return f"{frame.f_code.co_filename.rpartition('stormline/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f" ({code.co_filename.rpartition('stormline/')[2]}:{trace.tb_lineno} {code.co_qualname})"


class SimClock:
    """`core.clock.Clock` of one simulated machine: monotonic time is the loop's, the wall clock can be stepped.

    Args:
        loop: where time comes from.
        wall_error_s: how wrong this machine's wall clock is from the start.
    """

    __slots__ = ("_loop", "wall_error_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wall_error_s: float = 0.0) -> None:
        self._loop = loop
        self.wall_error_s = wall_error_s

    def monotonic(self) -> float:
        """See `core.clock.Clock`."""
        return self._loop.time()

    def wall(self) -> float:
        """See `core.clock.Clock`."""
        return WALL_START_S + self._loop.time() + self.wall_error_s

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back where `seconds` is below zero."""
        self.wall_error_s += seconds


class SimRng:
    """`core.clock.Rng` from a seed; each part of a world takes one under its own name, so parts do not disturb another.

    Args:
        seed: the run's seed.
        name: the part's name.
    """

    __slots__ = ("_random", "_seed")

    def __init__(self, seed: int | str, name: str = "") -> None:
        self._seed = f"{seed}/{name}" if name else str(seed)
        self._random = random.Random(self._seed)  # noqa: S311  (chance that repeats is the purpose)

    def random(self) -> float:
        """A float in [0, 1)."""
        return self._random.random()

    def token_bytes(self, size: int) -> bytes:
        """`size` bytes, predictable by whoever knows the seed."""
        return self._random.randbytes(size)

    def uniform(self, low: float, high: float) -> float:
        """A float between `low` and `high`."""
        return low + (high - low) * self._random.random()

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def choice(self, options: "list[T] | tuple[T, ...]") -> T:
        """One of `options`."""
        return options[int(self._random.random() * len(options))]

    def gap_s(self, rate_per_s: float) -> float:
        """The time to the next event of a Poisson process."""
        return self._random.expovariate(rate_per_s)

    def child(self, name: str) -> "SimRng":
        """A source of its own for a part of this part."""
        return SimRng(self._seed, name)


class _Errors(logging.Handler):
    """Takes the lines of our own log that say a bug was met and survived."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        what = f": {type(error).__name__}: {error}{_where(error)}" if error is not None else ""
        self.lines.append(f"logged as an error by {record.name}: {record.getMessage()}{what}")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A run that went well.

    Attributes:
        result: what the coroutine gave.
        end_s: virtual seconds it took.
        steps: turns of the loop.
        trace_hash: of all events traced.
    """

    result: T
    end_s: float
    steps: int
    trace_hash: str


@contextlib.contextmanager
def _watched() -> Iterator[tuple[_Errors, list[warnings.WarningMessage]]]:
    """Collect error lines of our log, and warnings (never-awaited coroutines come as such)."""
    handler = _Errors()
    gc.freeze()  # what was there before is not searched again for each of a thousand runs
    log = logging.getLogger("stormline")
    propagate, level = log.propagate, log.level
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.ERROR)  # the lines of ten thousand storms interest nobody, and formatting them costs
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield handler, caught
    finally:
        gc.unfreeze()
        log.removeHandler(handler)
        log.propagate = propagate
        log.setLevel(level)


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    time_max_s: float = limits_lab.SIM_TIME_MAX_S,
    steps_max: int = limits_lab.SIM_STEPS_MAX,
    on_trace: Callable[[float, str], None] | None = None,
) -> Outcome[T]:
    """Run a coroutine to its end on a fresh `VirtualLoop`.

    Args:
        main: makes the coroutine; called inside the loop.
        time_max_s: bound of virtual time.
        steps_max: bound of turns.
        on_trace: told of every traced event, (seconds, line).

    Raises:
        SimulationFailed: see the module's text; all problems found are in it.
        BaseException: what `main` itself raised.
    """
    with _watched() as (log, caught):
        loop = VirtualLoop(time_max_s=time_max_s, steps_max=steps_max)
        if on_trace is not None:
            loop.on_trace(on_trace)
        try:
            result = loop.run_until_complete(_settled(loop, main))
            outcome = Outcome(result, loop.time(), loop.steps, loop.trace_hash)
        except SimulationFailed as error:
            raise SimulationFailed([*error.problems, *loop.problems, *log.lines]) from None
        finally:
            _end(loop)
    problems = [*loop.problems, *log.lines, *(f"warning: {each.message}" for each in caught)]
    if problems:
        raise SimulationFailed(problems)
    return outcome


async def _settled(loop: VirtualLoop, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main`, then see to it that nothing of it is left."""
    me = asyncio.current_task()
    result = await main()
    others: list[asyncio.Task[Any]] = []
    for _ in range(_SETTLE_TURNS):
        others = [task for task in asyncio.all_tasks() if task is not me]
        if not others:
            return result
        await asyncio.sleep(0)
    names = sorted(f"  {task.get_name()!r} waits at {_place(task)}" for task in others)
    raise SimulationFailed(["tasks left over:", *names])


def _end(loop: VirtualLoop) -> None:
    """Stop what still runs without letting it speak, and collect what only a collection brings to light."""
    left = [task for task in asyncio.all_tasks(loop) if not task.done()]
    try:
        if left:
            loop.extend()
            for task in left:
                task.cancel()
            with contextlib.suppress(BaseException):
                loop.run_until_complete(asyncio.wait_for(_wait_all(left), 60.0))
    finally:
        gc.collect()
        loop.close()


async def _wait_all(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def on_virtual_time(function: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """Turn an async test into a plain one that runs on virtual time."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        async def main() -> T:
            return await function(*args, **kwargs)

        return run(main).result

    # A test runner must see the arguments, for its fixtures, and no coroutine function.
    del wrapped.__wrapped__
    wrapped.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return wrapped
