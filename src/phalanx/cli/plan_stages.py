"""The rows of a plan about the stages of its model, and the drawing of a step."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from phalanx.catalog.variant import OwnVariant
from phalanx.cli.command import ParsedArgs
from phalanx.config.schema import Config
from phalanx.disk import expand_home
from phalanx.errors import ConfigError
from phalanx.plan.model import build_variant
from phalanx.plan.pipeline import count_in_flight, order_passes, time_backward, time_passes
from phalanx.units import align_columns, format_bytes, format_plural, format_si

if TYPE_CHECKING:
    from phalanx.models.stage_cost import StageCost
    from phalanx.plan.plan import Plan
    from phalanx.report.step_picture import StepPicture

_MARGIN = 14  # for the names of rows
_WIDTH = 100  # where there is no terminal
_MOST_WIDTH = 160

_HEADER: tuple[str, ...] = ("stage", "units", "cost", "parameters", "in flight", "memory")

_Rows = list[tuple[str, str]]


def list_stages(plan: "Plan", costs: "Sequence[StageCost]") -> list[dict[str, Any]]:
    """The stages for JSON; those that are folded have no memory of their own."""
    stages = []
    for number, cost in enumerate(costs):
        values = {"stage": number, **asdict(cost)}
        if plan.layout.stages == 1:
            values |= {"in_flight": None, "memory": None}
        stages.append(values)
    return stages


def describe_stages(config: Config, plan: "Plan", costs: "Sequence[StageCost] | None") -> _Rows:
    """The units and costs of each stage; if costs are not known, only the units."""
    if plan.pipeline is None:
        return []
    cells = [_HEADER]
    if costs:
        columns = 4 if plan.layout.stages == 1 else len(_HEADER)
        cells += [_describe_stage(number, cost) for number, cost in enumerate(costs)]
    else:
        variant, columns = build_variant(config), 2
        names = [f"from {start}" for start in ("the first", *plan.pipeline.starts)]
        if not isinstance(variant, OwnVariant):
            names = [_name_ends(units) for units in plan.pipeline.split_units(variant.units)]
        cells += [(str(number), name) for number, name in enumerate(names)]
    lines = align_columns((row[:columns] for row in cells), left=range(columns))
    return [*zip_longest(["stages"], lines, fillvalue="")]


def _describe_stage(number: int, cost: "StageCost") -> tuple[str, ...]:
    """The cells of a stage."""
    return (
        str(number),
        _name_ends(cost.units),
        f"{cost.share:.1%}",
        format_si(cost.parameters),
        str(cost.in_flight),
        format_bytes(cost.memory.peak),
    )


def _name_ends(units: Sequence[str]) -> str:
    return units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}"


def describe_choice(costs: "Sequence[StageCost]") -> _Rows:
    """All units, with a line before those that were chosen to begin a stage."""
    words = [" ".join(cost.units) for cost in costs]
    lines = wrap(" | ".join(words), _find_width() - _MARGIN, break_long_words=False)
    lines.append("a stage begins after each |; --pipeline-splits takes these names, in this order")
    return [*zip_longest(["units"], lines, fillvalue="")]


def _find_width() -> int:
    """The width of the terminal."""
    return min(get_terminal_size((_WIDTH, 24)).columns, _MOST_WIDTH)


# --- a step over time ---


def find_picture_file(args: ParsedArgs) -> Path | None:
    """The path that --picture gives."""
    text: str | None = args["--picture"]
    if text is None:
        return None
    if not text.lower().endswith(".png"):
        raise ConfigError(f"--picture: expected a file that ends in .png, got {text!r}")
    if args["--no-memory"]:
        raise ConfigError(
            "--picture: needs the prediction that --no-memory skips; leave out one of them"
        )
    return expand_home(text)


def write_picture(picture: "StepPicture | str", file: Path) -> None:
    """Draw a step into a file; ConfigError with the reason if its costs are not known."""
    from phalanx.report.step_picture import write_png

    if isinstance(picture, str):
        raise ConfigError(f"--picture: the cost of a step is {picture}")
    write_png(picture, file)


def build_picture(
    config: Config, plan: "Plan", costs: "Sequence[StageCost]", *, footer: str
) -> "StepPicture":
    """One turn of a pipeline: on a device for each stage, or on one device for all."""
    from phalanx.report.step_picture import StepPicture

    pipeline, layout = plan.pipeline, plan.layout
    if pipeline is not None and layout.stages > 1:
        forward = [cost.share * layout.stages for cost in costs]
        orders = [pipeline.order(stage, passes=plan.accumulation) for stage in range(layout.stages)]
        names = [f"stage {stage}" for stage in range(layout.stages)]
        notes = [f"memory {format_bytes(cost.memory.peak)}" for cost in costs]
    else:
        forward, notes = [1.0], [""]
        orders = [order_passes("Sequential", stage=0, stages=1, passes=plan.accumulation)]
        names = [f"all {plan.stages} stages" if plan.stages > 1 else "device"]
    backward = time_backward(forward, recomputed=plan.recompute_patterns is not None)
    return StepPicture(
        passes=time_passes(orders, forward=forward, backward=backward),
        group=count_in_flight(orders[0]),
        rows=tuple(names),
        notes=tuple(notes),
        title=_title(config, plan),
        footer=footer,
        pipelines=layout.pipelines,
    )


def _title(config: Config, plan: "Plan") -> str:
    """The title of the drawing."""
    parts = [config.model.model, format_plural(plan.replicas, "replica")]
    if plan.stages > 1:
        assert plan.pipeline is not None
        parts[-1] += f" of {plan.stages} stages"
        parts.append("folded" if plan.layout.stages == 1 else plan.pipeline.schedule)
    parts.append(f"{plan.accumulation:,} micro-batch{'es' * (plan.accumulation > 1)}")
    return ", ".join(parts)


def draw_step(plan: "Plan", picture: "StepPicture") -> _Rows:
    """The rows of the drawing."""
    from phalanx.report.step_picture import draw_text

    lines = draw_text(picture, _find_width() - _MARGIN)
    if plan.layout.stages < plan.stages:
        lines.append("stages are folded: one device runs all of them, pass after pass")
    if plan.layout.rounds > 1:
        lines.append(f"{plan.layout.rounds} times in a step, for one replica after the other")
    return [*zip_longest(["step"], lines, fillvalue="")]
