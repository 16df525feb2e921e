"""Run the fuzz targets. Needs nothing but the standard library; uses atheris (coverage-guided) where it is installed.

python -m fuzz NAME --seconds 60 --seed 1        one target, NAME as in `fuzz/targets.py`, or `all`
python -m fuzz NAME --repeat FILE                run one input again, with its traceback
python -m fuzz NAME --atheris [FLAGS...]         hand the target to atheris, flags as libFuzzer takes them
"""

import argparse
import hashlib
import importlib
import itertools
import sys
import tempfile
from pathlib import Path

from fuzz import mutate
from fuzz.targets import TARGETS, Target
from stormline.net.clock import SystemClock

INPUT_S_MAX = 2.0
"""An input that takes longer than this to refuse is a way to keep a server busy, and a finding."""
FAILURES = Path(tempfile.gettempdir()) / "stormline-fuzz"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _keep(name: str, data: bytes, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}.bin"
    path.write_bytes(data)
    return path


def run(name: str, target: Target, *, seconds: float, seed: int, folder: Path) -> bool:
    """Fuzz one target for a time; True where its invariant held."""
    clock = SystemClock()
    seeds = target.seeds()
    end = clock.monotonic() + seconds
    number = 0
    for number in itertools.count():
        begin = clock.monotonic()
        if begin >= end:
            break
        data = mutate.make(seed, number, seeds)
        try:
            target.run(data)
            finding = "" if clock.monotonic() - begin < INPUT_S_MAX else f"it took more than {INPUT_S_MAX:g} s"
        except Exception as error:
            finding = f"{type(error).__name__}: {str(error)[:300]}"
        if finding:
            path = _keep(name, data, folder)
            _say(f"{name}: BROKEN by input {number} of seed {seed}: {finding}")
            _say(f"  repeat it with: python -m fuzz {name} --repeat {path}")
            return False
    _say(f"{name}: held for {number} inputs of seed {seed}")
    return True


def _run_atheris(target: Target, flags: list[str]) -> int:
    try:
        atheris = importlib.import_module("atheris")  # optional, not a dependency
    except ImportError:
        sys.stderr.write("atheris is not installed; leave --atheris out for the built-in mutations\n")
        return 2
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *flags], target.run)
    atheris.Fuzz()
    return 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description="Fuzz the parsers that meet bytes from outside."
    )
    parser.add_argument("name", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each target (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same inputs (default 1)")
    parser.add_argument("--out", type=Path, default=FAILURES, help=f"folder for failing inputs (default {FAILURES})")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="run this one input")
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, metavar="FLAG", help="run under atheris")
    args = parser.parse_args()
    if args.name == "all" and (args.repeat or args.atheris is not None):
        parser.error("name one target for --repeat and --atheris")
    if args.atheris is not None:
        return _run_atheris(TARGETS[args.name], args.atheris)
    if args.repeat:
        TARGETS[args.name].run(args.repeat.read_bytes())
        _say(f"{args.name}: held")
        return 0
    names = list(TARGETS) if args.name == "all" else [args.name]
    held = [run(name, TARGETS[name], seconds=args.seconds, seed=args.seed, folder=args.out) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
