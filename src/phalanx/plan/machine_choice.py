"""Chooses what the config leaves to the machine and the launcher: device, threads, layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.errors import ConfigError, name_location
from phalanx.plan.layout import Layout, count_accumulation, make_layout
from phalanx.plan.machine import count_devices, count_threads, resolve_device
from phalanx.plan.pipeline import count_stages, needs_splits
from phalanx.plan.world import count_rank_cores, read_world
from phalanx.units import format_plural


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """The machine that a run computes on.

    A resume reuses device, precision and threads: others would give other bits. It may have more
    devices or fewer.
    """

    device: str
    precision: str
    threads: int  # of each rank
    devices: int = 1  # one for each rank
    launched: bool = False  # the ranks were started by a launcher that is not our own
    scoring: bool = False  # each device scores a share of the images, whatever the replicas


def choose_machine(config: Config) -> MachineChoice:
    """The device, precision, threads and number of devices of a new run."""
    device = resolve_device(config.machine.device)
    precision = config.machine.precision
    if precision == "auto":
        precision = "16.32" if device.startswith("cuda") else "32.32"
    return MachineChoice(
        device=device,
        precision=precision,
        threads=_share_threads(config, device),
        devices=_count_devices(config, device),
        launched=_is_launched(),
    )


def choose_scoring_machine(config: Config) -> MachineChoice:
    """The same for scoring: on one device, unless the option names more."""
    world, devices = read_world(), config.machine.devices or 1
    here = world.local_size if world else devices
    return replace(
        choose_machine(config),
        threads=config.machine.threads or _count_rank_threads(here),
        devices=world.size if world else devices,
        scoring=True,
    )


def reuse_machine(stored: Mapping[str, Any], config: Config, *, ranks: int) -> MachineChoice:
    """The stored machine of a run of so many ranks, with the devices that exist now."""
    machine = MachineChoice(
        **stored,
        devices=_count_devices(config, stored["device"]),
        launched=_is_launched(),
    )
    if config.machine.determinism == "strict" or plan_layout(config, machine).ranks == ranks:
        return machine
    # another number of ranks shares the cores; sums change in their last digit anyway
    return replace(machine, threads=_share_threads(config, stored["device"]))


def _is_launched() -> bool:
    """Whether this rank was started by a launcher other than `train` itself."""
    world = read_world()
    return world is not None and not world.supervised


def _count_devices(config: Config, device: str) -> int:
    """The number of devices: ranks of a launcher, else as the option says, else all."""
    world = read_world()
    return world.size if world else config.machine.devices or count_devices(device)


def _share_threads(config: Config, device: str) -> int:
    """The torch threads of each rank: as the option says, else its share of this machine's."""
    world, replicas = read_world(), config.machine.replicas or 1
    devices, stages = _count_devices(config, device), count_stages(config)
    most_ranks = replicas * stages if devices >= stages else replicas
    local_ranks = world.local_size if world else min(most_ranks, devices)
    return config.machine.threads or _count_rank_threads(local_ranks)


def _count_rank_threads(ranks: int) -> int:
    """The default for each of so many ranks of this machine: several never share a core."""
    return count_threads() if ranks == 1 else min(count_threads(), count_rank_cores(ranks))


def plan_layout(config: Config, machine: MachineChoice) -> Layout:
    """The layout of replicas and stages; ConfigError if config and ranks do not match."""
    replicas, devices = config.machine.replicas, machine.devices
    assert replicas is not None  # set by `resolve_replicas`
    _refuse_unnamed_devices(machine)
    stages = count_stages(config)
    if machine.scoring:
        return _make_scoring_layout(config, machine, stages)
    # other norms do not use statistics over several images
    span = config.machine.bn_span if config.model.norm_type == "batch" else 1
    layout = make_layout(replicas, devices=devices, bn_span=span, stages=stages)
    if machine.launched and layout.ranks != devices:
        sharing = f" of {stages} stages" * (stages > 1) + f" with --bn-span {span}" * (span > 1)
        more = f" or {replicas * stages}" * (replicas * stages > layout.ranks)
        raise ConfigError(
            f"--replicas {replicas}: the launcher started {format_plural(devices, 'rank')}, and "
            f"{format_plural(replicas, 'replica')}{sharing} can use only {layout.ranks}; start "
            f"{layout.ranks}{more}"
        )
    if config.machine.no_fold and (layout.folded or layout.stages < stages):
        there = "there is" if devices == 1 else "there are"
        found = f"the launcher started {devices}" if machine.launched else f"{there} {devices}"
        what = format_plural(replicas, "replica") + f" of {stages} stages" * (stages > 1)
        raise ConfigError(
            f"--no-fold: {what} need {replicas * stages} devices, and {found}; with --no-fold "
            "false, each device runs several of them, one after the other"
        )
    return layout


def _make_scoring_layout(config: Config, machine: MachineChoice, stages: int) -> Layout:
    """A share of the images for each device, or for each pipeline if the model has stages."""
    devices = machine.devices
    if not config.pipeline.pipeline_validation_model or needs_splits(config) or devices < stages:
        return Layout(devices, devices)
    pipelines = devices // stages
    if machine.launched and devices % stages:
        raise ConfigError(
            f"--pipeline-validation-model: the launcher started {devices} ranks, and pipelines of "
            f"{stages} stages use {pipelines * stages} of them; start {pipelines * stages} or "
            f"{(pipelines + 1) * stages}"
        )
    return Layout(pipelines, pipelines * stages, stages=stages)


def count_local_ranks(layout: Layout) -> int:
    """How many of the ranks share this machine."""
    world = read_world()
    return world.local_size if world else layout.ranks


def _refuse_unnamed_devices(machine: MachineChoice) -> None:
    """Raise ConfigError if more devices are needed than --device names."""
    device, world = machine.device, read_world()
    if device != "mps" and ":" not in device:
        return
    named = count_devices(device)
    if machine.launched and world and world.local_size > named:
        raise ConfigError(
            f"--device {device}: the launcher started {world.local_size} ranks here, and this "
            f"names {format_plural(named, 'device')}; start {named}, or name more"
        )
    if not machine.launched and machine.devices > named:
        raise ConfigError(
            f"--devices {machine.devices}: --device {device} names only "
            f"{format_plural(named, 'device')}; use --devices {named}"
            f"{', or --device cuda for all' * (device != 'mps')}"
        )


def refuse_missing_devices(device: str, ranks: int) -> None:
    """Raise ConfigError if there are more ranks than visible GPUs on this machine."""
    world, there = read_world(), count_devices(device)
    here = world.local_size if world else ranks
    if not device.startswith("cuda") or here <= there:
        return
    gpus = "there is only 1 GPU" if there == 1 else f"there are only {there} GPUs"
    if world:
        raise ConfigError(
            f"--device {device}: the launcher started {here} ranks here, and {gpus}; start {there}"
        )
    raise ConfigError(
        f"--devices {here}: {gpus} here; with --devices {there}, several replicas run on each, one "
        "after the other"
    )


def list_layout_notes(config: Config, layout: Layout, machine: MachineChoice) -> list[str]:
    """Notes if the result depends on the number of devices in spite of strict determinism."""
    if config.machine.determinism != "strict":
        return []
    notes = []
    if layout.span_groups:
        most = layout.replicas // layout.bn_span * layout.stages
        notes.append(
            f"--determinism strict: ranks exchange statistics of batch norm (--bn-span "
            f"{layout.bn_span}), so the result agrees with that of other numbers of devices only "
            f"to rounding; with --devices {most} or fewer it is the same bit for bit"
        )
    shared = config.machine.threads is None and machine.device == "cpu" and count_threads() > 1
    splits = layout.replicas * count_stages(config) > 1 and not machine.scoring
    # a resume keeps the threads that the run began with
    if shared and splits and machine.threads == _share_threads(config, machine.device):
        notes.append(
            f"--determinism strict: {format_plural(machine.threads, 'thread')} per process; a run "
            "that begins with another number of devices may use another number of threads, which "
            f"changes the last bits; give all of them --threads {machine.threads}"
        )
    return notes


def find_lightning() -> str:
    """The package that has Lightning's Trainer; ConfigError if it is not installed."""
    for package in ("lightning", "pytorch_lightning"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:  # a mere folder of that name has no origin
            return package
    raise ConfigError("PyTorch Lightning is not installed: pip install 'phalanx[lightning]'")


def refuse_missing_engine(config: Config, machine: MachineChoice) -> None:
    """Raise ConfigError if the engine for training is not installed; scoring needs none."""
    if machine.scoring or config.machine.engine == "native":
        return
    try:
        find_lightning()
    except ConfigError as missing:
        raise ConfigError(
            f"--engine lightning: {missing}; or train with --engine native, to the same bits"
        ) from None


def resolve_replicas(settings: Settings) -> Settings:
    """The settings with a number of replicas: as the option says, else one per device.

    If a launcher has started more ranks than that, there is a replica for each.
    """
    config, asked = settings.config, settings.config.machine.replicas
    ranks = _count_devices(config, resolve_device(config.machine.device))
    stages = count_stages(config)
    room = max(1, ranks // stages)  # how many replicas fit
    if asked is not None and (read_world() is None or room <= asked or ranks % stages):
        return settings
    train, notes, batch = config.train, [], config.data.batch_size
    passes = train.gradient_accumulation or 1
    changes: dict[str, int | None] = {"replicas": room}
    if asked is not None:
        becomes = f" and a global batch of {batch * passes * room:,}"
        each = f" of {stages} stages" * (stages > 1)
        notes.append(
            f"--replicas {asked}: the launcher started {ranks} ranks, which makes {room} "
            f"replicas{each}{becomes * (train.global_batch_size is None)}"
        )
    elif train.global_batch_size is None:
        kept = batch * passes * settings.numbered_replicas
        _check_kept_batch(settings, kept, replicas=room)
        changes |= {"global-batch-size": kept, "gradient-accumulation": None}
    return settings.replace_options(changes, notes=notes)


def _check_kept_batch(settings: Settings, global_batch: int, *, replicas: int) -> None:
    """Raise ConfigError if so many replicas cannot share a batch made for another number."""
    micro_batch = settings.config.data.batch_size
    try:
        count_accumulation(
            global_batch, micro_batch=micro_batch, replicas=replicas, keeps_global_batch=True
        )
    except ConfigError as error:
        raise ConfigError(name_location(str(error), settings.locations)) from None
