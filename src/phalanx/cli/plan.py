"""`phalanx plan`: every derived number, before anything runs."""

import json
from dataclasses import asdict
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.cli.command import ALL_OPTIONS, JSON_FLAG, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.plan_measure import (
    MEASURE_ARGS,
    describe_run_prediction,
    measure_run,
    read_seconds,
    refuse_unmeasurable,
)
from phalanx.cli.plan_network import (
    NETWORK_ARGS,
    NetworkArgs,
    NetworkPrediction,
    StepFigures,
    describe_exchange,
    describe_network,
    predict_network,
    read_network_args,
)
from phalanx.cli.plan_ranks import describe_ranks, list_ranks
from phalanx.cli.plan_stages import (
    build_picture,
    describe_choice,
    describe_stages,
    draw_step,
    find_picture_file,
    list_stages,
    write_picture,
)
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.averaging import count_kept_checkpoints
from phalanx.plan.layout import describe_devices
from phalanx.units import align_columns, format_bytes, format_plural

if TYPE_CHECKING:
    from phalanx.assemble.dataset_summary import DatasetSummary
    from phalanx.models.stage_cost import StageCost
    from phalanx.models.step_memory import Memory
    from phalanx.plan.exchange import Exchange
    from phalanx.plan.plan import Plan
    from phalanx.report.step_picture import StepPicture

_BARS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60


class _Prediction(NamedTuple):
    """What of a plan needs the model itself."""

    memory: "Memory"
    exchange: "Exchange"
    stages: "list[StageCost]"  # empty if the model is not split
    picture: "StepPicture"
    network: NetworkPrediction | None  # if asked for


@command(
    "plan",
    "Show every derived number before anything runs; nothing is written.",
    *PRESET_ARGS,
    Argument("--origin", "Also say where each option's value came from.", switch=True),
    Argument(
        "--at",
        "Show the learning rate and loss scale of the step after these, such as 0,100,900.",
        items=True,
    ),
    Argument(
        "--no-memory",
        "Skip the memory prediction, which takes a few seconds.",
        switch=True,
    ),
    Argument("--picture", "Draw the timeline of a step to this .png file."),
    *NETWORK_ARGS,
    *MEASURE_ARGS,
    JSON_FLAG,
    usage="[PRESET|FILE] [--option value]... [--network GBIT] [--measure] [--at STEPS] [--origin] "
    "[--json]",
    options=ALL_OPTIONS,
    examples={
        "phalanx plan": "what `phalanx train` would do",
        "phalanx plan imagenet-resnet50 --replicas 16 --device cuda --devices 4": "on 4 GPUs, here "
        "or not",
        "phalanx plan imagenet-resnet50 --shards 4 --pipeline --devices 4 --picture p.png": "in "
        "four stages, drawn over time",
        "phalanx plan imagenet-resnet50 --device cuda --devices 64 --replicas 64 --network 100 "
        "--hosts 8": "with the step time over a 100 Gbit/s network",
        "phalanx plan demo --epochs 3 --origin": "and where each value comes from",
        "phalanx plan demo --at 0,100,900 --json": "the learning rate at some steps",
        "phalanx plan demo --measure --seconds 10": "and train for ten seconds to predict "
        "how long the run takes",
    },
)
def _run(args: ParsedArgs) -> None:
    """Print the plan of a config."""
    settings, wanted = args.read_settings(), read_network_args(args)
    file, seconds = find_picture_file(args), read_seconds(args)

    from phalanx.assemble.dataset_summary import plan_new_run
    from phalanx.plan.exchange import count_hosts

    settings, plan, dataset = plan_new_run(settings, without_data=True)
    points = [_list_rates(plan, step) for step in _read_steps(args["--at"])]
    end = f"the run ends after {format_plural(plan.total_steps, 'step')}"
    late = [point["step"] for point in points if point["step"] > plan.total_steps]
    if wanted is not None:
        count_hosts(plan, wanted.hosts)  # refused before torch is imported
    if seconds is not None:
        refuse_unmeasurable(settings, plan, dataset)
    prediction = None if args["--no-memory"] else _predict(settings.config, plan, dataset, wanted)
    known = prediction if isinstance(prediction, _Prediction) else None
    if file is not None:
        write_picture(known.picture if known else str(prediction), file)
    measured = measure_run(settings.config, plan, seconds) if seconds else None
    if args["--json"]:
        everything = {
            "name": settings.name,
            "plan": plan.to_dict(),
            "notes": [*plan.warnings, *(f"--at {step}: {end}" for step in late)],
            "options": settings.config.flat(),
            "origins": settings.origins,
            "counts": dataset.source,
            "layout": dataset.layout,
            "ignored": dataset.ignored,
            "ranks": list_ranks(plan),
            "stages": list_stages(plan, known.stages) if known else None,
            "bubble": known.picture.bubble if known else None,
            "statistics_groups": plan.layout.span_groups,
            "exchange": asdict(known.exchange) if known else None,
            "memory": asdict(known.memory) if known else None,
            "network": known.network.to_dict() if known and known.network else None,
            "measured": measured.to_dict() if measured else None,
            "at": points,
        }
        print(json.dumps(everything, indent=2))
        return
    rows = list_plan_rows(settings, plan, prediction, dataset)
    for name, text in [*rows, *(describe_run_prediction(measured) if measured else [])]:
        print(f"{name:<14}{text}")
    for point in points:
        scale = "automatic, from " * point["automatic"] + f"{point['loss_scale']:g}"
        note = f"; {end}" * (point["step"] in late)
        rate = f"learning rate {point['lr']:g}, loss scale {scale}"
        print(f"{'after step':<14}{point['step']:,}: {rate}{note}")
    if args["--origin"]:
        _print_origins(settings)


def _predict(
    config: Config, plan: "Plan", dataset: "DatasetSummary", wanted: NetworkArgs | None
) -> _Prediction | str:
    """What a step is predicted to take and exchange, or why that is not known.

    The only part of a plan that needs torch, so all errors in the options are reported before.
    """
    from phalanx.assemble.memory import predict_exchanges, predict_stage_costs, predict_step_memory

    try:
        memory = predict_step_memory(config, plan)
        stages = predict_stage_costs(config, plan) if plan.pipeline else []
    except ConfigError as error:
        return f"not known: {error}"
    exchanges = predict_exchanges(config, plan, memory)
    exchange = max(exchanges, key=lambda one: one.total)
    footer = describe_exchange(plan, exchange) if plan.layout.ranks > 1 else ""
    picture = build_picture(config, plan, stages, footer=footer)
    figures = StepFigures(exchanges, stages, picture.bubble)
    network = wanted and predict_network(wanted, plan, config, figures, dataset)
    return _Prediction(memory, exchange, stages, picture, network)


def _read_steps(text: str | None) -> list[int]:
    """The steps of --at."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--at: expected steps, such as 0,100,5000, got {text!r}")
    return [int(word) for word in words]


def _list_rates(plan: "Plan", step: int) -> dict[str, Any]:
    """The learning rate and the loss scale after so many steps; the first of an automatic one."""
    scale = plan.loss_scale
    return {
        "step": step,
        "lr": plan.lr(step),
        "loss_scale": scale.at(step),
        "automatic": scale.automatic,
    }


def list_plan_rows(
    settings: Settings,
    plan: "Plan",
    prediction: _Prediction | str | None,
    dataset: "DatasetSummary",
) -> list[tuple[str, str]]:
    """The plan in words and a curve, by name.

    prediction: what needs the model itself, why that is not known, or None to leave it out.
    """
    from phalanx.data.layouts.image_files import describe_ignored

    config = settings.config
    ignored = describe_ignored(dataset.ignored).removeprefix("ignored ")
    ranks = plan.layout.ranks
    threads = format_plural(plan.threads, "thread") + " each" * (ranks > 1)
    return [
        ("config", settings.name),
        ("model", f"{config.model.model}, {_describe_norm(config)}, {plan.num_classes:,} classes"),
        ("data", f"{config.data.data}, {plan.train_images:,} + {plan.valid_images:,} images"),
        *[("counts", "published counts; no files were read")] * (dataset.source == "published"),
        *[("layout", dataset.layout)] * bool(dataset.layout),
        *[("ignored", ignored)] * bool(ignored),
        ("image size", f"{plan.image_size} x {plan.image_size}{_describe_growth(plan)}"),
        ("device", f"{describe_devices(plan.device, ranks)}, {plan.precision}, {threads}"),
        *[("passes", plan.acceleration.describe())] * plan.device.startswith("cuda"),
        *describe_ranks(plan),
        ("workers", f"{plan.workers}{' for each rank' * (ranks > 1)}"),
        (
            "global batch",
            f"{plan.global_batch:,} = micro-batch {plan.micro_batch} x "
            f"accumulation {plan.accumulation} x replicas {plan.replicas}",
        ),
        (
            "length",
            f"{format_plural(plan.total_steps, 'step')} = {format_plural(plan.epochs, 'epoch')} of "
            f"{format_plural(float(plan.steps_per_epoch), 'step')}"
            f"{_describe_left_over(config, plan)}",
        ),
        ("images", f"{plan.total_steps * plan.global_batch:,} trained in all"),
        (
            "learning rate",
            f"{plan.schedule.shape} from {plan.schedule.peak:g}{_describe_highest(plan)}, "
            f"warm-up {format_plural(plan.schedule.warmup, 'step')}",
        ),
        ("", f"|{_draw_curve(plan)}|"),
        ("update", _describe_update(config, plan)),
        ("log points", f"{plan.log.count():,}"),
        ("evaluations", _describe_evaluations(plan)),
        ("checkpoints", _describe_checkpoints(config, plan)),
        ("bad images", f"up to {plan.max_bad:,} are tolerated"),
        *_describe_prediction(plan, prediction, config),
        *_describe_picture(settings, plan, prediction),
        *(("note", warning) for warning in plan.warnings),
    ]


def _describe_norm(config: Config) -> str:
    """How the model normalises."""
    groups = f" of {config.model.norm_num_groups} groups" * (config.model.norm_type == "group")
    return f"{config.model.norm_type} norm{groups}".replace("none norm", "no norm")


def _describe_growth(plan: "Plan") -> str:
    """The smaller sizes of the first steps."""
    sizes = ", ".join(f"{size} until step {end:,}" for end, size in plan.growth)
    return f"; in training {sizes}" * bool(sizes)


def _describe_left_over(config: Config, plan: "Plan") -> str:
    """Why the run has fewer epochs than asked for: the images at its end that fill no step."""
    asked = config.train.epochs
    if config.train.steps is not None or asked is None:
        return ""
    steps = Fraction(str(asked)) * plan.steps_per_epoch - plan.total_steps
    images = floor(steps * plan.global_batch)
    if not images:
        return ""
    fill = "image fills" if images == 1 else "images fill"
    return f"; not {asked:g}, because the last {images:,} {fill} no step of {plan.global_batch:,}"


def _describe_highest(plan: "Plan") -> str:
    """The highest rate of any step, if that is not the peak."""
    highest = f"{plan.schedule.find_highest():.4g}"
    return f", highest {highest}" * (highest != f"{plan.schedule.peak:.4g}")


def _draw_curve(plan: "Plan") -> str:
    """The learning rate over the run as a line of blocks."""
    steps = [place * plan.total_steps // _CURVE_WIDTH for place in range(_CURVE_WIDTH)]
    peak = max(plan.lr(step) for step in steps) or 1.0
    return "".join(_BARS[round(plan.lr(step) / peak * (len(_BARS) - 1))] for step in steps)


def _describe_update(config: Config, plan: "Plan") -> str:
    """The rule, its decays and the loss scale."""
    optim = config.optim
    decays = [f"decay {optim.weight_decay:g}"] * (optim.weight_decay > 0)
    decays += [f"l2 {optim.l2_regularization:g}"] * (optim.l2_regularization > 0)
    first, last = (plan.loss_scale.at(step) for step in (0, plan.total_steps))
    scale = f"{first:g} to {last:g}" if first != last else f"{last:g}"
    scale = f"automatic, from {first:g}" if plan.loss_scale.automatic else scale
    return ", ".join([optim.optimizer, *decays, f"loss scale {scale}"])


def _describe_evaluations(plan: "Plan") -> str:
    """How often the model is scored."""
    after = ", when training is over" * plan.scores_after
    batches = f", batches of {plan.valid_batch:,}" * (plan.evaluations > 0)
    return f"{plan.evaluations:,}{after}{batches}"


def _describe_checkpoints(config: Config, plan: "Plan") -> str:
    """How many checkpoints there are and which of them stay."""
    saves, kept = plan.save.count(), count_kept_checkpoints(config)
    if saves <= kept:
        return f"{saves:,}{', all kept' * (saves > 1)}"
    if plan.scores_after:
        return f"{saves:,}, all kept until they are scored, then the newest {kept} and the best"
    return f"{saves:,}, the newest {kept}{' and the best' * (plan.evaluations > 0)} kept"


def _describe_prediction(
    plan: "Plan", prediction: _Prediction | str | None, config: Config
) -> list[tuple[str, str]]:
    """The rows of memory and exchange, as far as they are known."""
    if not isinstance(prediction, _Prediction):
        return [("memory", prediction)] if prediction else []
    rows = [("memory", _describe_memory(plan, prediction.memory, config))]
    if plan.layout.ranks > 1:
        rows.append(("exchange", describe_exchange(plan, prediction.exchange)))
    return rows


def _describe_picture(
    settings: Settings, plan: "Plan", prediction: _Prediction | str | None
) -> list[tuple[str, str]]:
    """The rows about stages, a step over time if several devices share it, and a network."""
    from phalanx.assemble.dataset_summary import CHOSEN_ORIGIN

    known = prediction if isinstance(prediction, _Prediction) else None
    rows = describe_stages(settings.config, plan, known.stages if known else None)
    if known and settings.origins["pipeline-splits"] == CHOSEN_ORIGIN:
        rows += describe_choice(known.stages)
    if known and (plan.stages > 1 or plan.layout.ranks > 1):
        rows += draw_step(plan, known.picture)
    return [*rows, *(describe_network(known.network, plan) if known and known.network else [])]


def _describe_memory(plan: "Plan", memory: "Memory", config: Config) -> str:
    """What a step takes of a device at most, and what for."""
    parts = {
        "weights": memory.weights,
        **({"their average": memory.averages} if memory.averages > 0 else {}),
        "gradients": memory.gradients,
        **({"sum of gradients": memory.sums} if memory.sums else {}),
        **({"running statistics": memory.statistics} if memory.statistics else {}),
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        **({"transfers": memory.transfers} if memory.transfers else {}),
        **({"working": memory.working} if memory.working > 0 else {}),
    }
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    if memory.working < 0:
        text += f", less {format_bytes(-memory.working)} that are not needed at the same time"
    offloaded = config.machine.offload_optimizer and plan.device.startswith("cuda")
    host = "; optimizer state in host memory" * offloaded
    each = " in each process" if plan.device == "cpu" else " on each device"
    each *= plan.layout.ranks > 1
    if plan.layout.stages > 1:
        each = " for the stage that needs most"
    return f"peak {format_bytes(memory.peak)}{each}: {text}{host}"


def _print_origins(settings: Settings) -> None:
    """Print every option with its value and origin."""
    values = {
        # as they are written on a command line
        name: str(value).lower() if value is None or isinstance(value, bool) else str(value)
        for name, value in settings.config.flat().items()
    }
    rows = [(name, text, settings.origins[name]) for name, text in values.items()]
    print("", *align_columns(rows, left=range(3)), sep="\n")
