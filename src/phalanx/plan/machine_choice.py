"""Where a run computes: what the config leaves to the machine, and to the world it is in."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.read import Settings
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.layout import Layout, lay_out
from phalanx.plan.machine import count_devices, count_threads, resolve_device
from phalanx.plan.world import read_world
from phalanx.units import format_plural


@dataclass(frozen=True, kw_only=True)
class MachineChoice:
    """Where a run computes.

    A resume reuses device, precision and threads: other ones would give other bits. It may have
    more devices or fewer.
    """

    device: str
    precision: str
    threads: int  # of each rank
    devices: int = 1  # for a rank each
    launched: bool = False  # the ranks are there, made by a launcher


def choose_machine(config: Config) -> MachineChoice:
    """Decide what the config leaves to the machine."""
    device = resolve_device(config.machine.device)
    precision = config.machine.precision
    if precision == "auto":
        precision = "16.32" if device.startswith("cuda") else "32.32"
    return MachineChoice(
        device=device,
        precision=precision,
        threads=_share_threads(config, device),
        devices=_count_devices(config, device),
        launched=read_world() is not None,
    )


def reuse_machine(stored: Mapping[str, Any], config: Config, *, ranks: int) -> MachineChoice:
    """What a run of so many ranks stored of its machine, with the devices that there are now."""
    chosen = MachineChoice(
        **stored,
        devices=_count_devices(config, stored["device"]),
        launched=read_world() is not None,
    )
    if config.machine.determinism == "strict" or plan_layout(config, chosen).ranks == ranks:
        return chosen
    # others share the cores now; sums change in their last digit anyway
    shared = min(chosen.threads, _share_threads(config, stored["device"]))
    return replace(chosen, threads=shared)


def _count_devices(config: Config, device: str) -> int:
    """The devices there are: as many as a launcher started ranks, or as asked, or all."""
    world = read_world()
    return world.size if world else config.machine.devices or count_devices(device)


def _share_threads(config: Config, device: str) -> int:
    """Torch threads of each rank: as asked, else its part of this machine's."""
    world, replicas = read_world(), config.machine.replicas or 1
    here = world.local_size if world else min(replicas, _count_devices(config, device))
    return config.machine.threads or max(1, count_threads() // here)


def plan_layout(config: Config, chosen: MachineChoice) -> Layout:
    """Who runs what; ConfigError where the config or its world does not allow it."""
    replicas, devices = config.machine.replicas, chosen.devices
    assert replicas is not None  # settled by `settle_replicas`
    layout = lay_out(replicas, devices=devices, bn_span=config.machine.bn_span)
    if chosen.launched and layout.ranks != devices:
        raise ConfigError(
            f"--replicas {replicas}: can use {layout.ranks} of the {devices} ranks that were "
            f"started; start {layout.ranks}"
        )
    if config.machine.no_fold and layout.folded:
        found = "is only 1" if devices == 1 else f"are only {devices}"
        raise ConfigError(
            f"--no-fold: {replicas} replicas need {replicas} devices, and there {found}; leave out "
            "--no-fold to run several replicas on each, one after the other"
        )
    return layout


def settle_replicas(settings: Settings) -> Settings:
    """The settings with a number of replicas: as asked, else one a device.

    Where a launcher has started more ranks than that, there is a replica for each.
    """
    config, asked = settings.config, settings.config.machine.replicas
    ranks = _count_devices(config, resolve_device(config.machine.device))
    if asked is not None and (read_world() is None or ranks <= asked):
        return settings
    train, notes = config.train, settings.notes
    if asked is not None:
        many = format_plural(ranks, "rank")
        notes = (*notes, f"--replicas {asked}: the launcher started {many}, which are replicas all")
    elif train.global_batch_size is None:
        batch = config.data.batch_size * (train.gradient_accumulation or 1)
        train = train.model_copy(update={"global_batch_size": batch, "gradient_accumulation": None})
    machine = config.machine.model_copy(update={"replicas": ranks})
    config = config.model_copy(update={"machine": machine, "train": train})
    return replace(settings, config=config, notes=notes)
