"""Trains the same few steps in several ways, and compares the bits of what they wrote.

Every way is a run of its own: `phalanx train` in a process, as a user would start it.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.config.schema import Config
from phalanx.disk import quote_path
from phalanx.errors import UserError
from phalanx.plan.plan import Plan
from phalanx.report.compare import compare_runs, describe_divergence
from phalanx.report.folder import open_run, read_json_object
from phalanx.units import format_plural

_STRAIGHT = "straight"  # the folder of the run that the others are compared with
_SAME_FILES = ("metrics.jsonl", "validation.csv", "predictions.csv")
_POLL_S = 0.002
_ERROR_PREFIX = "phalanx train: "
_OUTPUT_SHOWN = 2_000  # characters, from the end


class _TrainingFailed(UserError):
    """A training of the check failed for a reason that has nothing to do with the promises."""

    def __init__(self, what: str, exit_code: int, log: Path) -> None:
        output = log.read_text(errors="replace").strip()[-_OUTPUT_SHOWN:]
        message = output.rpartition(_ERROR_PREFIX)[2]
        super().__init__(f"training {what} failed ({log}): {message}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Variation:
    """Another way to train the same steps, which must end with the same bits."""

    folder: str
    what: str
    flags: Mapping[str, str] = field(default_factory=dict)
    kill_after: int = 0  # the step whose checkpoint is awaited before SIGKILL; 0: no kill
    why_not: str = ""  # the reason if it cannot be tried


@dataclass(frozen=True)
class Finding:
    """What a variation showed."""

    what: str
    result: Literal["same", "different", "not tried"]
    detail: str


def list_variations(config: Config, plan: Plan) -> list[_Variation]:
    """The ways to train that the promises call equal."""
    kill_after = next(step for step in range(1, plan.total_steps + 1) if plan.save.is_due(step))
    workers = 0 if plan.workers else 2
    variations = [
        _Variation("killed", f"killed after step {kill_after}, resumed", kill_after=kill_after),
        _Variation(
            "workers",
            f"{format_plural(workers, 'worker')} instead of {plan.workers}",
            {"workers": str(workers)},
        ),
    ]
    return [*variations, _vary_devices(config, plan)]


def _vary_devices(config: Config, plan: Plan) -> _Variation:
    """The same replicas and stages on another number of devices."""
    ranks, parts = plan.layout.ranks, plan.replicas * plan.stages
    devices = 1 if ranks > 1 else 2
    what = f"{format_plural(devices, 'device')} instead of {ranks}"
    why_not = ""
    if parts == 1:
        what, why_not = "another number of devices", "there is one replica with one stage"
    elif plan.layout.bn_span > 1:
        why_not = "with --bn-span, devices agree only to rounding"
    elif config.machine.no_fold:
        why_not = "--no-fold forbids it"
    elif ranks == 1 and plan.device != "cpu":
        why_not = "it runs on one GPU"
    return _Variation("devices", what, {"devices": str(devices)}, why_not=why_not)


def try_variations(
    words: Sequence[str],
    variations: Sequence[_Variation],
    folder: Path,
    *,
    begin: Callable[[str], None],
) -> Iterator[Finding]:
    """Train once undisturbed, then in each variation, and yield what each showed.

    words: of `phalanx train`, without --run-dir. folder: where the runs and their output go.
    begin: is told what is about to be trained.
    """
    begin("undisturbed")
    _train("undisturbed", words, folder / _STRAIGHT)
    for variation in variations:
        begin(variation.what)
        yield _try_variation(words, variation, folder)


def _try_variation(words: Sequence[str], variation: _Variation, folder: Path) -> Finding:
    run, why_not = folder / variation.folder, variation.why_not
    own = [f"--{name}={text}" for name, text in variation.flags.items()]
    if not why_not and variation.kill_after:
        why_not = _train_until_kill(words, run, variation.kill_after)
        words = ["--resume", str(run), *(word for word in words if word.startswith("--plugin="))]
    if why_not:
        return Finding(variation.what, "not tried", why_not)
    _train(variation.what, [*words, *own], run)
    straight = folder / _STRAIGHT
    if difference := _describe_difference(straight, run):
        more = f"phalanx compare {quote_path(straight)} {quote_path(run)}"
        return Finding(variation.what, "different", f"{difference}; {more} shows more")
    return Finding(variation.what, "same", "the same bits: weights, metrics and scores")


def _train(what: str, words: Sequence[str], run: Path) -> None:
    """Train to the end."""
    with _open_training(words, run) as process:
        exit_code = process.wait()
    if exit_code:
        raise _TrainingFailed(what, exit_code, _log_path(run))


def _train_until_kill(words: Sequence[str], run: Path, step: int) -> str:
    """Train until the checkpoint of a step is there, then SIGKILL; why not, if it came too late."""
    with _open_training(words, run) as process:
        while process.poll() is None:
            if list((run / "checkpoints").glob(f"step-*{step}")):
                process.kill()
            time.sleep(_POLL_S)
    if process.returncode > 0:
        raise _TrainingFailed("until it is killed", process.returncode, _log_path(run))
    return "" if process.returncode else "the run ended before it could be killed"


@contextmanager
def _open_training(words: Sequence[str], run: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that trains; it ends with the block, or with this process."""
    run_dir = [] if "--resume" in words else [f"--run-dir={run}"]
    with _log_path(run).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.cli.trial", "train", *words, *run_dir],
            stdin=subprocess.PIPE,  # nothing is written: it closes when we end, however we end
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _log_path(run: Path) -> Path:
    return run.with_suffix(".log")


def _describe_difference(a: Path, b: Path) -> str:
    """How two runs differ; empty if they ended with the same bits."""
    weights = [read_json_object(run / "summary.json")["weights_sha256"] for run in (a, b)]
    differ = [name for name in _SAME_FILES if _read(a / name) != _read(b / name)]
    if weights[0] == weights[1] and not differ:
        return ""
    comparison = compare_runs(open_run(a), open_run(b))
    if comparison.divergence is not None:
        return describe_divergence(comparison)
    return " and ".join([*["the weights"] * (weights[0] != weights[1]), *differ]) + " differ"


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
