"""Every update rule, and how a model gets its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.errors import ConfigError, suggest
from phalanx.optim.decay import split_by_decay
from phalanx.optim.lars_lamb import Lamb, Lars
from phalanx.optim.rmsprop import RmspropTf
from phalanx.optim.rule import Group
from phalanx.optim.sgd_combined import SgdCombined


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """What all rules need to know together; each takes what it knows of."""

    name: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0  # beside the rule
    l2: float = 0.0  # in the gradient, before the rule remembers it
    betas: tuple[float, float] = (0.9, 0.999)  # what adamw and lamb keep of mean and square
    eps: float = 1e-8  # in the divisor, wherever a rule divides
    rmsprop_decay: float = 0.99  # what both rmsprops keep of the mean square
    rmsprop_start: float = 1.0  # first mean square of rmsprop_tf
    trust_coefficient: float = 0.001  # of lars
    trust_decay: float = 0.0  # inside the steps of lars and lamb
    velocity_scale: float = 1.0  # of sgd_combined, until `set_velocity_scale`


_Groups = list[Group]
_Build = Callable[[_Groups, OptimSettings], torch.optim.Optimizer]


def _sgd(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """v = momentum * v + g; w -= lr * v."""
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=True)


def _nesterov(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """v = momentum * v + g; w -= lr * (g + momentum * v)."""
    momentum = settings.momentum
    # without momentum it is plain descent, for which torch wants the word left out
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=momentum > 0, fused=True)


def _sgd_combined(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """Like sgd, with a velocity that is kept scaled."""
    return SgdCombined(groups, momentum=settings.momentum, velocity_scale=settings.velocity_scale)


def _adamw(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """Adam; `update` brings the decay that makes it AdamW."""
    return torch.optim.Adam(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def _rmsprop(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """s = d * s + (1 - d) * g²; b = momentum * b + g / (sqrt(s) + eps); w -= lr * b."""
    return torch.optim.RMSprop(
        groups,
        lr=0.0,
        alpha=settings.rmsprop_decay,
        eps=settings.eps,
        momentum=settings.momentum,
        foreach=True,
    )


def _rmsprop_tf(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """RMSprop with eps inside the root and the learning rate inside the buffer."""
    return RmspropTf(
        groups,
        momentum=settings.momentum,
        eps=settings.eps,
        decay_rate=settings.rmsprop_decay,
        start=settings.rmsprop_start,
    )


def _lars(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """Momentum with a learning rate per weight, from the lengths of weight and gradient."""
    return Lars(
        groups,
        momentum=settings.momentum,
        eps=settings.eps,
        trust_coefficient=settings.trust_coefficient,
    )


def _lamb(groups: _Groups, settings: OptimSettings) -> torch.optim.Optimizer:
    """Adam with a learning rate per weight, from the lengths of weight and step."""
    return Lamb(groups, betas=settings.betas, eps=settings.eps)


OPTIMIZERS: dict[str, _Build] = {
    "sgd": _sgd,
    "momentum": _sgd,
    "nesterov": _nesterov,
    "sgd_combined": _sgd_combined,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
    "rmsprop_tf": _rmsprop_tf,
    "lars": _lars,
    "lamb": _lamb,
}


@dataclass(frozen=True)
class _Footprint:
    """How many numbers a rule keeps for each number of a weight."""

    kept: int  # between updates
    with_momentum: int = 0  # between updates, unless the momentum is 0
    passing: int = 0  # more of them while weights are moved

    def slots(self, momentum: float) -> int:
        """Numbers kept between updates."""
        return self.kept + (self.with_momentum if momentum else 0)


FOOTPRINTS = {
    "sgd": _Footprint(0, with_momentum=1),
    "momentum": _Footprint(0, with_momentum=1),
    "nesterov": _Footprint(0, with_momentum=1),
    "sgd_combined": _Footprint(1),
    "adamw": _Footprint(2),
    "rmsprop": _Footprint(1, with_momentum=1, passing=1),
    "rmsprop_tf": _Footprint(1, with_momentum=1, passing=1),
    "lars": _Footprint(1, passing=1),
    "lamb": _Footprint(2, passing=2),
}


def build_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer of a model; `update` brings the learning rate and both decays.

    Norms and biases get no decay of any kind, and no trust ratio.
    """
    if settings.name not in OPTIMIZERS:
        way_out = suggest(settings.name, OPTIMIZERS)
        raise ConfigError(f"--optimizer {settings.name}: there is no such rule; {way_out}")
    decayed, spared = split_by_decay(model)
    groups: _Groups = [
        {
            "params": decayed,
            "decay": settings.weight_decay,
            "l2": settings.l2,
            "trust_decay": settings.trust_decay,
            "trusts": True,
        },
        {"params": spared, "decay": 0.0, "l2": 0.0, "trust_decay": 0.0, "trusts": False},
    ]
    return OPTIMIZERS[settings.name](groups, settings)
