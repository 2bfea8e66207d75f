"""Training from scratch to a score: Phalanx and plain torch with timm, alternating.

    python scripts/converge.py DIR --out RUNS.json [--models resnet50,efficientnet_b0]
        [--sides phalanx,timm] [--seeds 0,1,2] [--epochs 10] [--image-size 128] [--seconds 560]
        [--together] [--workers 4]
    python scripts/converge.py --table RUNS.json...

DIR has train/CLASS/*.jpg and val/CLASS/*.jpg. Every run is a separate process, `phalanx train`
with its defaults or scripts/plain_timm.py, with the same recipe: batch, epochs, crops and flips,
Nesterov momentum, cosine with warm-up, label smoothing, scores and checkpoints. The wall clock runs
from the start of the process to its end. The first run of a model and a side on a machine has cold
caches and is listed separately.

Runs that are in RUNS.json already are not repeated, and none is started that would not end in
time: a second call continues. With --together all missing runs run at the same time, those of timm
without compiling: their scores count, their wall clocks do not. The second form prints the table
of one or several files.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).parent
SIDES = ("phalanx", "timm")
RECIPES: dict[str, dict[str, Any]] = {
    "resnet50": {"lr": 0.2, "decay": 5e-5},
    "efficientnet_b0": {"lr": 0.3, "decay": 2e-5},
}
COMMON: dict[str, Any] = {
    "batch_size": 256,
    "momentum": 0.9,
    "smoothing": 0.1,
    "warmup_epochs": 2,
    "crop_scale": (0.25, 1.0),
}
MACHINE = os.uname().nodename
SCORED = 3  # times per run
COLD_S = 150.0  # expected duration of a first run
_Row = dict[str, Any]


def phalanx_command(recipe: _Row, result: Path) -> list[str]:
    """The command line of one run; its result is the summary that it writes anyway."""
    low, high = recipe["crop_scale"]
    options = {
        "data": "folder",
        "data-dir": recipe["data_dir"],
        "model": recipe["model"],
        "image-size": recipe["image_size"],
        "batch-size": recipe["batch_size"],
        "epochs": recipe["epochs"],
        "epoch-tail": "drop",
        "optimizer": "nesterov",
        "momentum": recipe["momentum"],
        "lr": recipe["lr"],
        "l2-regularization": recipe["decay"],
        "weight-decay": 0,
        "lr-schedule": "cosine",
        "warmup-epoch": f"{recipe['warmup_epochs']}ep",
        "label-smoothing": recipe["smoothing"],
        "crop-scale": f"{low},{high}",
        "drop-path": 0,
        "dropout-rate": 0,
        "validation-frequency": recipe["every"],
        "ckpts-per-epoch": f"1/{recipe['every']}",
        "seed": recipe["seed"],
        "run-dir": result.parent / "run",
    }
    options |= {name: recipe[name] for name in ("device", "workers") if recipe[name]}
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "phalanx", "train", *words]


def read_phalanx(result: Path) -> _Row:
    """The result of a run of Phalanx."""
    run = result.parent / "run"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {"top1": summary["top1"], "images_per_s": summary["images_per_second"]}


def timm_command(recipe: _Row, result: Path) -> list[str]:
    """The same for the plain script."""
    file = result.parent / "recipe.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return [sys.executable, str(HERE / "plain_timm.py"), str(file), str(result)]


def read_timm(result: Path) -> _Row:
    """The result of a run of the plain script."""
    found = json.loads(result.read_text(encoding="utf-8"))
    return {"top1": found["top1"], "images_per_s": found["images_per_s"]}


WAYS = {"phalanx": (phalanx_command, read_phalanx), "timm": (timm_command, read_timm)}


class Run:
    """One run in its own process."""

    def __init__(self, name: _Row, recipe: _Row) -> None:
        self.name = name
        command, self._read = WAYS[name["side"]]
        self._folder = Path(mkdtemp(prefix="converge-"))
        self._result = self._folder / "result.json"
        recipe = {**recipe, "run_dir": str(self._folder)}
        self._log = (self._folder / "log").open("w+", encoding="utf-8")
        words = command(recipe, self._result)
        self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            words, stdout=self._log, stderr=subprocess.STDOUT, cwd=self._folder
        )

    def wait(self) -> _Row:
        """The result, and the wall clock."""
        failed = self._process.wait()
        row = {**self.name, "wall_s": time.perf_counter() - self._begin}
        if failed:
            self._log.seek(0)
            row["error"] = self._log.read()[-1500:]
        else:
            row |= self._read(self._result)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return row


class Plan:
    """The runs to do, and those that are done."""

    def __init__(self, words: argparse.Namespace) -> None:
        self._words, self._begin = words, time.perf_counter()
        self._rows: list[_Row] = []
        if words.out.exists():
            self._rows = json.loads(words.out.read_text(encoding="utf-8"))

    def list_missing(self) -> list[_Row]:
        """The keys of the missing runs, with sides alternating."""
        words = self._words
        size = {"epochs": words.epochs, "image_size": words.image_size}
        names = [
            {"model": model, "side": side, "seed": seed, **size}
            for seed in words.seeds
            for model in words.models
            for side in words.sides
        ]
        return [n for n in names if not any(n.items() <= row.items() for row in self._rows)]

    def start(self, name: _Row) -> Run | None:
        """Start a run; None if there is no time for it."""
        words = self._words
        like = {"model": name["model"], "side": name["side"], "machine": MACHINE}
        before = [row["wall_s"] for row in self._rows if like.items() <= row.items()]
        left = words.seconds - (time.perf_counter() - self._begin)
        if left < (min(before) * 1.2 if before else COLD_S):
            print(f"no time for {name}: {left:.0f} s are left", flush=True)
            return None
        recipe = {**COMMON, **RECIPES[name["model"]], **name}
        recipe |= {"data_dir": str(words.dir.resolve()), "device": words.device}
        recipe["compiled"] = not words.together
        recipe |= {"every": max(1, words.epochs // SCORED), "workers": words.workers}
        how = {"machine": MACHINE, "first": not before, "together": words.together}
        return Run({**name, **how}, recipe)

    def finish(self, run: Run | None) -> None:
        """Wait for a run and store its result."""
        if run is not None:
            self._rows.append(run.wait())
            print(json.dumps(self._rows[-1]), flush=True)
            self._words.out.write_text(json.dumps(self._rows, indent=1), encoding="utf-8")


def run_all(words: argparse.Namespace) -> None:
    """Do all missing runs, as long as there is time."""
    plan = Plan(words)
    if words.together:
        for run in [plan.start(name) for name in plan.list_missing()]:
            plan.finish(run)
        return
    for name in plan.list_missing():
        plan.finish(plan.start(name))


def spread(values: list[float], form: str) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{deviation}"


def print_table(files: list[Path]) -> None:
    """One line for each model and side."""
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    good = [row for row in rows if "error" not in row]
    print("| model | side | top-1 % | runs | images/s | wall clock, s | first run, s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for model in RECIPES:
        for side in SIDES:
            own = [row for row in good if row["model"] == model and row["side"] == side]
            if not own:
                continue
            alone = [row for row in own if not row["together"]]
            warm = [row["wall_s"] for row in alone if not row["first"]]
            cold = [row["wall_s"] for row in alone if row["first"]]
            clock = f"{median(warm):.1f} ({min(warm):.1f} to {max(warm):.1f})" if warm else ""
            rates = [row["images_per_s"] for row in alone if row["images_per_s"]]
            rate = f"{median(rates):,.0f}" if rates else ""
            print(
                f"| {model} | {side} | {spread([100 * row['top1'] for row in own], '.2f')} "
                f"| {len(own)} | {rate} | {clock} "
                f"| {', '.join(f'{seconds:.1f}' for seconds in cold)} |"
            )
    for row in rows:
        if "error" in row:
            print(f"\nfailed: {row['model']}, {row['side']}, seed {row['seed']}: {row['error']}")


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("converge.json"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*RECIPES])
    parser.add_argument("--sides", type=lambda text: text.split(","), default=[*SIDES])
    parser.add_argument("--seeds", type=lambda t: [int(s) for s in t.split(",")], default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--together", action="store_true", help="for scores alone")
    parser.add_argument("--workers", type=int, default=0, help="of a loader; 0 for all cores")
    parser.add_argument("--device", default="", help="of Phalanx; its own choice by default")
    parser.add_argument("--table", type=Path, nargs="+", metavar="RUNS.json")
    words = parser.parse_args()
    if words.table:
        print_table(words.table)
    elif words.dir is None:
        parser.error("which folder?")
    else:
        run_all(words)


if __name__ == "__main__":
    main()
