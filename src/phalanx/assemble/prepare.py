"""Up to the moment torch is needed: settings, data and plan, and the run folder on disk."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import file_digest
from pathlib import Path
from typing import Any

from phalanx.assemble.dataset_summary import (
    DatasetSummary,
    inspect_dataset,
    normalization_of,
    plan_of,
)
from phalanx.assemble.environment import describe_environment
from phalanx.config.read import Settings, dump_config, fill_older_options, read_stored_settings
from phalanx.config.schema import OPTIONS, Config
from phalanx.config.text import read_option_file
from phalanx.data.transforms.transform import CENTRE_SHARE
from phalanx.disk import write_atomically
from phalanx.engine.checkpoint_store import AVERAGES, newest_checkpoint, read_facts, tidy
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.plan.plan import MachineChoice, Plan, choose_machine, make_plan
from phalanx.report.folder import RunFolder, create_run, open_run
from phalanx.report.page import write_report
from phalanx.report.summary import Summary, read_summary


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where training begins when it does not begin at the beginning."""

    checkpoint: Path
    facts: dict[str, Any]  # the checkpoint's
    forked: bool  # another run's checkpoint: its scores and clock are not ours


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run on disk that torch can take over."""

    run: RunFolder
    settings: Settings
    plan: Plan
    view: DatasetSummary
    start: Start | None
    fresh: bool = True  # made by this command; a resume finds what another one made

    @property
    def config(self) -> Config:
        """The options."""
        return self.settings.config


def prepare_new(settings: Settings, *, line: str) -> Prepared:
    """A fresh run: its folder is on disk when this returns."""
    refuse_missing_weights(settings.config)
    plan, view = plan_of(settings)
    refuse_replicas(plan)
    run = write_run(settings, plan, view, line=line, parent=None)
    return Prepared(run=run, settings=settings, plan=plan, view=view, start=None)


def refuse_missing_weights(config: Config) -> None:
    """The file of --init-weights is looked for before anything heavy begins."""
    if config.model.init_weights is None:
        return
    path = Path(config.model.init_weights)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; name the file with the weights in it")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; --init-weights wants .safetensors or .pth")


def _hash_of_weights(config: Config) -> str | None:
    """sha256 of the file of --init-weights."""
    if config.model.init_weights is None:
        return None
    with Path(config.model.init_weights).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def refuse_other_weights(run: RunFolder, config: Config) -> None:
    """A run that has no checkpoint yet begins again with the very same weights."""
    refuse_missing_weights(config)
    if _hash_of_weights(config) != run.facts.get("init_weights_sha256"):
        raise CheckpointError(
            f"{config.model.init_weights}: has changed since the run began with it; bring the "
            "old file back, or start a new run"
        )


def refuse_replicas(plan: Plan) -> None:
    """Training on several replicas is planned for, but not yet possible."""
    if plan.replicas > 1:
        raise ConfigError(
            f"--replicas {plan.replicas}: train runs one replica so far; for the same global "
            f"batch use --replicas 1 --gradient-accumulation {plan.replicas * plan.accumulation}"
        )


def write_run(
    settings: Settings,
    plan: Plan,
    view: DatasetSummary,
    *,
    line: str,
    parent: dict[str, Any] | None,
) -> RunFolder:
    """Create the run folder with everything that is known before training."""
    path = _run_path(settings)
    facts = {
        "name": settings.name,
        "command": line,
        "origins": settings.origins,
        "chosen": asdict(_chosen_by(plan)),
        "plan": plan.facts(),
        "environment": describe_environment(),
        "classes": list(view.classes),
        "data": view.fingerprints,
        "parent": parent,
        "init_weights_sha256": _hash_of_weights(settings.config),
    }
    return create_run(path, config_text=dump_config(settings.config), facts=facts)


def _run_path(settings: Settings) -> Path:
    """The folder asked for, or runs/NAME-TIME; two started in one second get a number."""
    if settings.config.run.run_dir:
        return Path(settings.config.run.run_dir)
    stem = f"{settings.name}-{datetime.now():%Y%m%d-%H%M%S}"
    tried = (Path("runs") / (stem + suffix) for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(path for path in tried if not path.exists())


def _chosen_by(plan: Plan) -> MachineChoice:
    """What a resume must take over from the plan of the first start."""
    return MachineChoice(device=plan.device, precision=plan.precision, threads=plan.threads)


def prepare_resume(path: Path, flags: Mapping[str, str]) -> Prepared:
    """An existing run, ready to go on from its newest checkpoint."""
    run = open_run(path)
    facts, stored = run.facts, stored_options(run)
    settings = read_stored_settings(stored, flags=flags, where=str(run.config), name=facts["name"])
    start = _find_start(run)
    # a checkpoint remembers the options it was made with; config.yaml could have been edited
    began_with = (
        stored if start is None or start.forked else fill_older_options(start.facts["config"])
    )
    _refuse_other_maths(settings, began_with, run)
    origins = {**facts["origins"], **_changed_origins(settings, stored)}
    settings = replace(settings, origins=origins)
    if start is None:
        refuse_other_weights(run, settings.config)
    chosen = MachineChoice(**facts["chosen"])
    if "device" in flags:
        chosen = replace(chosen, device=choose_machine(settings.config).device)
    view = inspect_dataset(settings.config)
    _refuse_other_data(view, facts["data"], run)
    plan = make_plan(settings.config, view.facts, chosen)
    return Prepared(run=run, settings=settings, plan=plan, view=view, start=start, fresh=False)


def stored_options(run: RunFolder) -> dict[str, Any]:
    """The options in a run's config.yaml, as values."""
    given, problems, _ = read_option_file(run.config, origin="run")
    if problems:
        raise CheckpointError("; ".join(problems))
    if not given:
        raise CheckpointError(f"{run.config}: is empty; restore it from a copy")
    return fill_older_options({name: option.value for name, option in given.items()})


def remake_finished(path: Path, flags: Mapping[str, str]) -> Summary | None:
    """The summary of a finished run, its report remade; None where training is left to do.

    Flags that would have made another run of it are refused, as in a run that goes on.
    """
    run = open_run(path)
    if not run.summary.exists():
        return None
    stored = stored_options(run)
    settings = read_stored_settings(
        stored, flags=flags, where=str(run.config), name=run.facts["name"]
    )
    _refuse_other_maths(settings, stored, run)
    write_report(run)
    return read_summary(run.path)


def _refuse_other_maths(settings: Settings, stored: Mapping[str, Any], run: RunFolder) -> None:
    """A resume may change how a run is run, never what it computes."""
    now = settings.config.flat()
    changed = [
        f"--{name}: the run has {stored[name]}, a resume cannot make it {now[name]}"
        for name in OPTIONS
        if name in stored and now[name] != stored[name] and not OPTIONS[name].resumable
    ]
    if changed:
        way_out = f"to change it, start a new run: phalanx train --fork {run.path} --run-dir NEW"
        raise ConfigError("\n".join([*changed, way_out]))


def _changed_origins(settings: Settings, stored: Mapping[str, Any]) -> dict[str, str]:
    """Who set the options that this resume changes, or that the run was written without."""
    now = settings.config.flat()
    new = {name: "default" for name in now if name not in stored}
    return new | {
        name: "flag at resume" for name in now if name in stored and now[name] != stored[name]
    }


def _refuse_other_data(view: DatasetSummary, stored: Mapping[str, Any], run: RunFolder) -> None:
    """A resume goes on with the very same images."""
    for split, now in view.fingerprints.items():
        before = stored[split]
        if now != before:
            parts = [
                f"{key} {before.get(key)} then, {now.get(key)} now"
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            ]
            raise DataError(
                f"{run.path}: its {split} data has changed: {'; '.join(parts)}. Bring the old data "
                f"back, or start a new run: phalanx train --fork {run.path} --run-dir NEW"
            )


def _find_start(run: RunFolder) -> Start | None:
    """The newest checkpoint; for a fork that has none yet, its parent's; else the beginning."""
    checkpoint = newest_checkpoint(run.checkpoints)
    if checkpoint is not None:
        facts = read_or_advise(checkpoint, run)
        return Start(checkpoint=checkpoint, facts=facts, forked=False)
    parent = run.facts["parent"]
    if parent is None:
        return None
    checkpoint = Path(parent["checkpoint"])
    return Start(checkpoint=checkpoint, facts=read_facts(checkpoint), forked=True)


def read_or_advise(checkpoint: Path, run: RunFolder) -> dict[str, Any]:
    """A checkpoint's facts; where it is damaged, the error names the way around it."""
    try:
        return read_facts(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Remove {checkpoint} and resume again: the run goes on from the one before"
        ) from error


def take_over(prepared: Prepared) -> Prepared:
    """Once the lock is held: clear what a kill left, note what a resume changed, find the start.

    The start is looked for again, because another process may have trained until this moment.
    """
    run, settings = prepared.run, prepared.settings
    tidy(run.checkpoints)
    if run.config_text != dump_config(settings.config):
        write_atomically(run.config, dump_config(settings.config))
        chosen = asdict(_chosen_by(prepared.plan))
        run.update_facts(origins=settings.origins, chosen=chosen)
    return replace(prepared, start=_find_start(run))


def checkpoint_in(path: Path) -> Path:
    """The checkpoint a path stands for: itself, or the newest one of a run."""
    if (path / "manifest.json").exists():
        return path.resolve()
    run = open_run(path)
    checkpoint = newest_checkpoint(run.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"{path}: the run has no checkpoint; it was trained with --ckpts-per-epoch 0, or "
            f"goes on with: phalanx train --resume {path}"
        )
    return checkpoint


@dataclass(frozen=True, kw_only=True)
class Described:
    """A checkpoint's own account of itself, and the options it is to be used with."""

    checkpoint: Path
    facts: dict[str, Any]
    settings: Settings
    chosen: MachineChoice
    averaged: bool = False  # whether the live average in it is meant, not the weights

    @property
    def path(self) -> Path:
        """What is to be scored, by name."""
        return self.checkpoint / AVERAGES if self.averaged else self.checkpoint


def describe_checkpoint(path: Path, flags: Mapping[str, str]) -> Described:
    """The checkpoint a path stands for, or the average in one, checked without torch."""
    averaged = path.name == AVERAGES and path.is_file()
    checkpoint = checkpoint_in(path.parent if averaged else path)
    facts = read_facts(checkpoint)
    settings = read_stored_settings(
        facts["config"], flags=flags, where=str(checkpoint), name=facts["run"]
    )
    _refuse_other_preprocessing(settings, facts, checkpoint)
    return Described(
        checkpoint=checkpoint,
        facts=facts,
        settings=settings,
        chosen=choose_machine(settings.config),
        averaged=averaged,
    )


def _refuse_other_preprocessing(settings: Settings, facts: dict[str, Any], where: Path) -> None:
    """A model sees images as it was trained to; scored otherwise it is not the same model."""
    config, prepared = settings.config, facts["preprocessing"]
    size = prepared["image_size"]
    asked_and_trained = {
        "image-size": (config.data.image_size or size, size),
        "eval-crop": (config.augment.eval_crop, prepared.get("eval_crop", CENTRE_SHARE)),
        "normalization": (normalization_of(config), prepared.get("normalization", "mean-std")),
    }
    for name, (asked, trained) in asked_and_trained.items():
        if asked != trained:
            raise CheckpointError(
                f"--{name} {asked}: {where} was trained with {trained}, and images are prepared "
                "for it as they were then; leave the option away, or train with it: "
                "phalanx train --fork"
            )
