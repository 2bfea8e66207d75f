"""Starts a new run from another one's checkpoint, with changed options."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.assemble.dataset_summary import DatasetSummary, plan_new_run
from phalanx.assemble.find_data import make_data_dir_absolute
from phalanx.assemble.prepare import (
    PreparedRun,
    StartingPoint,
    write_run,
)
from phalanx.assemble.scoring_target import describe_other_val_split, find_checkpoint
from phalanx.catalog.resnets import ResNetVariant
from phalanx.config.changes import SHAPING
from phalanx.config.read import Settings, find_length, read_stored_settings
from phalanx.config.schema import OPTIONS, Config
from phalanx.disk import quote_path
from phalanx.engine.checkpoint_store import WEIGHTS, read_facts
from phalanx.errors import ConfigError
from phalanx.plan.averaging import check_averaging
from phalanx.plan.machine_choice import resolve_replicas
from phalanx.plan.model import build_variant
from phalanx.plan.plan import Plan, count_global_batch, scores_anything
from phalanx.units import format_plural, parse_duration

_BEGINNING = ("init-weights", "reset-head")  # a fork starts from a checkpoint instead
_NOT_INHERITED = ("run-dir", *_BEGINNING)
# all use v = momentum * v + gradient; the state of any other optimizer has another meaning, even
# under the same name: the velocities of lars and rmsprop_tf include the learning rate
_SAME_VELOCITY = ("sgd", "momentum", "nesterov")


def prepare_fork(
    path: Path, flags: Mapping[str, str], *, line: str, schedule: str | None = None
) -> PreparedRun:
    """A new run that starts from another one's checkpoint, with changed options.

    schedule: "continue", the default, or "restart": the learning-rate schedule, including its
    warm-up, starts again where the fork starts.
    """
    restarts = _restarts_schedule(schedule, flags)
    for name in (name for name in _BEGINNING if name in flags):
        raise ConfigError(f"--{name}: a fork starts from its checkpoint's weights; leave it out")
    checkpoint = find_checkpoint(path)
    facts = read_facts(checkpoint)
    base = {name: value for name, value in facts["config"].items() if name not in _NOT_INHERITED}
    settings = read_stored_settings(base, flags=flags, where=str(checkpoint), name=facts["run"])
    origins = {
        name: f"run {facts['run']}" if origin == "run" else origin
        for name, origin in settings.origins.items()
    }
    settings = replace(settings, origins=origins, preset_length=find_length(facts["config"]))
    settings = resolve_replicas(settings)
    settings = _place_schedule(settings, facts, restarts=restarts)
    settings, plan, dataset = plan_new_run(settings)
    settings = make_data_dir_absolute(settings)
    start = StartingPoint(checkpoint=checkpoint, facts=facts, use="fork")
    _refuse_other_model(settings.config, dataset, start)
    begin = start.first_step(plan)
    if begin >= plan.total_steps:
        in_steps = settings.config.train.steps is not None
        least = f"--steps above {begin}" if in_steps else f"--epochs above {plan.epoch_at(begin):g}"
        raise ConfigError(
            f"--fork: {start.checkpoint.name} is at step {begin:,} of {plan.total_steps:,}, so "
            f"nothing is left to train; raise {least}"
        )
    # a fork begins with a checkpoint of its own
    check_averaging(settings.config, saves=1 + plan.save.count(after=begin))
    discarded = describe_discarded_state(start, settings.config)
    renamed = _describe_other_classes(dataset.classes, start)
    seen = _describe_seen_images(settings.config, start)
    plan = replace(plan, warnings=(*plan.warnings, *filter(None, (discarded, renamed, seen))))
    parent = {
        "run": facts["run"],
        "checkpoint": str(checkpoint.absolute()),
        "step": facts["state"]["step"],
        "first_step": begin,
        "weights_sha256": facts["weights_sha256"],
    }
    run = write_run(settings, plan, dataset, line=line, parent=parent)
    return PreparedRun(run=run, settings=settings, plan=plan, dataset=dataset, start=start)


def _restarts_schedule(schedule: str | None, flags: Mapping[str, str]) -> bool:
    """Whether a fork restarts its schedule, by the value of --fork-schedule."""
    given = "continue" if schedule is None else schedule.lower()
    if given not in ("continue", "restart"):
        raise ConfigError(f"--fork-schedule: expected continue or restart, got {given!r}")
    if given == "restart" and "lr-schedule-start" in flags:
        raise ConfigError(
            "--fork-schedule restart: sets --lr-schedule-start, which is given as well; give one "
            "of the two"
        )
    return given == "restart"


def _place_schedule(settings: Settings, facts: Mapping[str, Any], *, restarts: bool) -> Settings:
    """The settings with a schedule that starts where the fork does, or where it started before.

    The global batch may have changed, so steps are converted by the number of images before them.
    """
    if "lr-schedule-start" in settings.user_options:
        return settings
    start = parse_duration(settings.config.schedule.lr_schedule_start)
    if restarts:
        start = parse_duration(f"{facts['state']['step']}st")
    if start.unit != "st":
        return settings
    steps = int(start.amount) * facts["global_batch"] // count_global_batch(settings.config)
    origin = "flag" if restarts else settings.origins["lr-schedule-start"]
    return settings.replace_options({"lr-schedule-start": f"{steps}st"}, origin=origin)


def _refuse_other_model(config: Config, dataset: DatasetSummary, start: StartingPoint) -> None:
    """Raise ConfigError unless model and number of classes are those of the checkpoint."""
    facts = start.facts
    stored = {**facts["config"], "plugin": config.run.plugin}  # it may have moved since
    before = _resolve_shape(read_stored_settings(stored, flags={}, where="", name="").config)
    now = _resolve_shape(config)
    for name in SHAPING:
        if now[name] != before[name]:
            raise ConfigError(
                f"--{name}: the checkpoint was trained with {before[name]}, and its weights "
                f"fit nothing else; a fork cannot change it to {now[name]}: leave the option out"
            )
    if len(dataset.classes) != len(facts["classes"]):
        raise ConfigError(
            f"--data: the checkpoint has {len(facts['classes'])} classes, this data has "
            f"{len(dataset.classes)}; a fork needs the same number. {_describe_new_head(start)}"
        )


def _describe_other_classes(classes: Sequence[str], start: StartingPoint) -> str:
    """A note if the classes have other names, or another order, than those of the checkpoint."""
    pairs = zip(start.facts["classes"], classes, strict=True)
    before, now = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    if before == now:
        return ""
    return (
        f"the classes are not those of the checkpoint ({before!r} there, {now!r} here): each "
        "output continues as that of the class which now has its place. "
        f"{_describe_new_head(start)}"
    )


def _describe_seen_images(config: Config, start: StartingPoint) -> str:
    """A note if the fork scores images that its parent may have been trained on."""
    if config.data.val_split is None or not scores_anything(config):
        return ""
    return describe_other_val_split(config, start.facts["config"], run=start.facts["run"])


def _describe_new_head(start: StartingPoint) -> str:
    weights = quote_path(start.checkpoint / WEIGHTS)
    return f"To train a new classifier, start a new run with --init-weights {weights} --reset-head"


def _resolve_shape(config: Config) -> dict[str, Any]:
    """The value of every option, with defaults that depend on the model filled in."""
    variant = build_variant(config)
    own: dict[str, Any] = {"enable-fast-groupnorm": variant.norm.layout == "interleaved"}
    if isinstance(variant, ResNetVariant):
        own["shortcut-type"] = variant.shortcut
    return config.flat() | own


def describe_discarded_state(start: StartingPoint, config: Config) -> str:
    """A note if a fork's optimizer cannot use the saved state; empty if it can."""
    now = config.optim.optimizer
    then = start.facts["config"].get("optimizer", OPTIONS["optimizer"].default)
    if start.use != "fork" or then == now or {then, now} <= {*_SAME_VELOCITY}:
        return ""
    return f"the optimizer's state starts afresh: {now} has no use for that of {then}"


def describe_fork(plan: Plan, start: StartingPoint) -> str:
    """A line that says where the fork starts, and whether its schedule continues or restarts."""
    begin = start.first_step(plan)
    then = start.facts["plan"]
    if plan.schedule.start == begin:
        how = "the schedule restarts (--fork-schedule continue would continue it)"
    else:
        how = "the schedule continues (--fork-schedule restart would restart it)"
    return (
        f"forked from {start.checkpoint.parent.parent.name} at step {begin:,}: {how}, "
        f"{format_plural(plan.total_steps, 'step')} instead of {then['total_steps']:,}, "
        f"{plan.schedule.shape} from {plan.schedule.peak:g}, "
        f"learning rate {plan.lr(begin):.4g} now and {plan.lr(plan.total_steps - 1):.4g} at the end"
    )
