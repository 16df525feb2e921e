"""`stormline up`, `status` and `doctor`: the platform on this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output

if TYPE_CHECKING:
    from stormline.assembly.platform import Event
    from stormline.settings.model import Settings

WHAT = {
    "dispatch": "scheduling centre (HTTPS)",
    "gateway": "long connections (TLS)",
    "admin": "business API (HTTP)",
    "apm": "telemetry and queries (HTTPS)",
    "relay": "sealed requests (HTTP)",
    "console": "operator's pages (HTTP)",
    "nats": "engine (NATS)",
    "shop": "demo upstream (HTTP)",
}


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (up, status, doctor):
        app.command(rich_help_panel="Platform")(command)


def up(
    demo: Annotated[
        bool, typer.Option("--demo", help="Also run the demo shop: one upstream, one RPC service.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROLE", help="Run only this role; repeatable.", show_default=False),
    ] = None,
    nats: Annotated[
        str, typer.Option("--nats", metavar="URL", help="Use this NATS server instead of the embedded one.")
    ] = "",
    state: output.StateOption = None,
    config: output.ConfigOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Run the whole platform on this machine until Ctrl-C: engine, dispatch, gateway, APM and console.

    A line that begins with 'ready' appears once every part answers. A second Ctrl-C kills what does not end.
    """
    import asyncio

    from stormline.settings import load

    overrides: dict[str, object] = {"nats.url": nats} if nats else {}
    settings = load.load(output.environ(), state=state, file=config, overrides=overrides)
    show = _JsonLines() if json else _Lines(settings, named=state is not None, demo=demo)
    asyncio.run(_up(settings, only=tuple(only or ()), demo=demo, show=show))


async def _up(settings: "Settings", *, only: tuple[str, ...], demo: bool, show: "_JsonLines | _Lines") -> None:
    import asyncio
    import signal

    from stormline.assembly.platform import Platform
    from stormline.net.clock import SystemClock, SystemRng

    def notify(event: "Event") -> None:
        try:
            show.event(event)
        except (BrokenPipeError, SystemExit):  # Rich makes a SystemExit of it
            output.nobody_reads()  # `stormline up | grep -m1 ready`: the platform goes on

    platform = Platform(settings, only=only, demo=demo, clock=SystemClock(), rng=SystemRng(), notify=notify)
    stop = asyncio.Event()

    def end() -> None:
        if stop.is_set():
            platform.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    # SIGHUP: the terminal went away, and with it the person who could end the platform.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    await platform.run(stop)


class _JsonLines:
    """One JSON object per event, for programs."""

    def event(self, event: "Event") -> None:
        import msgspec

        output.print_json(msgspec.to_builtins(event))


class _Lines:
    """Lines and one table, for people."""

    def __init__(self, settings: "Settings", *, named: bool, demo: bool) -> None:
        self._state = settings.state
        self._named = named
        self._demo = demo
        self._console = output.console()

    def event(self, event: "Event") -> None:
        match event.event:
            case "starting":
                self._console.print(f"starting on {event.state}")
            case "died":
                pause = f"; starting it again in {event.pause_s:g} s" if event.pause_s is not None else ""
                self._console.print(f"{event.part} died ({event.reason}){pause}", markup=False)
            case "back":
                self._console.print(f"{event.part} answers again", markup=False)
            case "ready":
                self._ready(event)
            case "stopping":
                self._console.print("stopping")

    def _ready(self, event: "Event") -> None:
        from rich.table import Table

        table = Table("part", "address", "what it is", box=None, pad_edge=False)
        for part, address in event.addresses.items():
            shown = event.console if part == "console" else address
            table.add_row(part, shown, WHAT.get(part, ""))
        self._console.print(table)
        self._console.print("\ntry, in a second terminal:")
        for command in self._commands():
            self._console.print(f"  {command}", markup=False)
        self._console.print(f"\nready: state in {self._state}, Ctrl-C stops it", markup=False)

    def _commands(self) -> list[str]:
        import shlex

        where = f"STORMLINE_STATE={shlex.quote(self._state)} " if self._named else ""
        demo = ["stormline get https://shop.demo/feed", "stormline call orders.create '{\"item\": 3}'"]
        plain = ["stormline status", "stormline bundle export --device d1 --out bundle.json"]
        return [f"{where}{command}" for command in [*(demo if self._demo else plain), "stormline apm top"]]


def status(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Show the parts of the running platform: process, address, and whether it answers.

    Exit code 1 where a part does not answer.
    """
    import asyncio

    from stormline.assembly import inspect
    from stormline.cli import admin

    where = admin.place(output.environ(), state)
    platform = admin.running(where)
    parts = asyncio.run(inspect.parts(where))
    if json:
        shown: dict[str, Any] = {"state": str(where.state), "pid": platform.pid, "app": platform.app}
        shown["console"] = platform.console_link
        output.print_json({**shown, "parts": [part._asdict() for part in parts]})
    else:
        from rich.table import Table

        table = Table("part", "pid", "address", "health", box=None, pad_edge=False)
        for part in parts:
            table.add_row(part.part, str(part.pid), part.address, part.health)
        console = output.console()
        console.print(table)
        if platform.console_link:
            console.print(f"\nconsole: {platform.console_link}", markup=False)
    if any(part.health != "ok" for part in parts):
        raise typer.Exit(1)


def doctor(state: output.StateOption = None, config: output.ConfigOption = None, json: output.JsonFlag = False) -> None:
    """Check this machine: what the platform needs, with a hint where something is missing.

    Exit code 1 where a check fails; warnings do not count.
    """
    from stormline.cli import checks

    found = checks.run(output.environ(), state=state, config=config)
    if json:
        output.print_json([check._asdict() for check in found])
    else:
        from rich.markup import escape
        from rich.table import Table

        table = Table("check", "", "found", "hint", box=None, pad_edge=False)
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in found:
            result = f"[{colours[check.result]}]{check.result}[/]"
            table.add_row(check.name, result, escape(check.found), escape(check.hint))
        output.console().print(table)
    if any(check.result == "fail" for check in found):
        raise typer.Exit(1)
