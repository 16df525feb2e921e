"""`stormline lab relay`: what a relay is worth."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stormline.bench.results import Row
    from stormline.lab.relays import Case, Curve
    from stormline.lab.results import Result

PARTS = ("incident", "ablation")
DURATION_S = {"incident": 60.0, "ablation": 24.0}


def relay(
    seed: Annotated[list[int] | None, typer.Option("--seed", metavar="N", help="Seed; repeatable. Default 1.")] = None,
    part: Annotated[str, typer.Option("--part", metavar="NAME", help="incident or ablation; 'all' runs both.")] = "all",
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs side by side.")] = 2,
    direct_pct: Annotated[
        float | None, typer.Option("--direct-pct", metavar="PCT", help="Connections to the origin that are lost.")
    ] = None,
    on_site_pct: Annotated[
        float | None, typer.Option("--on-site-pct", metavar="PCT", help="The same of the relay beside it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep it in lab_relay.json there, beside the other part."),
    ] = None,
    json: output.JsonFlag = False,
) -> None:
    """Have an operator lose most connections to an origin, with and without relays; and weak networks the same.

    In the incident each request is the first of an app. Failures there: without a relay, with one beside the origin,
    with one elsewhere too. On the weak networks: success with and without a relay, for a client that knows the origin's
    addresses and one that knows its name alone.
    """
    from stormline.lab import relays
    from stormline.lab.namespaces import require_lab

    if part not in (*PARTS, "all"):
        raise errors.ConfigError(f"--part {part}: expected one of {', '.join(PARTS)}, all")
    seeds = seed or [1]
    shares = (relays.DIRECT_PCT if direct_pct is None else direct_pct,
              relays.ON_SITE_PCT if on_site_pct is None else on_site_pct)  # fmt: skip
    require_lab()
    found: dict[str, Any] = {}
    rows: list[Row] = []
    if part in ("incident", "all"):
        cases = relays.incident(seeds, DURATION_S["incident"], direct_pct=shares[0], on_site_pct=shares[1])
        some, told = _incident(cases, _made(cases, jobs), shares)
        rows += some
        found["incident"] = told
    if part in ("ablation", "all"):
        cases = relays.ablation(seeds, DURATION_S["ablation"])
        some, found["ablation"] = _ablation(cases, _made(cases, jobs))
        rows += some
    if out is not None:
        _keep(rows, found, out.expanduser())
    if json:
        output.print_json(found)
    else:
        for each in rows:
            print(f"{each.name}: {each.ours:g} {each.unit} (goal {each.goal:g})")


def _made(cases: "Sequence[Case]", jobs: int) -> "list[Result]":
    from stormline.lab import relays

    with output.ended_cleanly(), tempfile.TemporaryDirectory(prefix="stormline-lab-") as folder:
        return relays.run_all(cases, folder=Path(folder), jobs=jobs, environ=output.environ())


def _incident(
    cases: "Sequence[Case]", found: "Sequence[Result]", shares: tuple[float, float]
) -> "tuple[list[Row], dict[str, Any]]":
    from stormline.bench.results import row
    from stormline.lab import relays

    by_name = {
        name: [result for case, result in zip(cases, found, strict=True) if case.name == name] for name in relays.CURVES
    }
    curves = [relays.curve(name, results) for name, results in by_name.items()]
    none, on_site, off_site = (each.failed_pct for each in curves)
    rows = [
        row("incident_on_site_failed_pct", on_site, "%", goal=5.0, peer="no relay", peer_value=none),
        row("incident_off_site_failed_pct", off_site, "%", goal=0.5, peer="no relay", peer_value=none),
    ]
    told = {
        "lost_direct_pct": shares[0],
        "lost_on_site_pct": shares[1],
        "seeds": sorted({case.seed for case in cases}),
        "duration_s": cases[0].duration_s,
        "begin_s": relays.BEGIN_S,
        "curves": [_shown(each) for each in curves],
        "distrusted": sum(bool(each.distrust) for each in found),
    }
    return rows, told


def _shown(curve: "Curve") -> dict[str, Any]:
    return {
        "name": curve.name,
        "requests": curve.requests,
        "failed_pct": round(curve.failed_pct, 2),
        "median_s": curve.median_s,
        "success_by_time": [{"at_s": at_s, "requests": count, "ok_pct": pct} for at_s, count, pct in curve.points],
    }


def _ablation(cases: "Sequence[Case]", found: "Sequence[Result]") -> "tuple[list[Row], list[dict[str, Any]]]":
    """Give, for each network and client, success with the relay and without it."""
    from stormline.bench.results import row
    from stormline.lab import relays

    rows, told = [], []
    for name in relays.PROFILES:
        for client, off in (("whole", ()), ("name_alone", relays.ALONE)):
            arms = {}
            for arm, extra in (("with", ()), ("without", ("relay",))):
                some = [
                    result
                    for case, result in zip(cases, found, strict=True)
                    if case.name == name and case.off == (*off, *extra)
                ]
                asked = sum(each.requests for each in some)
                arms[arm] = {
                    "runs": len(some),
                    "requests": asked,
                    "ok_pct": round(100.0 * sum(each.ok for each in some) / asked, 2),
                    "ok_3s_pct": round(100.0 * sum(each.ok_3s for each in some) / asked, 2),
                    "distrusted": sum(bool(each.distrust) for each in some),
                }
            ours, less = arms["with"]["ok_pct"], arms["without"]["ok_pct"]
            rows.append(
                row(f"{name}_{client}_success_pct", ours, "%", goal=less, better="higher", peer="without relay",
                    peer_value=less)
            )  # fmt: skip
            told.append({"profile": name, "client": client, **arms})
    return rows, told


def _keep(rows: "Sequence[Row]", found: dict[str, Any], folder: Path) -> None:
    """Write the parts that were run; what the file has of the other stays."""
    import msgspec

    from stormline.bench import results

    path = folder / "lab_relay.json"
    old: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    fresh = {each.name for each in rows}
    kept = [each for each in old.get("rows", []) if each["name"] not in fresh]
    document = results.document("lab_relay", list(rows))
    document["rows"] = [*document["rows"], *kept]
    results.keep({**document, **{part: old[part] for part in PARTS if part in old}, **found}, folder)
