"""`stormline diagnose`: find out what is wrong with the way to a URL, and say it in words."""

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output
from stormline.cli.client import BundleOption
from stormline.core import errors
from stormline.core import limits_diagnosis as limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from stormline.client.configured import ForeignContext
    from stormline.outbound.doh_server import DohServer
    from stormline.telemetry.diagnosis import Diagnosis, NatProgress
    from stormline.wire.bundle import Bundle

_STYLES = {"ok": "green", "bad": "bold red", "unknown": "yellow", "skipped": "dim"}


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("diagnose", rich_help_panel="Client")(diagnose)


def diagnose(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="http or https; none: the network alone.")] = "",
    bundle: BundleOption = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="Trust these CA certificates too.", show_default=False)
    ] = None,
    doh: Annotated[
        list[str] | None,
        typer.Option("--doh", metavar="URL[,IP]", help="Server for DNS over HTTPS, with its address. Repeatable."),
    ] = None,
    captive_url: Annotated[
        str | None, typer.Option("--captive-url", metavar="URL", help="Clear HTTP that answers 204 or 'success'.")
    ] = None,
    plain_url: Annotated[
        str | None, typer.Option("--plain-url", metavar="URL", help="Page in clear HTTP to look at for changes.")
    ] = None,
    plain_sha256: Annotated[
        str, typer.Option("--plain-sha256", metavar="HEX", help="Digest that this page is known to have.")
    ] = "",
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Ask the routers on the way.")] = True,
    nat: Annotated[bool, typer.Option("--nat", help="Find out how long the network keeps a way back open.")] = False,
    nat_limit: Annotated[
        float,
        typer.Option(
            "--nat-limit",
            metavar="SECONDS",
            min=limits.DIAGNOSIS_NAT_LIMIT_S_MIN,
            max=limits.DIAGNOSIS_NAT_LIMIT_S_MAX,
            help="Longest silence that --nat tries.",
        ),
    ] = limits.DIAGNOSIS_NAT_LIMIT_S,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Find out what is wrong with the network or the way to a URL; exit code 0 where nothing is, else 1."""
    wished: dict[str, Any] = {"trace": trace, "plain_url": plain_url, "plain_sha256": plain_sha256}
    wished |= {"nat": nat, "nat_limit_s": nat_limit}
    from stormline.settings import discovery

    discovered = None if bundle is not None else discovery.find_bundle(output.environ(), state=state)
    platform = discovered.bundle if discovered is not None else None
    if bundle is not None:
        platform = discovery.read_bundle(bundle.expanduser())
    with _progress(json=json) as told:
        found = asyncio.run(_diagnose(url or None, platform, _trust(ca), [_server(each) for each in doh or ()],
                                      captive_url, wished | {"nat_told": told}))  # fmt: skip
    if json:
        import msgspec

        output.print_json(msgspec.to_builtins(found))
    else:
        _tell(output.console(), found)
    if found.verdict != "ok":
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress(*, json: bool) -> "Iterator[Callable[[NatProgress], None] | None]":
    """Give what shows how far `--nat` is, on a terminal alone."""
    if json or not sys.stdout.isatty():
        yield None
        return
    status = output.console().status("")

    def told(progress: "NatProgress") -> None:
        lost = "" if progress.lost_s is None else f", lost after {progress.lost_s:.0f} s"
        status.update(
            f"{progress.waiting} connections silent for {progress.waited_s:.0f} of {progress.limit_s:.0f} s;"
            f" answered after {progress.answered_s:.0f} s{lost}"
        )
        status.start()

    try:
        yield told
    finally:
        status.stop()


async def _diagnose(
    url: str | None,
    bundle: "Bundle | None",
    trust: "ForeignContext | None",
    doh: "list[DohServer]",
    captive_url: str | None,
    wished: dict[str, Any],
) -> "Diagnosis":
    from stormline.client.api import AsyncClient
    from stormline.client.config import Config

    config = Config(bundle=bundle, doh=tuple(doh), captive_url=captive_url)
    async with AsyncClient(config=config, verify=trust) as client:
        return await client.diagnose(url, **wished)


def _trust(ca: Path | None) -> "ForeignContext | None":
    """Give the system's trust with that of a file.

    Raises:
        ConfigError: the file holds no certificate.
    """
    if ca is None:
        return None
    import ssl
    from collections.abc import Sequence

    from stormline.net.trust import foreign_context

    def make(alpn: Sequence[str]) -> ssl.SSLContext:
        context = foreign_context(alpn)
        try:
            context.load_verify_locations(cafile=ca.expanduser())
        except ssl.SSLError as error:
            raise errors.ConfigError(f"{ca}: no CA certificates: {error.reason}") from error
        return context

    return make


def _server(text: str) -> "DohServer":
    from stormline.outbound.doh_server import DohServer

    url, *addresses = text.split(",")
    return DohServer(url, tuple(addresses))


def _tell(console: "Console", found: "Diagnosis") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("check", "where", "state", "found"):
        table.add_column(column, no_wrap=column != "found")
    for check in found.checks:
        address = str(check.data.get("address") or check.data.get("host") or "")
        port = check.data.get("port")
        where = f"{address}:{port}" if port and ":" not in address else address
        table.add_row(check.name, escape(where), f"[{_STYLES[check.state]}]{check.state}[/]", escape(check.detail))
    console.print(f"{escape(found.url or 'the network')}, in {found.took_s:.1f} s\n")
    console.print(table)
    sure = "" if found.confidence == "high" else " (not sure)"
    console.print(f"\n[bold]{found.verdict}{sure}: {escape(found.why)}[/]")
    console.print(f"[bold]{escape(found.hint)}[/]")
