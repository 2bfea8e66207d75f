"""Options that a run does not look at: told, because nothing else would show it."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.schema import OPTIONS, Config

SIXTEEN_BITS = ("16.32", "16.16")
RMSPROPS = ("rmsprop", "rmsprop_tf")
ADAMS = ("adamw", "lamb")


@dataclass(frozen=True)
class Use:
    """When an option counts: while another one has one of these values, or none of those."""

    name: str
    of: str  # the option it hangs on
    values: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def counts(self, value: str) -> bool:
        """Whether the option is looked at while the other has that value."""
        return value in self.values if self.values else value not in self.but


USES = (
    Use("momentum", "optimizer", but=ADAMS),
    Use("trust-coefficient", "optimizer", ("lars",)),
    Use("trust-decay", "optimizer", ("lars", "lamb")),
    Use("rmsprop-decay", "optimizer", RMSPROPS),
    Use("rmsprop-start", "optimizer", ("rmsprop_tf",)),
    Use("adam-betas", "optimizer", ADAMS),
    Use("loss-velocity-scaling-ratio", "optimizer", ("sgd_combined",)),
    Use("smoothing-over", "label-smoothing", but=("0",)),
    Use("half-type", "precision", SIXTEEN_BITS),
    Use("full-precision-norm", "precision", SIXTEEN_BITS),
    Use("half-partials", "precision", SIXTEEN_BITS),
    Use("recompute-checkpoints", "enable-recompute", ("true",)),
)


def warn_of_idle_options(config: Config, *, precision: str) -> Iterator[str]:
    """One line for each option that was given another value than its own and changes nothing."""
    said = config.flat() | {"precision": precision}
    for use in USES:
        value = spell(said[use.of])
        if said[use.name] != OPTIONS[use.name].default and not use.counts(value):
            yield f"--{use.name} has no effect {why_idle(use, value)}"
    rates = (said["lr-per-image"], said["base-learning-rate"])
    if said["lr-batch"] != OPTIONS["lr-batch"].default and rates == (None, None):
        yield "--lr-batch has no effect with --lr, which is the rate of the whole batch"


def why_idle(use: Use, value: str) -> str:
    """What keeps an option from counting, in words, with what would let it."""
    if value in ("false", "0"):
        return f"without --{use.of}"
    only = f", only with {' and '.join(use.values)}" if use.values else ""
    return f"with --{use.of} {value}{only}"


def spell(value: object) -> str:
    """A value as a flag spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
