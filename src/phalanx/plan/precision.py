"""What the bits of numbers allow, and what may not be meant about them."""

from collections.abc import Iterator

from phalanx.config.schema import Config
from phalanx.errors import ConfigError


def refuse_precision(config: Config, precision: str) -> None:
    """Raise ConfigError for options that the precision has no use for."""
    if not config.loss.auto_loss_scaling:
        return
    lines = []
    if precision == "32.32":
        lines.append(
            "--auto-loss-scaling: 32-bit gradients need no loss scale of their own; use "
            "--precision 16.32 or 16.16, or leave it away"
        )
    if config.loss.initial_loss_scaling is not None:
        lines.append(
            "--auto-loss-scaling and --initial-loss-scaling both move the loss scale; give one"
        )
    if lines:
        raise ConfigError("\n".join(lines))


def warn_of_precision(config: Config, precision: str) -> Iterator[str]:
    """What may not be meant about 16-bit numbers."""
    if config.machine.enable_stochastic_rounding and precision != "16.16":
        yield (
            f"--enable-stochastic-rounding has no effect with --precision {precision}: "
            "weights are 32 bits wide"
        )
    scaled = config.loss.auto_loss_scaling or config.loss.loss_scaling > 1
    if config.machine.half_type == "float16" and precision != "32.32" and not scaled:
        yield (
            "--half-type float16: small gradients vanish without a loss scale; "
            "--auto-loss-scaling or --loss-scaling 128 keeps them"
        )
