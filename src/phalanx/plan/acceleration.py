"""Decides whether a run uses our own kernels, CUDA graphs and torch.compile."""

from collections.abc import Iterator
from typing import NamedTuple

from phalanx.catalog.variant import OwnVariant
from phalanx.config.schema import Config
from phalanx.plan.layout import Layout
from phalanx.plan.machine_choice import MachineChoice, count_local_ranks
from phalanx.plan.model import build_variant


class Acceleration(NamedTuple):
    """What a run uses, with notes on why it does not use the rest."""

    graph: bool = False  # passes are replayed as CUDA graphs
    own_kernels: bool = False  # blocks for which we have kernels use them
    compiles: bool = False  # the network is compiled by torch
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """A few words for the plan."""
        own = "kernels of our own" if self.own_kernels else "torch's kernels"
        kernels = "compiled by torch" if self.compiles else own
        return f"{kernels}, {'replayed as CUDA graphs' if self.graph else 'launched one by one'}"


def plan_acceleration(
    config: Config, machine: MachineChoice, layout: Layout, *, recomputes: bool
) -> Acceleration:
    """Kernels and graphs wherever they are possible, unless the config says otherwise."""
    options = config.machine
    if not machine.device.startswith("cuda"):
        return Acceleration(compiles=options.compile)
    notes = []
    graph = options.graph is not False
    reason = next(_list_graph_obstacles(config, layout), None)
    if graph and reason:
        graph = False
        notes.append(f"graph: off, because {reason}")
    own_kernels = options.kernels == "auto" and machine.precision != "32.32" and not options.compile
    reason = next(_list_kernel_obstacles(layout, recomputes=recomputes), None)
    if own_kernels and reason:
        own_kernels = False
        notes.append(f"kernels: torch's own, because {reason}")
    return Acceleration(graph, own_kernels, options.compile, tuple(notes))


def _list_kernel_obstacles(layout: Layout, *, recomputes: bool) -> Iterator[str]:
    """Why our kernels, which run whole units, cannot be used."""
    if recomputes:
        yield "activations are recomputed one by one"
    if layout.span_groups:
        yield "norms of several ranks share their statistics (--bn-span)"
    if layout.stages > 1:
        yield "the model is cut into stages"


def _list_graph_obstacles(config: Config, layout: Layout) -> Iterator[str]:
    """Why passes cannot be replayed, or not unless the option asks for it."""
    if config.machine.fp_exceptions:
        yield "--fp-exceptions looks at every module of every step"
    if layout.stages > 1:
        yield "stages wait for each other within a step"
    if layout.span_groups:
        yield "norms of several ranks exchange their statistics within a step (--bn-span)"
    if count_local_ranks(layout) < layout.ranks:
        yield "gradients are sent between hosts during the backward pass"
    if config.machine.graph is None and isinstance(build_variant(config), OwnVariant):
        yield "it is not known whether a plugin's network can be replayed; --graph true tries it"
