"""`phalanx bench train` and `phalanx bench infer`: images/s, and whether they are reliable."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from phalanx.bench.bottleneck import INPUT_KINDS
from phalanx.catalog.datasets import DATASETS
from phalanx.cli.bench_table import print_results
from phalanx.cli.command import ALL_OPTIONS, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.measurement_flags import RANDOM_DATA_FLAGS, read_batch_sizes, read_random_data_kind
from phalanx.cli.progress import ProgressLine
from phalanx.cli.ranks import run_on_ranks
from phalanx.cli.validate import (
    CHECKPOINT_FLAG,
    FRESH_MODEL_OPTIONS,
    SCORING_OPTIONS,
    print_unused_options,
    read_target_name,
    refuse_model_options,
)
from phalanx.config.schema import OPTIONS
from phalanx.errors import EXIT_UNTRUSTED, ConfigError, suggest

if TYPE_CHECKING:
    from phalanx.assemble.dataset_summary import PlannedRun
    from phalanx.assemble.scoring_target import ScorableCheckpoint
    from phalanx.bench.blocks import Timing
    from phalanx.bench.measurement import BenchJob
    from phalanx.bench.result import BenchResult
    from phalanx.config.read import Settings
    from phalanx.config.schema import Config
    from phalanx.parallel.ranks import Ranks
    from phalanx.plan.plan import Plan

*_RANDOM_KINDS, _REAL = INPUT_KINDS
_RANDOM_BATCHES = 1000  # of each device, in one pass over noise
_LONGEST_S = 3600.0
_TIMING_FLAGS = (
    Argument(
        "--inputs",
        "Kind of images: synthetic (noise on the device), generated (noise from the host), real "
        "(the data itself), or several, such as synthetic,generated,real, to see which is the "
        "limit.  [the data as given]",
    ),
    *RANDOM_DATA_FLAGS,
    Argument("--seconds", "Seconds to measure, all blocks together.  [15]", default="15"),
    Argument(
        "--warmup",
        "Seconds of warm-up before that, after the first step or batch.  [3]",
        default="3",
    ),
    Argument("--blocks", "Number of parts that are timed separately.  [10]", default="10"),
    Argument("--json", "Print one JSON object per measurement.", switch=True),
)


@command(
    "bench train",
    "Measure images/s of training: the loop and the step of `train`, block by block, without the "
    "warm-up. Exits with code 7 if the figures are unreliable.",
    *PRESET_ARGS,
    *_TIMING_FLAGS,
    usage="[PRESET|FILE] [--option value]... [--inputs KIND,...] [--seconds S] [--warmup S] "
    "[--blocks N] [--json]",
    # nothing is recorded
    options=tuple(n for n in ALL_OPTIONS if n != "profile" and OPTIONS[n].section != "trackers"),
    examples={
        "phalanx bench train": "the demo",
        "phalanx bench train imagenet-resnet50 --synthetic-data": "needs no data",
        "phalanx bench train imagenet-resnet50 --data-dir ~/imagenet --inputs "
        "synthetic,generated,real": "does the disk keep up with the model?",
        "phalanx bench train imagenet-resnet50 --generated-data --replicas 4 --devices 2": (
            "four replicas on two devices"
        ),
        "phalanx bench train --json": "for a script",
    },
)
def _bench_train(args: ParsedArgs) -> int:
    """Measure training with each kind of data, and print."""
    return run_on_ranks(args, lambda: _prepare_training(args))


@command(
    "bench infer",
    "Measure images/s of inference, with the forward pass that scores and serves, and the latency "
    "of one batch at a time. Exits with code 7 if the figures are unreliable.",
    Argument(
        "target",
        "A run, a checkpoint, or a preset or model by name, with random weights.",
        metavar="RUN|...",
    ),
    Argument("--config", "The same, as a flag."),
    CHECKPOINT_FLAG,
    Argument(
        "--batch-size", "Images in a batch, or several sizes in turn, such as 1,4,16.", items=True
    ),
    *_TIMING_FLAGS,
    usage="RUN|CHECKPOINT|PRESET|MODEL [--batch-size N,...] [--option value]... "
    "[--inputs KIND,...] [--seconds S] [--warmup S] [--blocks N] [--json]",
    options=(
        *SCORING_OPTIONS, "plugin", *FRESH_MODEL_OPTIONS, "determinism", "half-type", "kernels",
    ),
    examples={
        "phalanx bench infer resnet50 --synthetic-data --batch-size 1,4,16,32,64": (
            "throughput and latency over batch sizes"
        ),
        "phalanx bench infer resnet50 --generated-data --batch-size 16 --devices 4": (
            "on four devices, with images from the host"
        ),
        "phalanx bench infer runs/demo": "a trained model on its own validation images",
    },
)  # fmt: skip
def _bench_infer(args: ParsedArgs) -> int:
    """Measure inference in batches of each size, and print."""
    return run_on_ranks(args, lambda: _prepare_inference(args))


# --- what to measure ---


class _Measurement(NamedTuple):
    """One measurement of a benchmark."""

    label: str
    data: str
    measure: Callable[["BenchJob", "Ranks | None"], "BenchResult"]


@dataclass(frozen=True, kw_only=True)
class _Benchmark:
    """Measurements to make one after the other, checked without torch."""

    kind: str
    name: str
    args: ParsedArgs
    measurements: Sequence[_Measurement]
    plan: "Plan"  # of the first of them, as is the config
    config: "Config"

    def run(self, ranks: "Ranks | None" = None) -> int:
        """Measure and print; all ranks measure, and the first prints."""
        from phalanx.bench.bottleneck import find_bottlenecks
        from phalanx.bench.measurement import BenchJob

        prints, progress = ranks is None or ranks.rank == 0, ProgressLine()
        if prints:
            print_unused_options(self.args, self.plan)
        timing, results = _read_timing(self.args), []

        def show(label: str, block: int, blocks: int) -> None:
            if prints:
                progress.show(f"{label}: block {block} of {blocks}")

        try:
            for label, data, measure in self.measurements:
                job = BenchJob(
                    kind=self.kind,
                    name=self.name,
                    command=self.args.line,
                    data=data,
                    timing=timing,
                    done=partial(show, label),
                )
                results.append(measure(job, ranks))
        finally:  # if one fails, the results so far are still printed
            results = find_bottlenecks(results)
            if prints:
                progress.end()
            if prints and results:
                self._print(results)
        return 0 if all(result.is_trusted for result in results) else EXIT_UNTRUSTED

    def _print(self, results: "Sequence[BenchResult]") -> None:
        if self.args["--json"]:
            for result in results:
                print(json.dumps(result.to_dict()))
            return
        from phalanx.bench.bottleneck import describe_bottlenecks

        print_results(results, model=self.config.model.model)
        for line in describe_bottlenecks(results):
            print(line)
        for result, measurement in zip(results, self.measurements, strict=False):
            for problem in result.problems:
                where = f"{measurement.label}: " if len(self.measurements) > 1 else ""
                print(f"unreliable: {where}{problem}", file=sys.stderr)


def _read_timing(args: ParsedArgs) -> "Timing":
    """How long to warm up and measure."""
    from phalanx.bench.blocks import Timing

    limit = f"a number up to {_LONGEST_S:,.0f}"
    return Timing(
        warmup_s=args.read_positive("--warmup", limit, high=_LONGEST_S),
        seconds=args.read_positive("--seconds", limit, high=_LONGEST_S),
        blocks=args.read_int("--blocks", 3, 1000),
    )


def _read_inputs(args: ParsedArgs, config: "Config") -> list[str]:
    """The kinds of data to measure with; the config's own if none is given."""
    own = config.data.data if config.data.data in _RANDOM_KINDS else _REAL
    flag, text = read_random_data_kind(args), args["--inputs"]
    if flag and text:
        raise ConfigError(f"--{flag}-data: --inputs {text} says what to measure; give one of them")
    if not text:
        return [flag or own]
    kinds = [part.strip().lower() for part in text.split(",")]
    for kind in kinds:
        if kind not in INPUT_KINDS:
            known = suggest(kind, INPUT_KINDS)
            raise ConfigError(f"--inputs: there is no {kind!r}; {known}")
        if kinds.count(kind) > 1:
            raise ConfigError(f"--inputs {text}: names {kind} twice; give each once")
    if _REAL in kinds and own != _REAL:
        raise ConfigError(
            f"--inputs {text}: the data is {own}, which is not real; name some with --data or "
            "--data-dir"
        )
    return kinds


def _prepare_training(args: ParsedArgs) -> _Benchmark:
    """The measurements of training, one for each kind of data."""
    settings = args.read_settings()
    if settings.missing:
        raise ConfigError(settings.missing)
    if settings.config.machine.engine != "native":
        raise ConfigError(
            f"--engine {settings.config.machine.engine}: bench train measures our own loop; "
            "`phalanx bench engines` compares the two"
        )
    from phalanx.assemble.prepare import refuse_missing_weights

    refuse_missing_weights(settings.config)
    _read_timing(args)
    kinds, data = _read_inputs(args, settings.config), settings.config.data
    if _REAL in kinds and DATASETS[data.data].needs_folder and data.data_dir is None:
        raise ConfigError(
            f"--data {data.data} is read from a folder: give --data-dir DIR, or measure without "
            "it: --synthetic-data (noise on the device) or --generated-data (noise from the host)"
        )
    planned = {kind: _plan_training(settings, kind) for kind in kinds}
    first = planned[kinds[0]]
    return _Benchmark(
        kind="train",
        name=settings.name,
        args=args,
        measurements=[
            _Measurement(kind, kind, partial(_measure_training, run))
            for kind, run in planned.items()
        ],
        plan=first.plan,
        config=first.settings.config,
    )


def _plan_training(settings: "Settings", kind: str) -> "PlannedRun":
    """The run that is measured."""
    from phalanx.assemble.dataset_summary import plan_new_run
    from phalanx.assemble.find_data import use_random_data

    is_own = kind in (_REAL, settings.config.data.data)
    return plan_new_run(settings if is_own else use_random_data(settings, kind))


def _measure_training(
    planned: "PlannedRun", job: "BenchJob", ranks: "Ranks | None"
) -> "BenchResult":
    from phalanx.bench.training import measure_training

    return measure_training(planned, job, ranks)


def _prepare_inference(args: ParsedArgs) -> _Benchmark:
    """The measurements of inference, one for each batch size and kind of data."""
    args.refuse_problems()
    args.load_plugins()
    _read_timing(args)
    from phalanx.assemble.scoring_target import (
        ScorableCheckpoint,
        get_settings,
        plan_target,
        read_target,
        use_random_target_data,
    )

    target, sizes = read_target_name(args), read_batch_sizes(args)
    measurements, plans, configs = [], [], []
    for size in sizes:
        flags = args.flags if size is None else {**args.flags, "batch-size": size}
        found = read_target(target, flags, selection=args["--checkpoint"])
        if isinstance(found, ScorableCheckpoint):
            refuse_model_options(target, args)
        configs.append(get_settings(found).config)
        for kind in _read_inputs(args, configs[-1]):
            model = found if kind == _REAL else use_random_target_data(found, kind)
            plan = plan_target(model)
            label = f"batch {plan.valid_batch:,}, {kind}"
            images = plan.valid_batch * plan.layout.pipelines * _RANDOM_BATCHES
            measure = partial(_measure_inference, model, None if kind == _REAL else images)
            measurements.append(_Measurement(label, kind, measure))
            plans.append(plan)
    return _Benchmark(
        kind="infer",
        name=target,
        args=args,
        measurements=measurements,
        plan=plans[0],
        config=configs[0],
    )


def _measure_inference(
    target: "ScorableCheckpoint | Settings",
    random_images: int | None,
    job: "BenchJob",
    ranks: "Ranks | None",
) -> "BenchResult":
    from phalanx.assemble.score import open_target
    from phalanx.bench.inference import measure_inference

    return measure_inference(lambda: open_target(target, ranks, random_images=random_images), job)
