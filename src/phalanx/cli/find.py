"""`phalanx find`: a learning rate, and the micro-batch a device holds, by real steps."""

import io
import json
from math import isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.bench import read_count
from phalanx.cli.command import ALL_OPTIONS, Argument, Command, Request, preset_named
from phalanx.cli.data_bench import read_seconds
from phalanx.cli.progress import end_line, tell
from phalanx.config.read import Settings
from phalanx.errors import ConfigError
from phalanx.units import format_bytes

if TYPE_CHECKING:
    from phalanx.bench.finders import BatchSizeTrial, Sizes, Sweep

_WIDTH, _HEIGHT = 60, 10  # of the plot, in letters
_ABOVE = 1.25  # times the first loss is as high as plots go
_DRAWINGS = (".png", ".html")
_INK = {"pale": "#bcd2ec", "line": "#2563b0", "mark": "#d9650b"}  # on white paper


def _read_config(request: Request) -> Settings:
    """The settings that a finder works with."""
    from phalanx.assemble.find_data import read_with_data

    return read_with_data(preset_named(request), request.flags, problems=request.problems)


# --- the learning rate ---


def _find_lr(request: Request) -> int:
    """Sweep the learning rate and print what it suggests."""
    settings = _read_config(request)
    low, high = (_read_rate(f"--{name}", request[name]) for name in ("from", "to"))
    if low >= high:
        raise ConfigError(f"--from {low:g}: must be below --to {high:g}; the rate grows")
    steps = read_count("--steps", request["steps"], least=10)
    out = _read_out(request["out"])
    from phalanx.bench.finders import sweep_rates

    sweep = sweep_rates(
        settings,
        low=low,
        high=high,
        steps=steps,
        done=lambda step: tell(f"step {step} of {steps}"),
    )
    end_line()
    if out is not None:
        _write_drawing(out, sweep, title=settings.name)
    if request["json"]:
        print(json.dumps(sweep.facts(), indent=2))
        return 0
    _show_sweep(sweep, asked=steps)
    return 0


def _read_rate(name: str, text: str) -> float:
    """A learning rate above zero."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not (isfinite(rate) and rate > 0):
        raise ConfigError(f"{name}: wants a learning rate above 0, got {text!r}")
    return rate


def _read_out(text: str | None) -> Path | None:
    """Where the drawing goes, refused before any work is done for it."""
    if text is None:
        return None
    out = Path(text)
    if out.suffix.lower() not in _DRAWINGS:
        raise ConfigError(f"--out {text}: wants a file that ends in .png or .html")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {text}: there is no folder {out.parent}; make it first")
    return out


def _show_sweep(sweep: "Sweep", *, asked: int) -> None:
    """The plot and the suggestions."""
    for line in _draw_text(sweep):
        print(line)
    for name, text in _explain(sweep, asked=asked):
        print(f"{name:<15}{text}")


def _explain(sweep: "Sweep", *, asked: int) -> list[tuple[str, str]]:
    """What the sweep found, in words."""
    end = f"{len(sweep.rates)} of {asked} steps, the loss did not explode; try a larger --to"
    if sweep.tenth is not None:
        end = f"{sweep.rates[-1]:.2g}, after {len(sweep.rates)} of {asked} steps"
    rows = [("explodes at", end)]
    if sweep.steepest is None:
        advice = (
            "the loss did not clearly fall: more --steps, or another --from and --to, may tell more"
        )
        return [*rows, ("suggested", f"nothing; {advice}")]
    rows.append(("falls fastest", f"at {sweep.steepest:.2g}"))
    if sweep.tenth is not None:
        rows.append(("a tenth", f"of where it explodes is {sweep.tenth:.2g}"))
    smaller = ", the smaller of the two" * (sweep.tenth is not None)
    return [*rows, ("suggested", f"--lr {sweep.suggested:.2g}{smaller}")]


def _draw_text(sweep: "Sweep") -> list[str]:
    """The smoothed loss over the rate, in letters; the suggested rate is marked below."""
    count = len(sweep.smooth)
    if not count:
        return []
    top = min(max(sweep.smooth), _ABOVE * sweep.smooth[0])
    low = min(sweep.smooth)
    width = min(_WIDTH, count)
    column = [sweep.smooth[place * count // width] for place in range(width)]
    rows = [round((min(loss, top) - low) / ((top - low) or 1.0) * (_HEIGHT - 1)) for loss in column]
    lines = []
    for height in reversed(range(_HEIGHT)):
        loss = low + (top - low) * height / (_HEIGHT - 1)
        dots = "".join("•" if row == height else " " for row in rows)
        lines.append(f"{loss:>9.3f} │{dots}".rstrip())
    rule = "─" * width
    if sweep.suggested is not None:
        place = min(sweep.rates.index(_nearest(sweep, sweep.suggested)) * width // count, width - 1)
        rule = f"{rule[:place]}▲{rule[place + 1 :]}"
    ends = f"{sweep.rates[0]:g}", f"{sweep.rates[count - 1]:.2g}"
    gap = " " * max(1, width - sum(map(len, ends)))
    return [f"{'loss':>9}", *lines, f"{'':>10}└{rule}", f"{'lr':>9}  {ends[0]}{gap}{ends[1]}"]


def _nearest(sweep: "Sweep", rate: float) -> float:
    """The rate of the sweep that is nearest, by factors."""
    return min(sweep.rates, key=lambda one: abs(log10(one / rate)))


def _write_drawing(out: Path, sweep: "Sweep", *, title: str) -> None:
    """The curve as a PNG, or as a page with the numbers."""
    from phalanx.disk import out_errors, write_atomically

    with out_errors(out, "give another --out"):
        if out.suffix.lower() == ".png":
            write_atomically(out, _draw_png(sweep, title=title))
        else:
            write_atomically(out, _draw_page(sweep, title=title))


def _draw_page(sweep: "Sweep", *, title: str) -> str:
    """A page that needs no other file."""
    from phalanx.report.html import render_html
    from phalanx.report.plots import PALE, TRAIN, VALID, draw_svg

    ink = {"pale": PALE, "line": TRAIN, "mark": VALID}
    label = "loss by learning rate"
    svg = draw_svg(lambda axes: _paint_curve(axes, sweep, ink), label=label)
    return render_html(
        "find_lr.html",
        name=title,
        state="",
        curves=[("Loss by learning rate", svg)],
        facts=_explain(sweep, asked=len(sweep.rates)),
        steps=list(zip(sweep.rates, sweep.losses, strict=True)),
    )


def _draw_png(sweep: "Sweep", *, title: str) -> bytes:
    """The curve with its marks, as a file's content."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=120)
    axes: Any = figure.subplots()
    _paint_curve(axes, sweep, _INK)
    axes.set_title(title)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _paint_curve(axes: Any, sweep: "Sweep", ink: dict[str, str]) -> None:
    """The loss of every step over the rate, smoothed too, and the suggested rate."""
    shown = len(sweep.smooth)
    axes.plot(sweep.rates, sweep.losses, color=ink["pale"], lw=0.8, label="each step")
    axes.plot(sweep.rates[:shown], sweep.smooth, color=ink["line"], lw=1.6, label="smoothed")
    if sweep.suggested is not None:
        words = f"suggested {sweep.suggested:.2g}"
        axes.axvline(sweep.suggested, color=ink["mark"], lw=1, ls="--", label=words)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    if shown and min(sweep.smooth) < sweep.smooth[0]:
        axes.set_ylim(0, _ABOVE * sweep.smooth[0])
    axes.legend()


# --- the micro-batch ---


def _find_batch_size(request: Request) -> int:
    """Try sizes and print what fits, what is fastest and what to take."""
    settings = _read_config(request)
    most = read_count("--most", request["most"], least=2)
    seconds = read_seconds(request["seconds"])
    from phalanx.bench import finders

    def done(trial: "BatchSizeTrial") -> None:
        if request["json"]:
            tell(f"{trial.size} images")
        else:
            print(_describe_trial(trial), flush=True)

    if not request["json"]:
        print(f"{'images':>8}{'images/s':>12}{'memory':>14}")
    sizes = finders.find_batch_size(settings, most=most, seconds=seconds, done=done)
    if request["json"]:
        end_line()
        print(json.dumps(sizes.facts(), indent=2))
        return 0
    _show_sizes(sizes, settings)
    return 0


def _describe_trial(trial: "BatchSizeTrial") -> str:
    """One size as a line of the table."""
    if trial.images_per_second is None:
        return f"{trial.size:>8,}  {trial.problem}"
    memory = format_bytes(trial.peak_bytes or 0)
    return f"{trial.size:>8,}{trial.images_per_second:>12,.0f}{memory:>14}"


def _show_sizes(sizes: "Sizes", settings: Settings) -> None:
    """What the table means."""
    at_most = sizes.largest == sizes.most
    end = "--most; more may fit" if at_most else f"to a sixteenth, on {sizes.device}"
    fastest = sizes.fastest
    rows = [
        ("largest", f"{sizes.largest:,} ({end})"),
        ("fastest", f"{fastest.size:,}, {fastest.images_per_second:,.0f} images/s"),
        (
            "suggested",
            f"--batch-size {sizes.batch_size} --gradient-accumulation {sizes.accumulation}, "
            f"which keeps the global batch of {sizes.global_batch:,} a replica",
        ),
    ]
    if 2 * sizes.batch_size <= min(fastest.size, sizes.global_batch):
        words = f"no larger part of {sizes.global_batch:,} fits; another global batch may be faster"
        rows.append(("note", words))
    if settings.config.model.norm_type == "batch":
        rows.append(("note", "batch norm sees one micro-batch: another size, other results"))
    rows.append(("note", "images that wait for later steps take memory too; leave them some"))
    for name, text in rows:
        print(f"{name:<15}{text}")


_WORDS = (
    Argument(name="preset", metavar="PRESET|FILE", help="A preset, or a YAML file."),
    Argument(name="--config", help="The same, as a flag."),
)
_JSON = Argument(name="--json", help="Print a JSON object.", switch=True)

COMMANDS = {
    "find lr": Command(
        name="find lr",
        summary="Train the run's first steps with a learning rate that grows, and suggest one. "
        "Model, data, optimizer and precision are the run's own; only --out writes anything.",
        usage="phalanx find lr [PRESET|FILE] [--option value]... [--from LR] [--to LR] "
        "[--steps N] [--out FILE] [--json]",
        run=_find_lr,
        arguments=(
            *_WORDS,
            Argument(name="--from", help="The first learning rate  [1e-6]", default="1e-6"),
            Argument(name="--to", help="The last one  [10]", default="10"),
            Argument(name="--steps", help="Steps of the sweep  [100]", default="100"),
            Argument(name="--out", help="Draw the curve into this .png or .html file."),
            _JSON,
        ),
        # the sweep has its own length
        options=tuple(name for name in ALL_OPTIONS if name != "steps"),
        examples=(
            ("phalanx find lr", "for the demo; seconds"),
            ("phalanx find lr demo --optimizer adamw --to 1", "for another optimizer"),
            ("phalanx find lr imagenet-resnet50 --data-dir /imagenet --out lr.png", "and draw it"),
        ),
    ),
    "find batch-size": Command(
        name="find batch-size",
        summary="Find the largest micro-batch that fits the device and the fastest one, by real "
        "steps on made-up images.",
        usage="phalanx find batch-size [PRESET|FILE] [--option value]... [--most N] "
        "[--seconds S] [--json]",
        run=_find_batch_size,
        arguments=(
            *_WORDS,
            Argument(name="--most", help="The largest size to try  [4096]", default="4096"),
            Argument(name="--seconds", help="How long each size is timed  [1]", default="1"),
            _JSON,
        ),
        options=ALL_OPTIONS,
        examples=(
            ("phalanx find batch-size imagenet-resnet50", "needs no data"),
            ("phalanx find batch-size demo --most 256", "on a CPU, in less time"),
            ("phalanx find batch-size imagenet-resnet50 --enable-recompute", "with less memory"),
        ),
    ),
}
