"""`phalanx find`: a learning rate, or the micro-batch that fits a device, by real steps."""

import io
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import ALL_OPTIONS, JSON_FLAG, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.progress import ProgressLine
from phalanx.config.read import Settings
from phalanx.errors import ConfigError
from phalanx.units import format_bytes, format_plural

if TYPE_CHECKING:
    from phalanx.bench.batch_size_finder import BatchSizes, BatchSizeTrial
    from phalanx.bench.lr_finder import LrSweep

_PLOT_WIDTH, _PLOT_HEIGHT = 60, 10  # in characters
_HIGHEST_LOSS = 1.25  # shown in plots, times the first loss
_COLORS = {"pale": "#bcd2ec", "line": "#2563b0", "mark": "#d9650b"}  # on white paper


# --- the learning rate ---


@command(
    "find lr",
    "Train the run's first steps with an increasing learning rate, and suggest one. "
    "Model, data, optimizer and precision are the run's own; only --out writes anything.",
    *PRESET_ARGS,
    Argument("--from", "The first learning rate.  [1e-6]", default="1e-6"),
    Argument("--to", "The last one.  [10]", default="10"),
    Argument("--steps", "Steps of the sweep.  [100]", default="100"),
    Argument("--out", "Draw the curve into this .png or .html file."),
    JSON_FLAG,
    usage="[PRESET|FILE] [--option value]... [--from LR] [--to LR] [--steps N] [--out FILE] "
    "[--json]",
    # the sweep has its own length
    options=tuple(name for name in ALL_OPTIONS if name != "steps"),
    examples={
        "phalanx find lr": "for the demo; takes seconds",
        "phalanx find lr demo --optimizer adamw --to 1": "for another optimizer",
        "phalanx find lr imagenet-resnet50 --data-dir /imagenet --out lr.png": "and draw it",
    },
)
def _find_lr(args: ParsedArgs) -> None:
    """Sweep the learning rate and print what it suggests."""
    settings = args.read_settings()
    if settings.missing:  # a rate for random weights does not suit weights to be finetuned
        raise ConfigError(settings.missing)
    low, high = (args.read_positive(flag, "a learning rate above 0") for flag in ("--from", "--to"))
    if low >= high:
        raise ConfigError(f"--from {low:g}: must be below --to {high:g}: the rate increases")
    steps = args.read_int("--steps", 10)
    out = _read_output_path(args["--out"])
    from phalanx.bench.lr_finder import sweep_learning_rates

    progress = ProgressLine()
    sweep = sweep_learning_rates(
        settings,
        low=low,
        high=high,
        steps=steps,
        done=lambda step: progress.show(f"step {step} of {steps}"),
    )
    progress.end()
    if out is not None:
        _write_plot(out, sweep, title=settings.name, total=steps)
    args.print_result(sweep.to_dict(), lambda: _print_sweep(sweep, total=steps))


def _print_sweep(sweep: "LrSweep", *, total: int) -> None:
    """Print the curve, and the suggested rate."""
    for line in _draw_text(sweep):
        print(line)
    for name, text in _describe_sweep(sweep, total=total):
        print(f"{name:<15}{text}")


def _read_output_path(text: str | None) -> Path | None:
    """The path of the plot; ConfigError before any work if it cannot be written."""
    if text is None:
        return None
    out = Path(text)
    if out.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"--out {text}: expected a file that ends in .png or .html")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {text}: there is no folder {out.parent}; create it first")
    return out


def _describe_sweep(sweep: "LrSweep", *, total: int) -> list[tuple[str, str]]:
    """What the sweep found, in words."""
    steps = format_plural(len(sweep.rates), "step")
    end = f"nowhere up to {sweep.rates[-1]:.2g}, in {steps}; try a larger --to"
    if sweep.tenth is not None:
        end = f"at {sweep.rates[-1]:.2g}, after {len(sweep.rates)} of {total} steps"
    rows = [("loss explodes", end)]
    if sweep.steepest is None:
        reason = f"the loss did not fall clearly (its noise from step to step is {sweep.noise:.2g})"
        advice = "no minimum can be found; try a larger --batch-size, more --steps or another range"
        return [*rows, ("suggested", f"nothing: {reason}, so {advice}")]
    rows.append(("falls fastest", f"at {sweep.steepest:.2g}"))
    if sweep.tenth is not None:
        rows.append(("a tenth", f"of where it explodes is {sweep.tenth:.2g}"))
    smaller = ", the smaller of the two" * (sweep.tenth is not None)
    return [*rows, ("suggested", f"--lr {sweep.suggested_lr:.2g}{smaller}")]


def _draw_text(sweep: "LrSweep") -> list[str]:
    """The smoothed loss over the rate, as text; the suggested rate is marked below."""
    count = len(sweep.smooth)
    if not count:
        return []
    top = min(max(sweep.smooth), _HIGHEST_LOSS * sweep.smooth[0])
    low = min(sweep.smooth)
    width = min(_PLOT_WIDTH, count)
    column = [sweep.smooth[place * count // width] for place in range(width)]
    rows = [
        round((min(loss, top) - low) / ((top - low) or 1.0) * (_PLOT_HEIGHT - 1)) for loss in column
    ]
    lines = []
    for height in reversed(range(_PLOT_HEIGHT)):
        loss = low + (top - low) * height / (_PLOT_HEIGHT - 1)
        dots = "".join("•" if row == height else " " for row in rows)
        lines.append(f"{loss:>9.3f} │{dots}".rstrip())
    axis = "─" * width
    suggested = sweep.suggested_lr
    if suggested is not None:
        nearest = min(sweep.rates, key=lambda rate: abs(log10(rate / suggested)))
        place = min(sweep.rates.index(nearest) * width // count, width - 1)
        axis = f"{axis[:place]}▲{axis[place + 1 :]}"
    first, last = f"{sweep.rates[0]:g}", f"{sweep.rates[count - 1]:.2g}"
    gap = " " * max(1, width - len(first) - len(last))
    return [f"{'loss':>9}", *lines, f"{'':>10}└{axis}", f"{'lr':>9}  {first}{gap}{last}"]


def _write_plot(out: Path, sweep: "LrSweep", *, title: str, total: int) -> None:
    """The curve as a PNG, or as a page with the numbers."""
    from phalanx.disk import convert_out_errors, write_atomically

    with convert_out_errors(out, "give another --out"):
        if out.suffix.lower() == ".png":
            write_atomically(out, _draw_png(sweep, title=title))
        else:
            write_atomically(out, _draw_page(sweep, title=title, total=total))


def _draw_page(sweep: "LrSweep", *, title: str, total: int) -> str:
    """The curve as a self-contained page."""
    from phalanx.report.html import render_html
    from phalanx.report.plots import PALE_COLOR, TRAIN_COLOR, VALID_COLOR, draw_svg

    ink = {"pale": PALE_COLOR, "line": TRAIN_COLOR, "mark": VALID_COLOR}
    svg = draw_svg(lambda axes: _paint_curve(axes, sweep, ink), label="loss by learning rate")
    return render_html(
        "find_lr.html",
        name=title,
        state="",
        curves=[("Loss by learning rate", svg)],
        facts=_describe_sweep(sweep, total=total),
        steps=list(zip(sweep.rates, sweep.losses, strict=True)),
    )


def _draw_png(sweep: "LrSweep", *, title: str) -> bytes:
    """The curve with its marks, as the bytes of a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=120)
    axes: Any = figure.subplots()
    _paint_curve(axes, sweep, _COLORS)
    axes.set_title(title)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _paint_curve(axes: Any, sweep: "LrSweep", ink: dict[str, str]) -> None:
    """Draw the loss of every step over the rate, the smoothed loss, and the suggested rate."""
    shown = len(sweep.smooth)
    axes.plot(sweep.rates, sweep.losses, color=ink["pale"], lw=0.8, label="each step")
    axes.plot(sweep.rates[:shown], sweep.smooth, color=ink["line"], lw=1.6, label="smoothed")
    if sweep.suggested_lr is not None:
        words = f"suggested {sweep.suggested_lr:.2g}"
        axes.axvline(sweep.suggested_lr, color=ink["mark"], lw=1, ls="--", label=words)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    if shown and min(sweep.smooth) < sweep.smooth[0]:
        axes.set_ylim(0, _HIGHEST_LOSS * sweep.smooth[0])
    axes.legend()


# --- the micro-batch ---


@command(
    "find batch-size",
    "Find the largest micro-batch that fits the device and the fastest one, by real "
    "steps on synthetic images.",
    *PRESET_ARGS,
    Argument("--most", "The largest size to try.  [4096]", default="4096"),
    Argument("--seconds", "How long each size is timed.  [1]", default="1"),
    JSON_FLAG,
    usage="[PRESET|FILE] [--option value]... [--most N] [--seconds S] [--json]",
    options=ALL_OPTIONS,
    examples={
        "phalanx find batch-size imagenet-resnet50": "needs no data",
        "phalanx find batch-size demo --most 256": "on a CPU, in less time",
        "phalanx find batch-size imagenet-resnet50 --enable-recompute": "with less memory",
    },
)
def _find_batch_size(args: ParsedArgs) -> None:
    """Try sizes; print the largest that fits, the fastest and the suggested one."""
    settings = args.read_settings()
    most = args.read_int("--most", 2)
    seconds = args.read_positive("--seconds", "a number up to 600", high=600)
    from phalanx.bench.batch_size_finder import find_batch_size

    progress = ProgressLine()

    def print_trial(trial: "BatchSizeTrial") -> None:
        if args["--json"]:
            progress.show(format_plural(trial.size, "image"))
        elif trial.images_per_second is None:
            print(f"{trial.size:>8,}  {trial.problem}", flush=True)
        else:
            memory = format_bytes(trial.peak_bytes or 0)
            print(f"{trial.size:>8,}{trial.images_per_second:>12,.0f}{memory:>14}", flush=True)

    if not args["--json"]:
        print(f"{'images':>8}{'images/s':>12}{'memory':>14}")
    sizes = find_batch_size(settings, most=most, seconds=seconds, done=print_trial)
    if args["--json"]:
        progress.end()
    args.print_result(sizes.to_dict(), lambda: _print_sizes(sizes, settings))


def _print_sizes(sizes: "BatchSizes", settings: Settings) -> None:
    """Print the conclusions from the table."""
    at_most = sizes.largest == sizes.most
    end = "the limit of --most; more may fit" if at_most else f"within 1/16, on {sizes.device}"
    fastest = sizes.fastest
    rows = [
        ("largest", f"{sizes.largest:,} ({end})"),
        ("fastest", f"{fastest.size:,}, {fastest.images_per_second:,.0f} images/s"),
        (
            "suggested",
            f"--batch-size {sizes.batch_size} --gradient-accumulation {sizes.accumulation}, "
            f"which keeps the global batch of {sizes.global_batch:,} per replica",
        ),
    ]
    if 2 * sizes.batch_size <= min(fastest.size, sizes.global_batch):
        words = (
            f"no larger divisor of {sizes.global_batch:,} fits; another global batch may be faster"
        )
        rows.append(("note", words))
    if settings.config.model.norm_type == "batch":
        rows.append(
            ("note", "batch norm sees one micro-batch, so another size gives other results")
        )
    rows.append(("note", "prefetched images need memory too; leave some free"))
    for name, text in rows:
        print(f"{name:<15}{text}")
