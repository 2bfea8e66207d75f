"""Phalanx trains convolutional image classifiers.

The commands, as functions. Options are keywords: `phalanx.train("demo", epochs=2)`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

# the rooms of these names come first: an import of them later would hide the functions
import phalanx.export
import phalanx.plan
import phalanx.report  # noqa: F401

if TYPE_CHECKING:
    from phalanx.assemble.prepare import PreparedRun
    from phalanx.assemble.score import Answer, LoadedModel
    from phalanx.data.loading.image_inputs import ImageInputs
    from phalanx.export.run import ExportedModel
    from phalanx.plan.plan import Plan
    from phalanx.report.records import ScoreRow
    from phalanx.report.summary import Summary

__version__ = "0.1.0"
__all__ = ["compare", "export", "load", "plan", "predict", "report", "train", "validate"]

PathLike = str | Path


def train(
    preset: PathLike | None = None,
    *,
    resume: PathLike | None = None,
    fork: PathLike | None = None,
    fork_schedule: str | None = None,
    accept_changed_data: bool = False,
    **options: Any,
) -> "Summary":
    """Train a preset or file, resume a run, or fork one; returns the summary of the run.

    fork_schedule: "continue", the default, or "restart" the schedule of a fork.
    """
    from phalanx.assemble.find_data import fetch_missing_dataset, read_settings_with_data
    from phalanx.assemble.fork import prepare_fork
    from phalanx.assemble.prepare import prepare_new_run, prepare_resume, rebuild_finished_report
    from phalanx.errors import ConfigError

    flags, line = _flags(options), "phalanx.train()"
    if (preset is not None) + (resume is not None) + (fork is not None) > 1:
        raise ConfigError("train: give a preset, resume or fork, not two of them")
    if fork_schedule is not None and fork is None:
        raise ConfigError("--fork-schedule: goes with --fork RUN; leave it out")
    if resume is not None:
        finished = rebuild_finished_report(_path(resume), flags)
        if finished is not None:
            return finished
        prepared = prepare_resume(_path(resume), flags, accept_changed_data=accept_changed_data)
    elif fork is not None:
        prepared = prepare_fork(_path(fork), flags, line=line, schedule=fork_schedule)
    else:
        prepared = prepare_new_run(
            fetch_missing_dataset(read_settings_with_data(_preset(preset), flags), print), line=line
        )
    if prepared.plan.layout.ranks > 1:
        return _train_on_ranks(prepared, flags if resume is not None else {})
    from phalanx.assemble.torch_setup import preserve_torch_settings
    from phalanx.assemble.train import train as run
    from phalanx.lightning.engine_choice import choose_fit

    with preserve_torch_settings():
        summary = run(prepared, fit=choose_fit(prepared.config))
    assert summary is not None  # this process writes it
    return summary


def _train_on_ranks(prepared: "PreparedRun", flags: dict[str, str]) -> "Summary":
    """Train in new processes, whose errors are printed to standard error."""
    from phalanx.assemble.rank_launch import start_ranks
    from phalanx.errors import NetworkError, Stopped, UserError
    from phalanx.report.summary import read_summary

    code = start_ranks(prepared, flags)
    if code == Stopped.exit_code:
        raise Stopped(f"stopped; continue with phalanx.train(resume={str(prepared.run.path)!r})")
    if code:
        # the disk and memory share a code: the first kind, DiskError, stands for both
        kinds = {kind.exit_code: kind for kind in reversed(UserError.__subclasses__())}
        kind = kinds.get(code, NetworkError)
        raise kind(f"{prepared.run.path}: a rank failed, and said why on standard error")
    return read_summary(prepared.run.path)


def validate(run: PathLike, *, checkpoint: str | int | None = None, **options: Any) -> "ScoreRow":
    """The score of a run or checkpoint, or of a preset or model with its initial weights.

    checkpoint: "last", "best" or a step of the run; the best one if it is known, else the last.
    """
    from phalanx.assemble.score import score_target
    from phalanx.assemble.scoring_target import read_target
    from phalanx.assemble.torch_setup import preserve_torch_settings
    from phalanx.errors import ConfigError

    if options.get("devices", 1) not in (1, "1", None):
        raise ConfigError(
            f"devices={options['devices']}: validate scores in this process, on one device; leave "
            f"it out, or run: phalanx validate {_path(run)} --devices {options['devices']}"
        )
    found = read_target(str(_path(run)), _flags(options), selection=_choice(checkpoint))
    with preserve_torch_settings():
        return score_target(found).row


def plan(preset: PathLike | None = None, **options: Any) -> "Plan":
    """Every number derived from a preset or file and options.

    Where no folder is named, those of published datasets are from their published counts.
    """
    from phalanx.assemble.dataset_summary import plan_run
    from phalanx.assemble.find_data import read_settings_with_data

    settings = read_settings_with_data(_preset(preset), _flags(options))
    return plan_run(settings, without_data=True)[0]


def load(run: PathLike, *, checkpoint: str | int | None = None, **options: Any) -> "LoadedModel":
    """The trained model of a run or checkpoint, ready to be called on images.

    checkpoint: "last", "best" or a step of the run; the best one if it is known, else the last.
    """
    from phalanx.assemble.score import LoadedModel
    from phalanx.assemble.scoring_target import read_checkpoint
    from phalanx.assemble.torch_setup import preserve_torch_settings

    found = read_checkpoint(_path(run), _flags(options), selection=_choice(checkpoint))
    with preserve_torch_settings():
        return LoadedModel(found)


def predict(
    run: PathLike,
    images: "ImageInputs",
    *,
    checkpoint: str | int | None = None,
    **options: Any,
) -> "list[Answer]":
    """The classes of images by the model of a run or checkpoint: an answer for each, in order.

    images: a file, a folder, a Pillow image, an array, or a list of these. checkpoint: as for
    `load`, which is quicker for more than one call.
    """
    from phalanx.data.loading.image_inputs import collect_images

    given = collect_images(images)  # before the weights are read, to report errors early
    return load(run, checkpoint=checkpoint, **options)(given)


def export(
    run: PathLike,
    *,
    checkpoint: str | int | None = None,
    images: "ImageInputs | None" = None,
    **options: Any,
) -> "ExportedModel":
    """Write the model of a run or checkpoint, or of a preset or model by name, for other programs.

    checkpoint: as for `load`. images: for the check; by default those of its data, if present.
    options: of `phalanx export`, such as format="onnx", out, name, with_preprocessing, dtype,
    averaged, max_batch and check_images.
    """
    from phalanx.data.loading.image_inputs import collect_images
    from phalanx.export.options import read_export_options, read_export_source

    own, others = read_export_options(options)
    own.refuse_missing_packages()
    given = None if images is None else collect_images(images)
    flags = _flags(others)
    found = read_export_source(
        str(_path(run)), flags, selection=_choice(checkpoint), averaged=own.averaged
    )
    from phalanx.assemble.torch_setup import preserve_torch_settings
    from phalanx.export.run import export_model

    with preserve_torch_settings():
        return export_model(found, own, images=given, needs_data="data-dir" in flags)


def report(run: PathLike) -> Path:
    """Rebuild a run's report.html; returns its path."""
    from phalanx.report.folder import open_run
    from phalanx.report.report_page import write_report

    return write_report(open_run(_path(run)))


def compare(first: PathLike, second: PathLike) -> dict[str, Any]:
    """The differences between two runs, as plain values."""
    from phalanx.report.compare import compare_runs
    from phalanx.report.folder import open_run

    return compare_runs(open_run(_path(first)), open_run(_path(second))).to_dict()


def _flags(options: dict[str, Any]) -> dict[str, str]:
    """Keywords as the flags that they stand for."""
    from phalanx.config.text import to_flags

    return to_flags(options)


def _preset(given: PathLike | None) -> str | None:
    """The name of a preset, or the path of a file, as text."""
    return None if given is None else str(_path(given))


def _choice(checkpoint: str | int | None) -> str | None:
    """A choice of checkpoint in the spelling of --checkpoint."""
    return None if checkpoint is None else str(checkpoint)


def _path(value: PathLike) -> Path:
    """A path from an argument; ConfigError if the argument cannot be a path."""
    from phalanx.errors import ConfigError

    if not isinstance(value, str | Path) or "\0" in str(value):
        raise ConfigError(f"{value!r}: expected the path of a file or folder, as text or Path")
    return Path(value)
