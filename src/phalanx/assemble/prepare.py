"""Everything before torch is needed: settings, data, plan and the run folder on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import Any, Literal

from phalanx.assemble.dataset_summary import (
    DatasetSummary,
    choose_pipeline_splits,
    inspect_dataset,
    plan_new_run,
)
from phalanx.assemble.find_data import make_data_dir_absolute, refuse_run_in_data
from phalanx.config.changes import SHAPING, find_changes, format_flag
from phalanx.config.read import Settings, dump_config, fill_older_options, read_stored_settings
from phalanx.config.schema import Config
from phalanx.config.text import read_option_file
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.disk import quote_path, remove_dead_parts, write_atomically
from phalanx.engine.checkpoint_store import (
    AVERAGE_WEIGHTS,
    WEIGHTS,
    find_newest_checkpoint,
    read_facts,
    remove_leftovers,
    restore_best_link,
)
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.plan.machine_choice import choose_machine, refuse_missing_devices, reuse_machine
from phalanx.plan.plan import Plan, make_plan
from phalanx.report.environment import collect_environment
from phalanx.report.folder import RunFolder, create_run, name_run_folder, open_run
from phalanx.report.records import describe_missing_rows, find_changed_record
from phalanx.report.report_page import write_report
from phalanx.report.summary import Summary, read_summary
from phalanx.trackers.choice import check_run_trackers

_WEIGHTS_OF_RUN = tuple(f"{folder}{WEIGHTS}" for folder in ("", "best/", "checkpoints/best/"))
_RESUME_ORIGIN = "flag at resume"


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """A checkpoint that a session starts from, and what is used of it.

    resume: everything. fork: another run's state, but not its scores and times. score: only the
    weights. score average: only the moving average of the weights.
    """

    checkpoint: Path
    facts: dict[str, Any]  # the checkpoint's facts.json
    use: Literal["resume", "fork", "score", "score average"]

    @property
    def weights_only(self) -> bool:
        """Whether only the weights, or their average, are used."""
        return self.use in ("score", "score average")

    def first_step(self, plan: Plan) -> int:
        """The step that training starts at: progress counts in images, as batch size may differ."""
        step, then = self.facts["state"]["step"], self.facts["global_batch"]
        return int(step * then // plan.global_batch)

    @property
    def path(self) -> Path:
        """The path of what is used: the checkpoint, or the file of averages in it."""
        averaged = self.use == "score average"
        return self.checkpoint / AVERAGE_WEIGHTS if averaged else self.checkpoint


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run on disk, ready to be trained."""

    run: RunFolder
    settings: Settings
    plan: Plan
    dataset: DatasetSummary
    start: StartingPoint | None
    is_new: bool = True  # created by this command; False for a resume
    accepts_changed_data: bool = False  # images may differ from those that the run has read
    later_check: ImageCheck | None = None  # of the newest checkpoint, if `start` is an earlier one

    @property
    def config(self) -> Config:
        """The options."""
        return self.settings.config

    @property
    def findings(self) -> dict[str, Any]:
        """The state it starts from; empty if what that says of images does not hold any more."""
        if self.start is None or self.start.use == "fork" or self.accepts_changed_data:
            return {}
        state: dict[str, Any] = self.start.facts["state"]
        return {} if state["step"] in self.run.facts.get("accepted_changed_data", []) else state

    @property
    def image_check(self) -> ImageCheck:
        """What the run knows of its images at its starting point, or knew later."""
        check = ImageCheck(since=self.start.first_step(self.plan) if self.start else 0)
        known, later = self.findings.get("image_check"), self.later_check
        if known:
            check = ImageCheck(**{**known, "cores_only": tuple(known["cores_only"])})
        return later if later is not None and later.since == check.since else check


# --- a new run ---


def prepare_new_run(settings: Settings, *, line: str) -> PreparedRun:
    """A new run, with its folder on disk."""
    refuse_missing_weights(settings.config)
    if settings.missing:
        raise ConfigError(settings.missing)
    settings, plan, dataset = plan_new_run(settings)
    settings = make_data_dir_absolute(settings)
    run = write_run(settings, plan, dataset, line=line, parent=None)
    return PreparedRun(run=run, settings=settings, plan=plan, dataset=dataset, start=None)


def refuse_missing_weights(config: Config) -> None:
    """Raise CheckpointError if the file of --init-weights is missing, before any slow work."""
    if config.model.init_weights is None:
        return
    path = Path(config.model.init_weights)
    if path.is_dir():
        inner = next((path / n for n in _WEIGHTS_OF_RUN if (path / n).is_file()), None)
        name = f": {quote_path(inner)}" if inner else ""
        raise CheckpointError(f"{path}: is a folder; name the file with the weights in it{name}")
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; --init-weights takes a .safetensors or .pth file"
        )


def write_run(
    settings: Settings,
    plan: Plan,
    dataset: DatasetSummary,
    *,
    line: str,
    parent: dict[str, Any] | None,
) -> RunFolder:
    """Create the run folder with everything that is known before training."""
    refuse_missing_devices(plan.device, plan.layout.ranks)
    check_run_trackers(settings.config)
    facts = {
        "name": settings.name,
        "command": line,
        "origins": settings.origins,
        "chosen": _get_machine_choice(plan),
        "plan": plan.to_dict(),
        "notes": list(plan.warnings),
        "environment": collect_environment(),
        **dataset.collect_facts(),
        "parent": parent,
        "init_weights_sha256": _hash_init_weights(settings.config),
    }
    path = Path(settings.config.run.run_dir or name_run_folder(settings.name))
    refuse_run_in_data(settings.config, path)
    return create_run(path, config_text=dump_config(settings.config), facts=facts)


def _get_machine_choice(plan: Plan) -> dict[str, Any]:
    """What a resume must reuse from the first plan of the run."""
    return {"device": plan.device, "precision": plan.precision, "threads": plan.threads}


def _hash_init_weights(config: Config) -> str | None:
    if config.model.init_weights is None:
        return None
    with Path(config.model.init_weights).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


# --- a run to resume ---


def prepare_resume(
    path: Path, flags: Mapping[str, str], *, accept_changed_data: bool = False
) -> PreparedRun:
    """An existing run, ready to continue from its newest checkpoint."""
    run = open_run(path)
    facts, stored = _read_run_facts(run), read_stored_options(run)
    settings = read_stored_settings(stored, flags=flags, where=str(run.config), name=facts["name"])
    began_with, start = stored, _find_newest_start(run)
    if start is not None and start.use == "resume":
        # a checkpoint stores the options it was made with; config.yaml may have been edited
        began_with = fill_older_options(start.facts["config"])
    _refuse_other_maths(settings, began_with, run)
    origins = dict(facts["origins"])
    for name, value in settings.config.flat().items():
        if name not in stored:
            origins[name] = "default"
        elif value != stored[name]:
            origins[name] = _RESUME_ORIGIN
    settings = replace(settings, origins=origins)
    if start is None:
        refuse_other_weights(run, settings.config)
    ranks = facts["plan"].get("ranks", 1)  # the first releases had only one
    machine = reuse_machine(facts["chosen"], settings.config, ranks=ranks)
    if "device" in flags:
        threads = settings.config.machine.threads or machine.threads
        machine = replace(machine, device=choose_machine(settings.config).device, threads=threads)
    dataset = inspect_dataset(settings.config)
    if not accept_changed_data:
        _refuse_other_data(dataset, facts, run)
    settings = make_data_dir_absolute(settings)
    settings = choose_pipeline_splits(settings, dataset.counts)  # a resume may change the stages
    plan = make_plan(settings.config, dataset.counts, machine)
    plan = replace(plan, warnings=(*settings.notes, *plan.warnings))
    refuse_missing_devices(plan.device, plan.layout.ranks)
    check_run_trackers(settings.config)
    if start is None or start.use == "fork":  # not trained yet: earlier notes still apply
        notes = dict.fromkeys((*facts.get("notes", ()), *plan.warnings))
        plan = replace(plan, warnings=tuple(notes))
    return PreparedRun(
        run=run,
        settings=settings,
        plan=plan,
        dataset=dataset,
        start=start,
        is_new=False,
        accepts_changed_data=accept_changed_data,
    )


def _read_run_facts(run: RunFolder) -> dict[str, Any]:
    """The contents of run.json, checked for what a resume needs."""
    facts = run.facts
    kinds = {"name": str, "origins": dict, "chosen": dict, "data": dict, "plan": dict}
    for name, kind in kinds.items():
        if not isinstance(facts.get(name), kind):
            raise CheckpointError(f"{run.run}: is damaged (no {name}); restore it from a copy")
    if {*facts["chosen"]} != {"device", "precision", "threads"}:
        raise CheckpointError(f"{run.run}: is damaged (chosen); restore it from a copy")
    return facts


def read_stored_options(run: RunFolder) -> dict[str, Any]:
    """The options in a run's config.yaml, as values."""
    given, problems, *_ = read_option_file(run.config, origin="run")
    if problems:
        raise CheckpointError("; ".join(problems))
    if not given:
        raise CheckpointError(f"{run.config}: is empty; restore it from a copy")
    return fill_older_options({name: option.value for name, option in given.items()})


def rebuild_finished_report(path: Path, flags: Mapping[str, str]) -> Summary | None:
    """The summary of a finished run, whose report is rebuilt; None if training is not finished.

    Flags that would change the maths are refused, as when resuming an unfinished run.
    """
    run = open_run(path)
    if not run.summary.exists():
        return None
    stored, name = read_stored_options(run), _read_run_facts(run)["name"]
    settings = read_stored_settings(stored, flags=flags, where=str(run.config), name=name)
    _refuse_other_maths(settings, stored, run)
    remove_dead_parts(run.path)
    write_report(run)
    return read_summary(run.path)


def _refuse_other_maths(settings: Settings, stored: Mapping[str, Any], run: RunFolder) -> None:
    """Raise ConfigError if a resume would change what the run computes."""
    now = settings.config.flat()
    changed = find_changes(settings, stored)
    changed.pop("threads", None)
    # a run that was started without the option also keeps its number of threads; on another
    # device, which gives other bits anyway, it may change
    threads, began_with = settings.config.machine.threads, run.facts["chosen"]["threads"]
    if threads not in (None, began_with) and now["device"] == stored["device"]:
        changed["threads"] = format_flag("threads", began_with)
    if changed:
        flags = {name: format_flag(name, now[name]) for name in changed}
        lines = [
            f"{flags[name]}: the run was started {f'with {then}' if then else 'without it'}, and a "
            "resume cannot change that"
            for name, then in changed.items()
        ]
        folder = flags.pop("run-dir", "--run-dir NEW")
        command = run.fork_command.replace("--run-dir NEW", folder)
        way_out = f"start a new run from this one: {' '.join([command, *flags.values()])}"
        misfits = [name for name in SHAPING if name in changed]
        way_outs = [f"--{n}: the run's weights fit no other network; leave it out" for n in misfits]
        raise ConfigError("\n".join([*lines, *(way_outs or [way_out])]))


def refuse_other_weights(run: RunFolder, config: Config) -> None:
    """Raise CheckpointError if --init-weights changed before the run saved a checkpoint."""
    refuse_missing_weights(config)
    if _hash_init_weights(config) != run.facts.get("init_weights_sha256"):
        raise CheckpointError(
            f"{config.model.init_weights}: has changed since the run started from it; restore the "
            "old file, or start a new run"
        )


def _refuse_other_data(dataset: DatasetSummary, stored: Mapping[str, Any], run: RunFolder) -> None:
    """Raise DataError if images or class names differ from those the run started with."""
    changes = []
    for split, now in dataset.fingerprints.items():
        before = stored["data"].get(split, {})  # a run that scores nothing may begin without valid
        parts = [
            f"{key} {before[key]} then, {now.get(key)} now"
            for key in sorted(before)  # older releases stored fewer
            if before[key] != now.get(key)
        ]
        if parts:
            changes.append(f"its {split} data has changed: {'; '.join(parts)}")
    names = zip(stored.get("classes", dataset.classes), dataset.classes, strict=False)
    other = next(((then, now) for then, now in names if then != now), None)
    if not changes and other is not None:
        changes.append("its classes have changed: {!r} then, {!r} now".format(*other))
    if changes:
        raise DataError(
            f"{run.path}: {changes[0]}. Restore the old data, resume with --accept-changed-data, "
            f"or start a new run: {run.fork_command}"
        )


def _find_newest_start(run: RunFolder) -> StartingPoint | None:
    """The newest checkpoint; for a fork that has none yet, its parent's; else None."""
    return find_starting_point(find_newest_checkpoint(run.checkpoints), run)


def find_starting_point(checkpoint: Path | None, run: RunFolder) -> StartingPoint | None:
    """The starting point at a checkpoint of the run, checked; if None, where the run began."""
    if checkpoint is not None:
        try:
            facts = read_facts(checkpoint)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Remove {checkpoint} and resume again: the run continues from the one "
                "before"
            ) from error
        return StartingPoint(checkpoint=checkpoint, facts=facts, use="resume")
    parent = run.facts["parent"]
    if parent is None:
        return None
    checkpoint = Path(parent["checkpoint"])
    return StartingPoint(checkpoint=checkpoint, facts=read_facts(checkpoint), use="fork")


def finish_preparing(prepared: PreparedRun) -> PreparedRun:
    """Once the lock is held: remove leftovers, store changed options, find the starting point.

    It is searched for again, because another process may have trained until now.
    """
    run, settings = prepared.run, prepared.settings
    remove_leftovers(run.checkpoints)
    restore_best_link(run.checkpoints)
    remove_dead_parts(run.path)
    if run.config_text != dump_config(settings.config):
        write_atomically(run.config, dump_config(settings.config))
        chosen, before = _get_machine_choice(prepared.plan), run.facts["chosen"]
        if chosen["device"] == before["device"]:  # the plan's may be for another number of ranks
            chosen["threads"] = before["threads"]
        run.update_facts(origins=settings.origins, chosen=chosen)
    start = _find_newest_start(run)
    if start is not None and start.use == "resume":
        _refuse_missing_history(replace(prepared, start=start), start)
    return replace(prepared, start=start)


def _refuse_missing_history(prepared: PreparedRun, start: StartingPoint) -> None:
    """Raise CheckpointError if records that were written before the checkpoint are missing."""
    run, plan, state = prepared.run, prepared.plan, start.facts["state"]
    if not {"step", "sums", "scores"} <= state.keys():
        return  # not written by Phalanx: reported when the state is loaded
    step, parent = state["step"], run.facts["parent"]
    began_at = 0 if parent is None else parent.get("first_step")  # earlier releases: unknown
    first = None if began_at is None else began_at + 1
    last_log = step - state["sums"]["steps"]
    logged = {last_log} if last_log >= (first or 1) else set()
    # the log interval may have been changed by a resume or by a release
    is_same = start.facts["plan"].get("log_points") == plan.log.count()
    if is_same and prepared.settings.origins["logs-per-epoch"] != _RESUME_ORIGIN and first:
        logged |= {due for due in range(first, last_log) if plan.log.is_due(due)}
    # a score after the last step is made again
    scored = {int(name) for name in state["scores"]} - {plan.total_steps}
    try:
        missing = describe_missing_rows(
            run.path, first=first, last=step, scored=scored, logged=logged
        )
        changed = "" if missing else find_changed_record(run.path, state.get("records", {}))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from error
    if changed:
        missing = f"{changed} has changed"
    if missing:
        raise CheckpointError(
            f"{run.path}: {missing}, though {start.checkpoint.name} was saved after that; restore "
            f"the records from a copy, or start a new run from the checkpoint: {run.fork_command}"
        )
