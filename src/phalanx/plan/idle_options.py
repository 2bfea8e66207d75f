"""Options that a run does not look at: told, because nothing else would show it."""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.schema import OPTIONS, Config

_SIXTEEN_BITS = ("16.32", "16.16")
_RMSPROPS = ("rmsprop", "rmsprop_tf")
_ADAMS = ("adamw", "lamb")


@dataclass(frozen=True)
class _Use:
    """When an option counts: while another one has one of these values, or none of those."""

    name: str
    of: str  # the option it hangs on
    values: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def counts(self, value: str) -> bool:
        """Whether the option is looked at while the other has that value."""
        return value in self.values if self.values else value not in self.but


USES = (
    _Use("momentum", "optimizer", but=_ADAMS),
    _Use("trust-coefficient", "optimizer", ("lars",)),
    _Use("trust-decay", "optimizer", ("lars", "lamb")),
    _Use("rmsprop-decay", "optimizer", _RMSPROPS),
    _Use("rmsprop-start", "optimizer", ("rmsprop_tf",)),
    _Use("adam-betas", "optimizer", _ADAMS),
    _Use("loss-velocity-scaling-ratio", "optimizer", ("sgd_combined",)),
    _Use("smoothing-over", "label-smoothing", but=("0",)),
    _Use("half-type", "precision", _SIXTEEN_BITS),
    _Use("full-precision-norm", "precision", _SIXTEEN_BITS),
    _Use("half-partials", "precision", _SIXTEEN_BITS),
    _Use("recompute-checkpoints", "enable-recompute", ("true",)),
)


def warn_of_idle_options(config: Config, *, precision: str) -> Iterator[str]:
    """One line for each option that was given another value than its own and changes nothing."""
    said = config.flat() | {"precision": precision}
    for use in USES:
        value = _spell(said[use.of])
        if said[use.name] != OPTIONS[use.name].default and not use.counts(value):
            yield f"--{use.name} has no effect {_why_idle(use, value)}"
    rates = (said["lr-per-image"], said["base-learning-rate"])
    if said["lr-batch"] != OPTIONS["lr-batch"].default and rates == (None, None):
        yield "--lr-batch has no effect with --lr, which is the rate of the whole batch"


def _why_idle(use: _Use, value: str) -> str:
    """What keeps an option from counting, in words, with what would let it."""
    if value in ("false", "0"):
        return f"without --{use.of}"
    only = f", only with {' and '.join(use.values)}" if use.values else ""
    return f"with --{use.of} {value}{only}"


def _spell(value: object) -> str:
    """A value as a flag spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
