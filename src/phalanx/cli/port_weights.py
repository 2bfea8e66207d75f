"""`phalanx port weights`: weights of an older program as a file that --init-weights takes."""

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import JSON_FLAG, Argument, ParsedArgs, command
from phalanx.disk import expand_home
from phalanx.errors import ConfigError
from phalanx.units import format_bytes, format_count, format_plural

if TYPE_CHECKING:
    from phalanx.port_weights.convert import PortedWeights

_OUT = "weights.safetensors"
_NAMES_SHOWN = 3


@command(
    "port weights",
    "Convert weights of an older program into a file for --init-weights.",
    Argument("file", "Old weights: .pt, .pth, .ckpt, .safetensors, .h5, .onnx or .npz."),
    Argument("--model", "The model; by default recognised by names and shapes."),
    Argument("--out", f"The file to write: {_OUT}.", default=_OUT),
    JSON_FLAG,
    usage="FILE [--model NAME] [--out FILE]",
    examples={
        "phalanx port weights resnet50_imagenet_100.pt": "a checkpoint of the PyTorch program",
        "phalanx port weights epoch_90.0.h5 --out resnet50.safetensors": "one of TensorFlow 2",
        "phalanx port weights ckpt.onnx --model resnet20": "one of PopART, with the model given",
        "phalanx port weights weights.npz": "variables of TensorFlow 1",
    },
)
def _port_weights(args: ParsedArgs) -> None:
    """Convert a file, and say what became of every tensor and how to use the result."""
    args.refuse_problems()
    if not args["file"]:
        raise ConfigError("name the file with the old weights: phalanx port weights FILE")
    out = expand_home(args["--out"])
    if out.exists():
        raise ConfigError(f"--out {out}: exists already; remove it, or name another file")
    if out.suffix != ".safetensors":
        raise ConfigError(
            f"--out {out}: --init-weights knows the file by its name, which ends in .safetensors"
        )
    from phalanx.port_weights.convert import port_weights, write_ported

    ported = port_weights(expand_home(args["file"]), args["--model"])
    write_ported(ported, out)
    facts = {
        "source": str(ported.source),
        "names": ported.names,
        "model": ported.model,
        "classes": ported.classes,
        "options": ported.options,
        "out": str(out),
        "used": ported.used,
        "left_over": ported.left_over,
        "notes": list(ported.notes),
    }
    args.print_result(facts, lambda: _print_ported(ported, out))


def _print_ported(ported: "PortedWeights", out: Path) -> None:
    """The file, the model, what was left, and the next command."""
    total = len(ported.used) + len(ported.left_over)
    rows = [
        ("file", f"{ported.source}: {ported.names}"),
        ("model", f"{ported.model}, {ported.classes:,} classes"),
        ("used", f"{format_count(len(ported.used))} of {format_plural(total, 'tensor')}"),
        *(("left over", line) for line in _describe_left_over(ported)),
        *(("note", note) for note in ported.notes),
        ("written", f"{out}, {format_bytes(out.stat().st_size)}"),
    ]
    previous = ""
    for name, text in rows:
        print(f"{name if name != previous else '':<11}{text}")
        previous = name
    flags = [word for name, value in ported.options.items() for word in (f"--{name}", value)]
    words = ["phalanx", "validate", ported.model, "--init-weights", str(out), *flags]
    line = shlex.join(word for word in words if word)
    print(f"\nScore it with the options that make the network the same:\n  {line} --data-dir DIR")


def _describe_left_over(ported: "PortedWeights") -> list[str]:
    """By what they are, how many tensors have no place in the model, and a few names."""
    lines = []
    for reason, count in Counter(ported.left_over.values()).items():
        names = [name for name, own in ported.left_over.items() if own == reason]
        more = ", ..." if count > _NAMES_SHOWN else ""
        shown = ", ".join(names[:_NAMES_SHOWN])
        lines.append(f"{format_plural(count, 'tensor')}, {reason}: {shown}{more}")
    return lines
