"""A loss scale that finds its own size: halved at an overflow, doubled when long none came."""

from dataclasses import dataclass, field

from phalanx.plan.loss_scale import AUTOMATIC_START

_MOST = 2.0**24
PATIENCE = 2000  # sound steps after which a larger one is tried, as torch's GradScaler does
_HISTORY = 1000  # changes that are remembered


@dataclass
class DynamicLossScale:
    """The scale of the next step, and how it came about."""

    scale: float = AUTOMATIC_START
    sound: int = 0  # steps since the last change
    skipped: int = 0  # steps that overflowed
    history: list[tuple[int, float]] = field(default_factory=list)  # step, and the scale from there

    def overflowed(self, step: int) -> None:
        """The gradients of a step were not finite: it is skipped, the next has half the scale."""
        self.skipped += 1
        self._change(step, max(self.scale / 2, 2.0**-24))

    def succeeded(self, step: int) -> None:
        """The gradients of a step were finite."""
        self.sound += 1
        if self.sound >= PATIENCE and self.scale < _MOST:
            self._change(step, self.scale * 2)

    def _change(self, step: int, scale: float) -> None:
        self.scale, self.sound = scale, 0
        self.history = [*self.history, (step, scale)][-_HISTORY:]
