"""Trials until the time is up; then a table, and how to repeat what broke the law."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random, SystemRandom
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: forks with threads hang
os.environ.pop("DATA_DIR", None)

from phalanx.cli.main import main as run_phalanx
from phalanx.report import plots
from phalanx.units import format_seconds
from torture import breaks, damage, inputs
from torture.command import adopt_orphans
from torture.law import Outcome, Violation
from torture.material import Material, Trial, train_words

AREAS = {  # name: (how often, trial)
    "kills": (3, breaks.break_training),
    "kills of data build": (1, breaks.break_build),
    "checkpoint files": (3, damage.damage_checkpoint),
    "run folder files": (3, damage.damage_records),
    "data files": (6, damage.damage_data),
    "data files, looked at": (2, damage.read_damaged_data),
    "options": (4, inputs.fuzz_options),
    "config files": (3, inputs.fuzz_config),
    "hostile names": (2, inputs.name_badly),
    "full disks": (2, breaks.fill_disk),
}
_INDENT = "    "


class Result(NamedTuple):
    """What became of one trial."""

    number: int
    area: str
    outcome: Outcome | None  # None: the law was broken
    how: str
    violation: str = ""


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="begin no trial after them")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, help="the number of one trial, to repeat it")
    parser.add_argument("--area", choices=AREAS, help="trials of one area alone")
    parser.add_argument("--verbose", action="store_true", help="a line for every trial")
    return parser.parse_args()


def _run_trial(
    material: Material, root: Path, *, seed: int, number: int, area: str | None
) -> Result:
    """One trial, which depends on the seed and its number alone."""
    chance = Random(f"{seed}/{number}")
    [drawn] = chance.choices([*AREAS], [weight for weight, _ in AREAS.values()])
    area = area or drawn
    folder = root / f"trial-{number}"
    folder.mkdir()
    trial = Trial(material, folder, chance)
    try:
        outcome = AREAS[area][1](trial)
        return Result(number, area, outcome, " ".join(trial.told))
    except Violation as violation:
        return Result(number, area, None, " ".join(trial.told), str(violation))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up(root: Path) -> Material:
    """Everything is imported here, once for all the forks."""
    plots.draw_svg = lambda *_, label, **__: f"<svg><title>{label}</title></svg>"  # half a second
    material = Material(root)
    work = root / "warm-up"
    work.mkdir()
    material.data("idx").rename(work / "data")
    material.data.cache_clear()
    home, out = Path.cwd(), os.dup(1)
    os.chdir(work)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = run_phalanx(train_words("idx"))
    sys.stdout.flush()
    os.dup2(out, 1)
    os.chdir(home)
    assert code == 0
    return material


def _print_table(results: list[Result]) -> None:
    columns = [*Outcome, None]
    counts = Counter((result.area, result.outcome) for result in results)
    print(f"\n{'area':<24}{'trials':>8}" + "".join(f"{c or 'VIOLATIONS':>12}" for c in columns))
    areas = [area for area in AREAS if any(result.area == area for result in results)]
    for area in areas:
        cells = [counts[area, column] for column in columns]
        print(f"{area:<24}{sum(cells):>8}" + "".join(f"{cell or '-':>12}" for cell in cells))
    totals = [sum(counts[area, column] for area in areas) for column in columns]
    print(f"{'all':<24}{sum(totals):>8}" + "".join(f"{total or '-':>12}" for total in totals))
    for how in sorted({r.how for r in results if r.outcome is Outcome.SKIPPED}):
        print(f"skipped: {how}")


def _print_violation(result: Result, *, seed: int, area: str | None) -> None:
    what, *details = result.violation.splitlines()
    print(f"\nVIOLATION in trial {result.number} ({result.area}): {what}")
    for line in [result.how.rstrip(" ,:"), *details]:
        print(f"{_INDENT}{line[:300]}")
    only = f" --area '{area}'" if area else ""
    print(f'{_INDENT}repeat: make torture TORTURE="--seed {seed} --only {result.number}{only}"')


def main() -> int:
    """Run trials; 1 when one of them broke the law."""
    args = _parse_args()
    print(f"seed {args.seed}; {format_seconds(args.seconds)} of trials at most", flush=True)
    adopt_orphans()
    began, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        material = _warm_up(Path(name))
        number = args.only or 1
        while time.monotonic() - began < args.seconds:
            result = _run_trial(material, Path(name), seed=args.seed, number=number, area=args.area)
            results.append(result)
            if result.outcome is None:
                _print_violation(result, seed=args.seed, area=args.area)
            elif args.verbose or args.only:
                print(f"trial {number}, {result.area}: {result.outcome}: {result.how}")
            sys.stdout.flush()
            number += 1
            if args.only:
                break
    _print_table(results)
    broken = sum(result.outcome is None for result in results)
    verdict = f"{broken} broke the law" if broken else "all kept the law"
    print(f"\n{len(results)} trials in {format_seconds(time.monotonic() - began)}: {verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
