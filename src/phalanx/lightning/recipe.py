"""What Phalanx does under a user's Trainer: its options, and its plan once the Trainer is known.

The Trainer decides how long, with which precision and on which devices to train; everything else
is an option of ours. Each of the Trainer's processes is a replica, so that the batches are those of
`phalanx train --replicas N`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from phalanx.assemble.dataset_summary import DatasetSummary, plan_new_run
from phalanx.assemble.find_data import fetch_missing_dataset, read_settings_with_data
from phalanx.config.read import Settings
from phalanx.config.schema import OPTIONS, SPELLINGS, Config
from phalanx.config.text import to_flags
from phalanx.errors import ConfigError, join_problems
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan, count_workers
from phalanx.plan.world import read_world

_SECTIONS = ("data", "augment", "model", "resnet", "efficientnet", "optim", "schedule", "loss")
_OTHERS = ("seed", "plugin", "enable-recompute", "recompute-checkpoints")  # that also apply here
TRAINER_OPTIONS = {  # options that the Trainer decides, and what to do instead
    "epochs": "use Trainer(max_epochs=...)",
    "steps": "use Trainer(max_steps=...)",
    "gradient-accumulation": "use Trainer(accumulate_grad_batches=...)",
    "global-batch-size": "use batch_size and Trainer(accumulate_grad_batches=...)",
    "replicas": "use Trainer(devices=...); each process is a replica",
    "devices": "use Trainer(devices=...)",
    "device": "use Trainer(accelerator=...)",
    "precision": "use Trainer(precision=...)",
    "half-type": "use Trainer(precision=...)",
    "loss-scaling": "use Trainer(precision=...)",
    "initial-loss-scaling": "use Trainer(precision=...)",
    "auto-loss-scaling": "use Trainer(precision=...)",
    "bn-span": "use Trainer(sync_batchnorm=True)",
    "determinism": "use Trainer(deterministic=...)",
    "ema-decay": "use the callback EMAWeightAveraging",
    "weight-avg-strategy": "use the callback WeightAveraging",
    "validation-frequency": "use Trainer(check_val_every_n_epoch=...)",
    "logs-per-epoch": "use Trainer(log_every_n_steps=...)",
    "ckpts-per-epoch": "use the callback ModelCheckpoint",
    "keep": "use the callback ModelCheckpoint",
    "run-dir": "use Trainer(default_root_dir=...)",
    "epoch-tail": "leave it out; a Trainer's epoch has whole steps, as with drop",
}


@dataclass(frozen=True, kw_only=True)
class _TrainerPlan:
    """The plan of a recipe under one Trainer."""

    config: Config
    plan: Plan
    rank: int  # of this process among the Trainer's


class Recipe:
    """A preset or file with options; ConfigError for options that the Trainer decides."""

    def __init__(self, preset: str | None, options: Mapping[str, Any]) -> None:
        self._preset = preset
        self.flags = to_flags(options)
        _refuse_trainers_options(self.flags)
        world = read_world()
        self._start = self._plan(length={}, replicas=world.size if world else 1, accumulation=1)
        _refuse_unsupported(self._start[0].config)

    @property
    def config(self) -> Config:
        """The options, without what the Trainer decides."""
        return self._start[0].config

    @property
    def plan(self) -> Plan:
        """The plan, as far as it does not depend on the Trainer."""
        return self._start[1]

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the data's classes, by label."""
        return tuple(self._start[2].classes)

    def fit_to_trainer(self, trainer: Any) -> _TrainerPlan:
        """The plan under this Trainer, with its processes, accumulation and length."""
        settings, plan, _ = self._plan(
            length=_find_length(trainer),
            replicas=trainer.world_size,
            accumulation=trainer.accumulate_grad_batches,
        )
        layout = Layout(trainer.world_size, trainer.world_size)
        local = max(1, trainer.world_size // trainer.num_nodes)
        # the plan knows this machine's devices, but not how many of them the Trainer uses
        plan = replace(plan, layout=layout, workers=count_workers(settings.config, local))
        return _TrainerPlan(config=settings.config, plan=plan, rank=trainer.global_rank)

    def _plan(
        self, *, length: Mapping[str, str], replicas: int, accumulation: int
    ) -> tuple[Settings, Plan, DatasetSummary]:
        given = {
            **length,
            "replicas": str(replicas),
            "gradient-accumulation": str(accumulation),
            "bn-span": "1",
            "epoch-tail": "drop",
            "engine": "native",
            # a process has the whole network, into whatever stages a preset splits it
            **{"pipeline": "false", "pipeline-splits": "none", "shards": "1"},
        }
        settings = read_settings_with_data(self._preset, {**self.flags, **given})
        settings = fetch_missing_dataset(settings, lambda line: None)
        if settings.missing:
            raise ConfigError(settings.missing)
        settings, plan, dataset = plan_new_run(settings)
        # the Trainer decides the precision
        return settings, replace(plan, precision="32.32"), dataset


def _refuse_trainers_options(flags: Mapping[str, str]) -> None:
    """Raise ConfigError for options that a Trainer decides, or that nothing here would use."""
    problems = []
    for given in flags:
        option = OPTIONS.get(SPELLINGS.get(given, ""))
        if option is None:  # refused, with the nearest name, when the options are read
            continue
        name = option.name
        if name in TRAINER_OPTIONS:
            problems.append(f"{given}: under a Trainer of your own, {TRAINER_OPTIONS[name]}")
        elif option.section not in _SECTIONS and name not in _OTHERS:
            problems.append(
                f"{given}: has no effect under a Trainer of your own; leave it out, or run "
                "phalanx train"
            )
    if problems:
        raise join_problems(problems)


def _refuse_unsupported(config: Config) -> None:
    """Raise ConfigError for what a preset asks for and only our own loop supports."""
    strategy, problems = config.run.weight_avg_strategy, []
    averages = (
        (f"ema-decay {config.optim.ema_decay:g}", config.optim.ema_decay, "EMAWeightAveraging"),
        (f"weight-avg-strategy {strategy}", strategy != "none", "WeightAveraging"),
    )
    for option, is_used, callback in averages:
        if is_used:
            problems.append(
                f"{option}, which this preset has, is not done under a Trainer of your own: use a "
                f"preset without it and the callback {callback}, or run phalanx train"
            )
    if problems:
        raise join_problems(problems)


def _find_length(trainer: Any) -> dict[str, str]:
    """How long a Trainer trains, as our options."""
    if trainer.max_steps is not None and trainer.max_steps > 0:
        return {"steps": str(trainer.max_steps)}
    epochs = trainer.max_epochs
    if epochs == -1:
        raise ConfigError(
            "Trainer(max_epochs=-1): the schedule of the learning rate needs an end; give "
            "max_epochs or max_steps"
        )
    return {"epochs": str(epochs)} if epochs else {}
