"""A loss scale that adapts: halved at an overflow, doubled after many steps without one."""

from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.plan.loss_scale import AUTOMATIC_START

LARGEST_SCALE, SMALLEST_SCALE = 2.0**24, 2.0**-24
GROWTH_INTERVAL = 2000  # finite steps before a larger scale is tried, as in torch's GradScaler
REMEMBERED_CHANGES = 1000


@dataclass
class DynamicLossScale:
    """The loss scale of the next step, and its recent changes."""

    scale: float = AUTOMATIC_START
    finite_steps: int = 0  # since the last change
    skipped: int = 0  # steps that overflowed
    history: list[tuple[int, float]] = field(default_factory=list)  # step, and scale from then on

    @property
    def multiplier(self) -> float:
        """The factor for the loss of a pass."""
        return self.scale

    def record_overflow(self, step: int) -> None:
        """Record a step whose gradients were not finite: it is skipped, and the scale halved."""
        self.skipped += 1
        self._change(step, max(self.scale / 2, SMALLEST_SCALE))

    def record_finite_step(self, step: int) -> None:
        """Record a step whose gradients were finite; doubles the scale after many of them."""
        self.finite_steps += 1
        if self.finite_steps >= GROWTH_INTERVAL and self.scale < LARGEST_SCALE:
            self._change(step, self.scale * 2)

    def _change(self, step: int, scale: float) -> None:
        self.scale, self.finite_steps = scale, 0
        self.history = [*self.history, (step, scale)][-REMEMBERED_CHANGES:]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, under the names that checkpoints have always had."""
        values = asdict(self)
        return {**values, "sound": values.pop("finite_steps")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DynamicLossScale":
        """The loss scale that `to_dict` was called on."""
        history = [(step, scale) for step, scale in values["history"]]
        return cls(values["scale"], values["sound"], values["skipped"], history)
