"""The shaper: a process that carries packets between TUN devices through link models, in real time.

Run as `python -m stormline.lab.shaper DESCRIPTOR`, where the descriptor is a connected SEQPACKET socket for
`lab.messages`; `lab.control.Shaper` does that. It ends when it is told to, and when the other end of the socket closes,
so it never outlives who started it.

One thread, no asyncio: `select` (whose time-out has microseconds where epoll's has milliseconds), one heap of packets
on their way, and 10 to 15 microseconds a packet.
"""

import contextlib
import ctypes
import gc
import heapq
import math
import os
import resource
import select
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from stormline.core import errors, limits_lab
from stormline.core.clock import Clock
from stormline.lab import messages as m
from stormline.lab import traces
from stormline.lab.chance import SeededRng
from stormline.lab.tun import open_tun
from stormline.net.clock import SystemClock
from stormline.netmodel.fades import Fades
from stormline.netmodel.link import LinkModel, Verdict
from stormline.netmodel.params import BlackoutMode, LinkParams, read_fades, read_params
from stormline.netmodel.schedule import read_schedule

_MCL_CURRENT_AND_FUTURE: Final = 3
_PR_SET_TIMERSLACK: Final = 29


class LatenessHistogram:
    """Counts of how late things happened, in fixed memory."""

    __slots__ = ("_counts", "_max_s", "_per_s")

    def __init__(self) -> None:
        self._per_s = 1 / limits_lab.SHAPER_LATENESS_STEP_S
        self._counts = [0] * (int(limits_lab.SHAPER_LATENESS_S_MAX * self._per_s) + 1)
        self._max_s = 0.0

    def add(self, late_s: float) -> None:
        """Count one; a negative lateness counts as none."""
        if late_s > self._max_s:
            self._max_s = late_s
        step = int(late_s * self._per_s)
        counts = self._counts
        counts[step if 0 <= step < len(counts) else (0 if step < 0 else -1)] += 1

    def summary(self) -> m.Lateness:
        """Give the percentiles, each rounded up to the histogram's step."""
        total = sum(self._counts)
        return m.Lateness(total, self._percentile(total, 0.5), self._percentile(total, 0.99), self._max_s)

    def _percentile(self, total: int, share: float) -> float:
        seen = 0
        for step, count in enumerate(self._counts):
            seen += count
            if total and seen >= share * total:
                return min((step + 1) / self._per_s, self._max_s)
        return 0.0


class Lane:
    """One direction of one link: a device to read, one to write, and the model between them."""

    __slots__ = ("direction", "link", "model", "output", "source")

    def __init__(self, link: str, direction: m.Direction, source: int, output: int, model: LinkModel) -> None:
        self.link = link
        self.direction = direction
        self.source = source
        self.output = output
        self.model = model


_OnTheWay: TypeAlias = tuple[float, int, Lane, int, bytes]
"""(when it is due, a number that keeps the order of equals, its lane, its ticket there, the packet)."""


_LaneCommand: TypeAlias = m.Reconfigure | m.StartBlackout | m.EndBlackout | m.Follow


class Shaper:
    """The process's one object: its lanes, the packets on their way, and what it counted."""

    def __init__(self, control: socket.socket, clock: Clock) -> None:
        self._control = control
        self._monotonic = clock.monotonic
        self._lanes: dict[int, Lane] = {}
        self._by_link: dict[str, dict[m.Direction, Lane]] = {}
        self._sources: list[int] = []
        self._traces = traces.load_all(())
        self._heap: list[_OnTheWay] = []
        self._sequence = 0
        self._next_change_s = math.inf
        self._next_tick_s = math.inf
        self._deliveries = LatenessHistogram()
        self._wakeups = LatenessHistogram()
        self._overflow_packets = 0
        self._write_errors = 0
        self._drops: deque[m.Drop] = deque()
        self._drops_forgotten = 0
        self._running = True

    # -- packets ------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Carry packets until told to stop."""
        control = self._control.fileno()
        sources = self._sources
        sources += [control, *self._lanes]
        monotonic, heap = self._monotonic, self._heap
        self._next_tick_s = monotonic() + limits_lab.SHAPER_TICK_S
        while self._running:
            now = self._deliver_due()
            if now >= self._next_change_s:
                self._advance(now)
            wake_s = min(self._next_tick_s, self._next_change_s, heap[0][0] if heap else math.inf)
            readable, _, _ = select.select(sources, (), (), max(0.0, wake_s - monotonic()))
            now = monotonic()
            if now >= self._next_tick_s:  # before anything else is served: a command may ask for it
                self._wakeups.add(now - self._next_tick_s)
                self._next_tick_s = now + limits_lab.SHAPER_TICK_S
            for source in readable:
                if source == control:
                    self._serve_command()
                else:
                    self._take(self._lanes[source])

    def _deliver_due(self) -> float:
        """Write all packets that are due; gives a moment up to which none is left."""
        heap, monotonic, late = self._heap, self._monotonic, self._deliveries
        now = monotonic()
        while heap and heap[0][0] <= now:
            due_s, _, lane, _, packet = heapq.heappop(heap)
            try:
                os.write(lane.output, packet)
            except OSError:
                self._write_errors += 1
            now = monotonic()
            late.add(now - due_s)
        return now

    def _take(self, lane: Lane) -> None:
        """Read packets that wait at a device and ask the model about each."""
        source, offer, monotonic = lane.source, lane.model.offer, self._monotonic
        for _ in range(limits_lab.SHAPER_READS_MAX):
            try:
                packet = os.read(source, limits_lab.SHAPER_PACKET_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError:
                # The device is gone for good; select would report it for ever. One that is only down is just silent.
                self._sources.remove(source)
                break
            now = monotonic()
            verdict = offer(len(packet), now)
            if verdict.reason is None:
                self._send_later(lane, verdict, packet)
            else:
                self._remember_drop(now, lane, len(packet), verdict, packet)
        change_s = lane.model.next_change()
        if change_s is not None and change_s < self._next_change_s:
            self._next_change_s = change_s

    def _send_later(self, lane: Lane, verdict: Verdict, packet: bytes) -> None:
        for due_s in verdict.deliver_at:
            if len(self._heap) >= limits_lab.SHAPER_PACKETS_MAX:
                self._overflow_packets += 1
                return
            self._sequence += 1
            heapq.heappush(self._heap, (due_s, self._sequence, lane, verdict.ticket, packet))

    def _remember_drop(self, now: float, lane: Lane, size: int, verdict: Verdict, packet: bytes) -> None:
        if len(self._drops) >= limits_lab.SHAPER_DROPS_KEPT_MAX:
            self._drops.popleft()
            self._drops_forgotten += 1
        reason = verdict.reason or ""
        self._drops.append(m.Drop(now, lane.link, lane.direction, size, str(reason), ip_protocol(packet)))

    # -- changes ------------------------------------------------------------------------------------------------------
    def _advance(self, now: float) -> None:
        """Let every model do what is due, and correct what was promised to packets on their way."""
        next_s = math.inf
        for lane in self._lanes.values():
            change_s = lane.model.next_change()
            if change_s is not None and change_s <= now:
                revised = lane.model.advance(now)
                if revised:
                    self._revise(lane, {verdict.ticket: verdict for verdict in revised}, now)
                change_s = lane.model.next_change()
            if change_s is not None:
                next_s = min(next_s, change_s)
        self._next_change_s = next_s

    def _revise(self, lane: Lane, revised: dict[int, Verdict], now: float) -> None:
        kept: list[_OnTheWay] = []
        taken: dict[int, bytes] = {}
        for entry in self._heap:
            if entry[2] is lane and entry[3] in revised:
                taken[entry[3]] = entry[4]
            else:
                kept.append(entry)
        self._heap[:] = kept
        heapq.heapify(self._heap)
        for ticket, packet in sorted(taken.items()):
            verdict = revised[ticket]
            if verdict.reason is None:
                self._send_later(lane, verdict, packet)
            else:
                self._remember_drop(now, lane, len(packet), verdict, packet)

    # -- commands -----------------------------------------------------------------------------------------------------
    def _serve_command(self) -> None:
        try:
            data = self._control.recv(limits_lab.SHAPER_MESSAGE_BYTES_MAX)
        except OSError:
            data = b""
        if not data:  # who started us is gone
            self._running = False
            return
        answer = self._answer(data)
        try:
            self._control.send(msgspec.json.encode(answer))
        except OSError:
            self._running = False

    def _answer(self, data: bytes) -> m.Answer:
        try:
            return self._do(msgspec.json.decode(data, type=m.Command))
        except (msgspec.DecodeError, errors.StormlineError) as error:
            return m.Failed(str(error), isinstance(error, errors.PlatformError))

    def _do(self, command: m.Command) -> m.Answer:
        match command:
            case m.Setup():
                return self._set_up(command)
            case m.AskStatistics():
                return self._statistics(command)
            case m.AskDrops():
                count = min(len(self._drops), limits_lab.SHAPER_DROPS_ANSWER_MAX)
                return m.Drops([self._drops.popleft() for _ in range(count)], self._drops_forgotten)
            case m.Stop():
                self._running = False
                return m.Done(self._monotonic())
            case m.SetFades():
                return self._set_fades(command)
            case _:
                return self._change_lanes(command)

    def _change_lanes(self, command: _LaneCommand) -> m.Done:
        # Understood for every lane before the first is changed: it holds for all or for none.
        lanes = self._lanes_of(command.link, command.direction)
        changes = [self._understand(command, lane.model) for lane in lanes]
        now = self._deliver_due()
        for change in changes:
            change(now)
        self._advance(now)
        return m.Done(now)

    def _understand(self, command: _LaneCommand, model: LinkModel) -> Callable[[float], None]:
        """Give what does the command to a model; nothing is done yet."""
        match command:
            case m.Reconfigure():
                base = LinkParams() if command.whole else model.params
                return partial(model.reconfigure, read_params(command.fields, base=base, traces=self._traces))
            case m.StartBlackout():
                return partial(_start_blackout, model, _mode(command.mode), command.duration_s)
            case m.EndBlackout():
                return model.end_blackout
            case m.Follow():
                schedule = read_schedule(
                    command.steps, repeat_s=command.repeat_s, base=model.params, traces=self._traces
                )
                return partial(model.set_schedule, schedule if command.steps else None, start_s=command.start_s)

    def _set_fades(self, command: m.SetFades) -> m.Done:
        lanes = self._lanes_of(command.link, m.Direction.BOTH)
        now = self._deliver_due()
        start_s = now if command.start_s is None else command.start_s
        fades = _fades(command.link, command.fades, command.seed, start_s)
        for lane in lanes:
            lane.model.set_fades(fades, now)
        self._advance(now)
        return m.Done(now)

    def _lanes_of(self, link: str, direction: m.Direction) -> list[Lane]:
        lanes = self._by_link.get(link)
        if lanes is None:
            raise errors.ConfigError(f"no link named {link!r}; there are {', '.join(self._by_link) or 'none yet'}")
        return list(lanes.values()) if direction is m.Direction.BOTH else [lanes[direction]]

    def _statistics(self, command: m.AskStatistics) -> m.Statistics:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        answer = m.Statistics(
            at_s=self._monotonic(),
            links=[_count(lane) for lane in self._lanes.values()],
            deliveries=self._deliveries.summary(),
            wakeups=self._wakeups.summary(),
            overflow_packets=self._overflow_packets,
            write_errors=self._write_errors,
            cpu_s=usage.ru_utime + usage.ru_stime,
        )
        if command.reset_lateness:
            self._deliveries, self._wakeups = LatenessHistogram(), LatenessHistogram()
        return answer

    # -- start --------------------------------------------------------------------------------------------------------
    def wait_for_setup(self) -> None:
        """Answer commands until one sets the links up, or the other end is gone."""
        while self._running and not self._lanes:
            self._serve_command()

    def _set_up(self, setup: m.Setup) -> m.Ready:
        if self._lanes:
            raise errors.ConfigError("a shaper is set up once")
        folder = traces.RECORDED_FOLDER if setup.trace_folder is None else Path(setup.trace_folder)
        self._traces = traces.load_all(setup.traces, folder)
        names = [link.name for link in setup.links]
        if not names or len(set(names)) != len(names):
            raise errors.ConfigError("a shaper needs links, each with a name of its own")
        opened: list[int] = []
        try:
            for link in setup.links:
                self._add_link(link, opened)
        except BaseException:
            self._lanes.clear()
            self._by_link.clear()
            for descriptor in opened:
                os.close(descriptor)
            raise
        # Nothing made from here on lives in cycles; what was made so far stays. So no collection ever interrupts.
        gc.collect()
        gc.freeze()
        gc.disable()
        return m.Ready(*take_priority()) if setup.real_time else m.Ready("other", False)

    def _add_link(self, link: m.LinkSetup, opened: list[int]) -> None:
        now = self._monotonic()
        up = read_params(link.up, traces=self._traces)
        down = read_params(link.down, traces=self._traces)
        fades = _fades(link.name, link.fades, link.seed, now)
        near = open_tun(link.near.device, Path(link.near.netns))
        opened.append(near)
        far = open_tun(link.far.device, Path(link.far.netns))
        opened.append(far)
        ways = {m.Direction.UP: (near, far, up), m.Direction.DOWN: (far, near, down)}
        self._by_link[link.name] = {}
        for direction, (source, output, params) in ways.items():
            model = LinkModel(params, SeededRng(f"{link.name}/{direction}", link.seed), now, fades=fades)
            self._lanes[source] = Lane(link.name, direction, source, output, model)
            self._by_link[link.name][direction] = self._lanes[source]


def _fades(link: str, data: dict[str, Any] | None, seed: int, start_s: float) -> Fades | None:
    return None if data is None else Fades(read_fades(data), SeededRng(f"{link}/fades", seed), start_s)


def _count(lane: Lane) -> m.DirectionStatistics:
    counted = lane.model.statistics()
    return m.DirectionStatistics(
        link=lane.link,
        direction=lane.direction,
        offered_packets=counted.offered_packets,
        offered_bytes=counted.offered_bytes,
        delivered_packets=counted.delivered_packets,
        delivered_bytes=counted.delivered_bytes,
        held_packets=counted.held_packets,
        duplicated_packets=counted.duplicated_packets,
        reordered_packets=counted.reordered_packets,
        queue_bytes_max=counted.queue_bytes_max,
        lost={str(reason): count for reason, count in counted.lost.items()},
    )


def _start_blackout(model: LinkModel, mode: BlackoutMode, duration_s: float | None, now: float) -> None:
    model.start_blackout(mode, now, until_s=math.inf if duration_s is None else now + duration_s)


def _mode(word: str) -> BlackoutMode:
    try:
        return BlackoutMode(word)
    except ValueError:
        raise errors.ConfigError(f"blackout mode must be one of {', '.join(BlackoutMode)}, not {word!r}") from None


def ip_protocol(packet: bytes) -> int:
    """Give an IP packet's protocol number (IPv6: its first next header); 255 where it is no IP packet."""
    if len(packet) >= 20 and packet[0] >> 4 == 4:
        return packet[9]
    if len(packet) >= 40 and packet[0] >> 4 == 6:
        return packet[6]
    return 255


def take_priority() -> tuple[str, bool]:
    """Ask for real-time scheduling and for memory that is never swapped out.

    Returns:
        `fifo` or, where it was refused, `other`; and True where memory is locked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # without real time the kernel may round wake-ups up by 50 us
    locked = libc.mlockall(_MCL_CURRENT_AND_FUTURE) == 0
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(limits_lab.SHAPER_PRIORITY))
    except OSError:
        with contextlib.suppress(OSError):
            os.nice(-20)
        return "other", locked
    return "fifo", locked


def main(arguments: list[str]) -> int:
    """Run a shaper on the control socket whose descriptor is the one argument."""
    with socket.socket(fileno=int(arguments[0])) as control:
        shaper = Shaper(control, SystemClock())
        shaper.wait_for_setup()
        shaper.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
