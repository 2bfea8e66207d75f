"""`phalanx plan`: every derived number, before anything runs."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, Argument, Command, Request, preset_named
from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.averaging import kept_by
from phalanx.units import format_bytes

if TYPE_CHECKING:
    from phalanx.models.memory import Memory
    from phalanx.plan.plan import Plan

_BARS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60


def _run(request: Request) -> int:
    """Print the plan of a config."""
    from phalanx.assemble.find_data import read_with_data

    settings = read_with_data(preset_named(request), request.flags, problems=request.problems)

    from phalanx.assemble.dataset_summary import plan_run

    plan, dataset = plan_run(settings, without_data=True)
    points = [plan.at(step) for step in _read_steps(request["at"])]
    memory = None if request["no_memory"] else _find_memory(settings.config, plan)
    if request["json"]:
        known = None if memory is None or isinstance(memory, str) else asdict(memory)
        more = {"counts": dataset.source, "memory": known, "at": points}
        print(json.dumps(_as_json(settings, plan) | more, indent=2))
        return 0
    _show_plan(settings, plan, memory, counts=dataset.source)
    for point in points:
        scale = "automatic, from " * bool(point["automatic"]) + f"{point['loss_scale']:g}"
        print(
            f"{'at step':<14}{point['step']:,}: learning rate {point['lr']:g}, loss scale {scale}"
        )
    if request["origin"]:
        _show_origins(settings)
    return 0


def _find_memory(config: Config, plan: "Plan") -> "Memory | str":
    """The memory a step should take, or why nobody can say, as with some plugins' networks.

    The only part of a plan that needs torch: whatever can be refused is refused before.
    """
    from phalanx.assemble.memory import predict_step_memory

    try:
        return predict_step_memory(config, plan)
    except ConfigError as error:
        return f"not known: {error}"


def _read_steps(text: str | None) -> list[int]:
    """The steps of --at."""
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--at: wants steps with commas, such as 0,100,5000, got {text!r}")
    return [int(word) for word in words]


def _as_json(settings: Settings, plan: "Plan") -> dict[str, object]:
    """The plan, every option and where it came from."""
    return {
        "name": settings.name,
        "plan": plan.facts(),
        "notes": list(plan.warnings),
        "options": settings.config.flat(),
        "origins": settings.origins,
    }


def _show_plan(
    settings: Settings, plan: "Plan", memory: "Memory | str | None", *, counts: str
) -> None:
    """The plan in words and a curve."""
    config = settings.config
    devices = f"{plan.replicas} replicas, " if plan.replicas > 1 else ""
    rows = [
        ("config", settings.name),
        ("model", f"{config.model.model}, {_norm_of(config)}, {plan.num_classes} classes"),
        ("data", f"{config.data.data}, {plan.train_images:,} + {plan.valid_images:,} images"),
        *[("counts", "published ones; no file was looked at")] * (counts == "published"),
        ("image size", f"{plan.image_size} x {plan.image_size}{_growth_of(plan)}"),
        ("device", f"{devices}{plan.device}, {plan.precision}, {plan.threads} threads"),
        ("workers", f"{plan.workers}"),
        (
            "global batch",
            f"{plan.global_batch:,} = micro-batch {plan.micro_batch} x "
            f"accumulation {plan.accumulation} x replicas {plan.replicas}",
        ),
        (
            "length",
            f"{_counted(plan.total_steps, 'step')} = {_counted(plan.epochs, 'epoch')} of "
            f"{_counted(float(plan.steps_per_epoch), 'step')}",
        ),
        ("images", f"{plan.total_steps * plan.global_batch:,} trained in all"),
        (
            "learning rate",
            f"{plan.schedule.shape} from {plan.schedule.peak:g}, "
            f"warm-up {_counted(plan.schedule.warmup, 'step')}",
        ),
        ("", f"|{_draw_curve(plan)}|"),
        ("update", _describe_update(config, plan)),
        ("log points", f"{plan.log.count():,}"),
        ("evaluations", _describe_evaluations(plan)),
        ("checkpoints", _read_checkpoints(config, plan)),
        ("bad images", f"up to {plan.max_bad:,} are put up with"),
    ]
    rows += [("memory", _describe_memory(plan, memory, config))] if memory else []
    rows += [("note", warning) for warning in plan.warnings]
    for name, text in rows:
        print(f"{name:<14}{text}")


def _counted(number: float, what: str) -> str:
    """A number of things, in words: 1 epoch, 2.5 epochs, 1,000 steps."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {what}{'s' * (number != 1)}"


def _describe_evaluations(plan: "Plan") -> str:
    """How often the model is scored, in words."""
    after = ", when training is over" * plan.scores_after
    batches = f", batches of {plan.valid_batch:,}" * (plan.evaluations > 0)
    return f"{plan.evaluations:,}{after}{batches}"


def _read_checkpoints(config: Config, plan: "Plan") -> str:
    """How many checkpoints there are and which of them stay, in words."""
    saves, newest = plan.save.count(), f"the newest {kept_by(config)}"
    if saves <= kept_by(config):
        return f"{saves:,}{', all kept' * (saves > 1)}"
    if plan.scores_after:
        return f"{saves:,}, all kept until they are scored, then {newest} and the best"
    return f"{saves:,}, {newest}{' and the best' * (plan.evaluations > 0)} kept"


def _describe_update(config: Config, plan: "Plan") -> str:
    """The rule, its decays and the loss scale, in words."""
    said = config.optim
    decays = [f"decay {said.weight_decay:g}"] * (said.weight_decay > 0)
    decays += [f"l2 {said.l2_regularization:g}"] * (said.l2_regularization > 0)
    first, last = (plan.loss_scale.at(step) for step in (0, plan.total_steps))
    scale = f"{first:g} to {last:g}" if first != last else f"{last:g}"
    scale = f"automatic, from {first:g}" if plan.loss_scale.automatic else scale
    return ", ".join([said.optimizer, *decays, f"loss scale {scale}"])


def _describe_memory(plan: "Plan", memory: "Memory | str", config: Config) -> str:
    """What a step takes of a device at most, and what for."""
    if isinstance(memory, str):
        return memory
    parts = [("weights", memory.weights)]
    parts += [("their average", memory.averages)] * (memory.averages > 0)
    parts += [("gradients", memory.gradients), ("optimizer state", memory.optimizer)]
    parts += [("activations", memory.activations)]
    parts += [("working", memory.working)] * (memory.working > 0)
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    if memory.working < 0:
        told += f", less {format_bytes(-memory.working)} that are not there together"
    away = config.machine.offload_optimizer and plan.device.startswith("cuda")
    hosted = "; optimizer state in host memory" * away
    return f"peak {format_bytes(memory.peak)}: {told}{hosted}"


def _growth_of(plan: "Plan") -> str:
    """The smaller sizes of the first steps, in words."""
    sizes = ", ".join(f"{size} until step {end:,}" for end, size in plan.growth)
    return f"; in training {sizes}" * bool(sizes)


def _norm_of(config: Config) -> str:
    """How the model normalises, in words."""
    groups = f" of {config.model.norm_num_groups} groups" * (config.model.norm_type == "group")
    return f"{config.model.norm_type} norm{groups}".replace("none norm", "no norm")


def _draw_curve(plan: "Plan") -> str:
    """The learning rate over the run as a line of blocks."""
    steps = [place * plan.total_steps // _CURVE_WIDTH for place in range(_CURVE_WIDTH)]
    peak = max(plan.lr(step) for step in steps) or 1.0
    return "".join(_BARS[round(plan.lr(step) / peak * (len(_BARS) - 1))] for step in steps)


def _show_origins(settings: Settings) -> None:
    """Every option with its value and who set it."""
    values = {name: str(value) for name, value in settings.config.flat().items()}
    names, texts = max(map(len, values)), max(map(len, values.values()))
    print()
    for name, text in values.items():
        shown = text if text != "None" else "-"
        print(f"{name:<{names}}  {shown:<{texts}}  {settings.origins[name]}")


COMMANDS = {
    "plan": Command(
        name="plan",
        summary="Show every derived number before anything runs; nothing is written.",
        usage="phalanx plan [PRESET|FILE] [--option value]... [--at STEPS] [--origin] [--json]",
        run=_run,
        arguments=(
            Argument(name="preset", metavar="PRESET|FILE", help="A preset, or a YAML file."),
            Argument(name="--config", help="The same, as a flag."),
            Argument(
                name="--origin", help="Also say where each option's value came from.", switch=True
            ),
            Argument(name="--at", help="Steps with commas: learning rate and loss scale there."),
            Argument(
                name="--no-memory",
                help="Predict no memory, which takes some seconds; all else takes none.",
                switch=True,
            ),
            Argument(name="--json", help="Print a JSON object.", switch=True),
        ),
        options=ALL_OPTIONS,
        examples=(
            ("phalanx plan", "what `phalanx train` would do"),
            ("phalanx plan imagenet-resnet50 --data-dir /imagenet --replicas 8", "on 8 devices"),
            ("phalanx plan demo --epochs 3 --origin", "and who set which option"),
            ("phalanx plan demo --at 0,100,900 --json", "the learning rate at some steps"),
        ),
    ),
}
