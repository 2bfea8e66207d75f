"""Checkpoints and untrained models to score: found, read and planned without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.assemble.dataset_summary import (
    DatasetSummary,
    adapt_settings,
    build_layout_options,
    choose_normalization,
    locate_data,
    summarise_dataset,
)
from phalanx.assemble.find_data import infer_data_flags, read_settings_with_data, use_random_data
from phalanx.assemble.prepare import StartingPoint
from phalanx.catalog.datasets import CENTRE_CROP_FRACTION
from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.config.fields import match_case
from phalanx.config.presets import is_preset, iterate_old_presets, iterate_presets
from phalanx.config.read import Settings, merge_layers, read_flags, read_stored_settings
from phalanx.config.schema import Config
from phalanx.disk import expand_home, quote_path
from phalanx.engine.checkpoint_store import (
    AVERAGE_WEIGHTS,
    find_best_step,
    list_checkpoints,
    list_checkpoints_by_step,
    parse_step,
    read_facts,
)
from phalanx.errors import CheckpointError, ConfigError, suggest
from phalanx.plan.averaging import count_consecutive
from phalanx.plan.machine_choice import choose_scoring_machine
from phalanx.plan.plan import DatasetCounts, Plan, make_plan
from phalanx.report.folder import RunFolder, format_value, open_run
from phalanx.units import parse_val_split

_LAST, _BEST = "last", "best"
_MOST_DIGITS = 18  # of a step
_WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True, kw_only=True)
class ScorableCheckpoint:
    """A checkpoint with its facts, and the options it is scored with."""

    start: StartingPoint
    settings: Settings
    choice: str  # which of its run's checkpoints it is, in words; empty if the user named it


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path stands for: itself, or the newest one of a run."""
    if _is_checkpoint(path):
        return path.resolve()
    kept = _list_kept_checkpoints(open_run(path))
    return kept[max(kept)]


def _is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").exists()


def _is_live_average(path: Path) -> bool:
    return path.name == AVERAGE_WEIGHTS and path.is_file()


def _list_kept_checkpoints(run: RunFolder) -> dict[int, Path]:
    """The checkpoints of a run by their steps; CheckpointError if it has none."""
    kept = list_checkpoints_by_step(run.checkpoints)
    if kept:
        return kept
    if not run.summary.exists():
        way_out = f"wait for one while it is trained, else continue it: {run.resume_command}"
    elif run.options.get("ckpts-per-epoch") == "0":
        way_out = "it was trained with --ckpts-per-epoch 0, which keeps no weights; train it again"
    else:
        way_out = f"it is finished, and {run.checkpoints} is empty or gone; restore it from a copy"
    raise CheckpointError(f"{run.path}: the run has no checkpoint; {way_out}")


def choose_checkpoint(path: Path, selection: str | None = None) -> tuple[Path, str]:
    """The checkpoint of a run to score, and which one that is, in words.

    selection: last, best or a step; if None, the best if any was scored, else the last. If the path
    is a checkpoint itself, the words are empty.
    """
    which = None if selection is None else _read_choice(selection)
    if _is_checkpoint(path) or _is_live_average(path):
        if which is not None:
            raise ConfigError(
                f"--checkpoint {selection}: {path} is a checkpoint itself; leave the option out, "
                "or name its run"
            )
        return path, ""
    run = open_run(path)
    kept = _list_kept_checkpoints(run)
    newest = max(kept)
    if which == _LAST:
        return kept[newest], f"step {newest:,}, the newest checkpoint"
    if isinstance(which, int):
        if which not in kept:
            raise CheckpointError(
                f"{path}: no checkpoint of step {which:,} is kept, only of {_join_steps(kept)}"
            )
        return kept[which], f"step {which:,}"
    best = find_best_step(run.checkpoints)
    if best not in kept:
        if which == _BEST:
            raise CheckpointError(
                f"{path}: no best checkpoint is known, because none of those kept was scored; "
                f"--checkpoint last takes the newest, step {newest:,}"
            )
        return kept[newest], f"step {newest:,}, the newest checkpoint; none was scored"
    if best == newest:
        return kept[best], f"step {best:,}, the best checkpoint and the newest"
    way_out = f"; --checkpoint last takes the newest, step {newest:,}" * (which is None)
    return kept[best], f"step {best:,}, the best checkpoint{way_out}"


def _read_choice(selection: str) -> str | int:
    """What --checkpoint asks for: last, best or a step."""
    plain = selection.lower().replace(",", "")  # steps are printed with commas
    is_step = plain.isdecimal() and len(plain) <= _MOST_DIGITS
    if plain not in (_LAST, _BEST) and not is_step:
        got = selection if len(selection) <= _MOST_DIGITS else f"{selection[:_MOST_DIGITS]}..."
        raise ConfigError(f"--checkpoint: expected last, best or a step such as 1000, got {got!r}")
    return int(plain) if is_step else plain


def _join_steps(steps: Iterable[int]) -> str:
    """Steps as a phrase."""
    *others, last = (f"{step:,}" for step in steps)
    return f"steps {', '.join(others)} and {last}" if others else f"step {last}"


def read_checkpoint(
    path: Path, flags: Mapping[str, str], *, selection: str | None = None
) -> ScorableCheckpoint:
    """The checkpoint that a path stands for, or the live average in one, checked without torch.

    selection: which checkpoint of a run, as for `choose_checkpoint`.
    """
    chosen, choice = choose_checkpoint(path, selection)
    averaged = _is_live_average(chosen)
    checkpoint = (chosen.parent if averaged else chosen).resolve()
    facts = read_facts(checkpoint)
    settings = read_stored_settings(
        facts["config"], flags=_read_scoring_flags(flags), where=str(checkpoint), name=facts["run"]
    )
    _refuse_other_preprocessing(settings, facts, checkpoint)
    start = StartingPoint(
        checkpoint=checkpoint, facts=facts, use="score average" if averaged else "score"
    )
    return ScorableCheckpoint(
        start=start, settings=adapt_settings_to_scoring(settings), choice=choice
    )


def describe_val_split(checkpoint: ScorableCheckpoint) -> str:
    """A note if only part of a folder is scored, or images that the run may be trained on.

    The run may have trained on them if --val-split chooses other images than the run held out.
    """
    from phalanx.data.formats.sources import DATA_FORMATS, has_valid_split

    settings, stored = checkpoint.settings, checkpoint.start.facts["config"]
    data = settings.config.data
    now, then = data.val_split, stored.get("val-split")
    if data.data not in DATA_FORMATS or not data.data_dir:
        return ""
    form, place = locate_data(settings.config)
    layout = build_layout_options(settings.config)
    if not Path(place or "").is_dir() or has_valid_split(form, place, layout):
        return ""  # it is scored, whatever the run did
    root = expand_home(data.data_dir)
    if root.resolve() == expand_home(stored.get("data-dir") or "").resolve():
        scores_all = now is None and has_valid_split(form, place, replace(layout, scoring=True))
        if scores_all and then is None:
            return "the run held out no images: these are the ones it was trained on"
        return describe_other_val_split(settings.config, stored, run="the run")
    if now is None or settings.origins.get("val-split") == "flag":
        return ""
    return (
        f"--val-split {now}, which the run was trained with, is applied to {root} too, so only "
        "part of it is scored; --val-split none scores all of it"
    )


def describe_other_val_split(config: Config, stored: Mapping[str, Any], *, run: str) -> str:
    """A note if a run was trained on the same folder, but held out other images of it."""
    now, then = config.data.val_split, stored.get("val-split")
    folders = (
        expand_home(path or "").resolve() for path in (config.data.data_dir, stored.get("data-dir"))
    )
    if len({*folders}) > 1 or (now and parse_val_split(now)) == (then and parse_val_split(then)):
        return ""
    if then is None:
        return (
            f"--val-split {now}: {run} was trained on all images, with those that are scored here"
        )
    return (
        f"--val-split {now or 'none'}: {run} held out {then} and was trained on the rest, which "
        "may include images that are scored here"
    )


def adapt_settings_to_scoring(settings: Settings) -> Settings:
    """The settings of a training run for scoring: on the devices that this command names."""
    machine = settings.config.machine
    changes = {
        "devices": machine.devices if settings.origins.get("devices") == "flag" else None,
        "validation-device": None,  # only used during training
        "replicas": machine.replicas or 1,  # needed to count the images of a step
    }
    return settings.replace_options(changes)


def _read_scoring_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags for scoring: --batch-size is read as --valid-batch-size.

    Other programs call it --batch-size; in a run's own options that is the one of training.
    """
    given = dict(flags)
    size = given.pop("batch-size", None)
    if size is not None and given.setdefault("valid-batch-size", size) != size:
        raise ConfigError(
            f"--batch-size {size}: means the same as --valid-batch-size when scoring, which is "
            f"{given['valid-batch-size']}; give one of them"
        )
    return given


def read_target(target: str, flags: Mapping[str, str], *, selection: str | None = None) -> "Target":
    """The checkpoint at a path, or the settings of a preset or model of that name.

    selection: which checkpoint of a run, as for `choose_checkpoint`.
    """
    settings = read_untrained_settings(target, flags)
    if settings is None:
        refuse_missing_path(target)
        return read_checkpoint(Path(target), flags, selection=selection)
    if selection is not None:
        raise ConfigError(
            f"--checkpoint {selection}: {target} is not a run, so it has no checkpoints; leave it "
            "out, or name a run"
        )
    return settings


def read_untrained_settings(target: str, flags: Mapping[str, str]) -> Settings | None:
    """The settings of a preset, a YAML file or a model by name; None if it is none of them.

    A folder of that name takes precedence. For the name of a model, no preset is applied.
    """
    if Path(target).is_dir():
        return None
    given = _read_scoring_flags(flags)
    if "batch-size" in flags:  # the length of made-up data depends on it
        given["batch-size"] = flags["batch-size"]
    if match_case(target, (*MODELS, *OLD_NAMES)) in {*MODELS, *OLD_NAMES}:
        if given.setdefault("model", target) != target:
            raise ConfigError(
                f"--model {given['model']}: the model is {target} already; give only one"
            )
        problems: list[str] = []
        layer = read_flags({**given, **infer_data_flags(given)}, problems)
        return merge_layers([layer], problems, name=target)
    if target.endswith((".yaml", ".yml")) or is_preset(target):
        return read_settings_with_data(target, given)
    return None


def refuse_missing_path(target: str) -> None:
    """Raise CheckpointError if a target is not a path either, or is a file of weights."""
    path = Path(target)
    if not path.exists() and "/" not in target:
        presets = [*iterate_presets(), *iterate_old_presets()]
        known = dict.fromkeys([*MODELS, *(one.name for one in presets)])
        raise CheckpointError(
            f"{target}: no such run, checkpoint, preset or model; {suggest(target, known)}"
        )
    if path.is_file() and path.name != AVERAGE_WEIGHTS and path.suffix in _WEIGHT_SUFFIXES:
        raise CheckpointError(
            f"{target}: is a weights file, which does not say which model it is for; name the "
            f"model: phalanx validate MODEL --init-weights {quote_path(target)}"
        )


def _refuse_other_preprocessing(settings: Settings, facts: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError if options would preprocess images other than in training."""
    config, trained = settings.config, facts["preprocessing"]
    size = trained["image_size"]
    asked_and_trained = {
        "image-size": (config.data.image_size or size, size),
        "eval-crop": (config.augment.eval_crop, trained.get("eval_crop", CENTRE_CROP_FRACTION)),
        "normalization": (choose_normalization(config), trained.get("normalization", "mean-std")),
        "exif-orientation": (config.data.exif_orientation, trained.get("exif_orientation", False)),
    }
    for name, (asked, before) in asked_and_trained.items():
        if asked != before:
            then = format_value(before)
            raise CheckpointError(
                f"--{name} {format_value(asked)}: {where} was trained with {then}, and images are "
                "prepared for it as they were then; leave the option out, or train with it: "
                "phalanx train --fork"
            )


def plan_checkpoint(checkpoint: ScorableCheckpoint) -> Plan:
    """The plan of a checkpoint's run, with the options it is scored with."""
    facts = checkpoint.start.facts
    counts = DatasetCounts(
        train_images=facts["plan"]["train_images"],
        valid_images=facts["plan"]["valid_images"],
        classes=len(facts["classes"]),
    )
    settings = checkpoint.settings
    machine = choose_scoring_machine(settings.config)
    return make_plan(settings.config, counts, machine, user_options=settings.user_options)


def plan_untrained_model(
    settings: Settings, *, without_data: bool = False
) -> tuple[Plan, DatasetSummary]:
    """The plan for scoring a config's untrained model, and its data.

    without_data: if no folder is named, the catalog's facts about the dataset are used.
    """
    dataset = summarise_dataset(settings.config, without_data=without_data)
    adapted = adapt_settings(adapt_settings_to_scoring(settings), dataset.counts)
    plan = make_plan(
        adapted.config,
        dataset.counts,
        choose_scoring_machine(adapted.config),
        locations=adapted.locations,
        user_options=adapted.user_options,
    )
    return replace(plan, warnings=(*adapted.notes, *plan.warnings)), dataset


Target = ScorableCheckpoint | Settings  # what can be scored


def get_settings(target: Target) -> Settings:
    """The options that a target is scored with."""
    return target if isinstance(target, Settings) else target.settings


def use_random_target_data(target: Target, kind: str) -> Target:
    """The target, to be scored on noise: synthetic on the device, generated on the host."""
    settings = use_random_data(get_settings(target), kind)
    return settings if isinstance(target, Settings) else replace(target, settings=settings)


def plan_target(target: Target) -> Plan:
    """The plan for scoring a target."""
    return (
        plan_untrained_model(target)[0] if isinstance(target, Settings) else plan_checkpoint(target)
    )


def list_consecutive_checkpoints(folder: Path, newest: ScorableCheckpoint) -> list[Path]:
    """The newest checkpoints without a gap between them, oldest first.

    The best one may be older and is then left out: an average must be over consecutive ones.
    """
    found = list_checkpoints(folder)
    save = plan_checkpoint(newest).save
    return found[-count_consecutive([parse_step(path) for path in found], save) :]
