"""One step over time as a picture: a row for each unit and each other part."""

import io
from typing import Any

from phalanx.profile.attribution import DATA, Attribution
from phalanx.profile.step_table import StepTable, describe_part
from phalanx.profile.trace_file import join_neighbours
from phalanx.units import format_plural

_COLOURS = {"forward": "#56b4e9", "backward": "#e69f00", "": "#009e73"}  # safe for the colour-blind
_LEGEND = {"forward": "forward", "backward": "backward", "": "neither"}
_INK, _STRIPE = "#333333", "#f3f3f3"
_ROW_INCHES, _MOST_INCHES = 0.22, 40.0
_DOTS_PER_INCH = 110


def draw_step(attribution: Attribution, table: StepTable) -> bytes:
    """The picture as the bytes of a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = [part.part for part in table.parts]
    height = min(_MOST_INCHES, 1.5 + _ROW_INCHES * len(rows))
    with matplotlib.rc_context({"font.size": 8, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(11, height), layout="constrained")
        axes = figure.subplots()
        _draw_bars(axes, attribution, rows)
        _label_axes(axes, table)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return file.getvalue()


def _draw_bars(axes: Any, attribution: Attribution, rows: list[str]) -> None:
    """Draw a bar for each piece of work."""
    host = [part for part in attribution.host if not attribution.device or part.label.part == DATA]
    pieces = [(one.start, one.end, one.label) for one in host]
    pieces += [(one.start, one.end, one.label) for one in attribution.device]
    bars: dict[str, list[tuple[int, float, float]]] = {phase: [] for phase in _COLOURS}
    for label, start, end in join_neighbours((row[2], row[0], row[1]) for row in sorted(pieces)):
        place = rows.index(describe_part(label.part))
        bars[label.phase].append((place, (start - attribution.start) / 1000, (end - start) / 1000))
    for row in range(0, len(rows), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=_STRIPE, lw=0)
    for phase, own in bars.items():
        if own:
            places, starts, lengths = zip(*own, strict=True)
            colour, legend = _COLOURS[phase], _LEGEND[phase]
            # the edge keeps bars narrower than a pixel visible
            axes.barh(places, lengths, left=starts, height=0.7, color=colour, label=legend)
            axes.barh(places, lengths, left=starts, height=0.7, fill=False, ec=colour, lw=0.4)


def _label_axes(axes: Any, table: StepTable) -> None:
    """Label the rows and the time axis."""
    names = [part.part for part in table.parts]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, table.ms)
    notes = axes.secondary_yaxis("right")
    texts = [f"{part.ms:,.2f} ms, {part.share:.1%}" for part in table.parts]
    notes.set_yticks(range(len(names)), texts)
    for side in (axes, notes):
        side.tick_params(axis="y", length=0)
        side.spines[:].set_visible(False)
    where = "on the GPU; the wait for data is the host's" if table.on_device else "on the host"
    axes.set_xlabel(f"ms, {where}")
    step = f"step {table.step:,} of {format_plural(table.images, 'image')}, {table.ms:,.1f} ms"
    axes.set_title(f"{table.title}: {step}", fontsize=9, loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
