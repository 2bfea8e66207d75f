"""docs/options.md: every option, written from the schema."""

from phalanx.config.schema import OPTIONS, Option
from phalanx.config.text import WANTED, plain_kind

_HEAD = """# Options

Every option is a flag (`--batch-size 64`), a YAML key (`batch-size: 64`) and a keyword in Python
(`phalanx.train(batch_size=64)`). Order: default < preset (and what it `extends`) < file < flag;
`phalanx plan --origin` says where each value came from.

Two words that are easily misread: **`--batch-size` is the micro-batch**, the images in one forward
pass of one replica; the global batch of a step is micro-batch x `--gradient-accumulation` x
`--replicas`.

"Resume" says whether `train --resume` may change the option. What may not be changed alters the
maths: `train --fork RUN` starts a new run with it.

This page is written from the schema: `make docs`.
"""


def options_page() -> str:
    """The whole page."""
    parts = [_HEAD]
    heading = ""
    for option in OPTIONS.values():
        if option.heading != heading:
            heading = option.heading
            parts.append(f"\n## {heading}\n\n{_TABLE_HEAD}\n")
        parts.append(_option_line(option) + "\n")
    return "".join(parts)


_TABLE_HEAD = "| option | type | default | resume | meaning |\n|---|---|---|---|---|"


def _option_line(option: Option) -> str:
    """One row of a table."""
    also = f" Also `--{'`, `--'.join(option.also)}`." if option.also else ""
    cells = (
        f"`--{option.name}`",
        f"{WANTED[plain_kind(option.kind)]}{_limits(option)}",
        option.auto or ("none" if option.default is None else f"`{option.default}`"),
        "yes" if option.resumable else "no",
        option.help + also,
    )
    return "| " + " | ".join(cells) + " |"


def _limits(option: Option) -> str:
    """The range a number must be in, in words."""
    if option.low is not None and option.high is not None:
        return f", {option.low:g} to {option.high:g}"
    return f", at least {option.low:g}" if option.low is not None else ""
