"""The table of all optimizers, and building one for a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError, suggest
from phalanx.optim.optimizers import Group, Lamb, Lars, RmspropTf, SgdCombined

_NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """The settings of all optimizers together; each uses those it knows."""

    name: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0  # decoupled: not part of the gradient
    l2: float = 0.0  # added to the gradient, before the optimizer's state
    betas: tuple[float, float] = (0.9, 0.999)  # decay of mean and mean square in adamw and lamb
    eps: float = 1e-8  # added to the divisor, if there is one
    rmsprop_decay: float = 0.99  # decay of the mean square in rmsprop and rmsprop_tf
    rmsprop_start: float = 1.0  # initial mean square of rmsprop_tf
    trust_coefficient: float = 0.001  # of lars
    trust_decay: float = 0.0  # inside the steps of lars and lamb
    norm_bias_lr_scale: float = 1.0  # learning rate of norms' biases relative to all others
    velocity_scale: float = 1.0  # of sgd_combined, until `set_velocity_scale`


@dataclass(frozen=True)
class _Footprint:
    """How many numbers an optimizer needs for each element of a weight."""

    state: int  # between updates
    with_momentum: int = 0  # between updates, too, unless the momentum is 0
    temporary: int = 0  # additional during an update

    def count_state(self, momentum: float) -> int:
        """Numbers kept between updates."""
        return self.state + (self.with_momentum if momentum else 0)


@dataclass(frozen=True)
class _OptimizerRow:
    """An optimizer's class, its arguments from the settings, and the memory it needs."""

    kind: Callable[..., torch.optim.Optimizer]
    arguments: Callable[[OptimSettings], dict[str, Any]]
    footprint: _Footprint


_SGD = _OptimizerRow(  # v = momentum * v + g; w -= lr * v
    torch.optim.SGD,
    lambda s: {"momentum": s.momentum, "fused": True},
    _Footprint(0, with_momentum=1),
)
OPTIMIZERS = {
    "sgd": _SGD,
    "momentum": _SGD,
    "nesterov": _OptimizerRow(  # v = momentum * v + g; w -= lr * (g + momentum * v)
        torch.optim.SGD,
        # without momentum it is plain SGD, for which torch does not accept nesterov=True
        lambda s: {"momentum": s.momentum, "nesterov": s.momentum > 0, "fused": True},
        _Footprint(0, with_momentum=1),
    ),
    "sgd_combined": _OptimizerRow(  # like sgd, but the velocity is stored scaled
        SgdCombined,
        lambda s: {"momentum": s.momentum, "velocity_scale": s.velocity_scale},
        _Footprint(1),
    ),
    "adamw": _OptimizerRow(  # Adam; `update_weights` adds the decoupled decay of AdamW
        torch.optim.Adam,
        lambda s: {"betas": s.betas, "eps": s.eps, "fused": True},
        _Footprint(2),
    ),
    # s = d * s + (1 - d) * g²; b = momentum * b + g / (sqrt(s) + eps); w -= lr * b
    "rmsprop": _OptimizerRow(
        torch.optim.RMSprop,
        lambda s: {"momentum": s.momentum, "eps": s.eps, "alpha": s.rmsprop_decay, "foreach": True},
        _Footprint(1, with_momentum=1, temporary=1),
    ),
    "rmsprop_tf": _OptimizerRow(  # eps inside the root, the learning rate inside the buffer
        RmspropTf,
        lambda s: {
            "momentum": s.momentum,
            "eps": s.eps,
            "decay_rate": s.rmsprop_decay,
            "start": s.rmsprop_start,
        },
        _Footprint(1, with_momentum=1, temporary=1),
    ),
    "lars": _OptimizerRow(  # momentum, with a rate per weight from the norms of weight and gradient
        Lars,
        lambda s: {"momentum": s.momentum, "eps": s.eps, "coefficient": s.trust_coefficient},
        _Footprint(1, temporary=1),
    ),
    "lamb": _OptimizerRow(  # Adam, with a rate per weight from the norms of weight and step
        Lamb,
        lambda s: {"betas": s.betas, "eps": s.eps},
        _Footprint(2, temporary=2),
    ),
}


def split_by_decay(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Weights that decay, and those that do not: the parameters of norms and all biases."""
    decayed: list[Tensor] = []
    not_decayed: list[Tensor] = []
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            plain = name == "bias" or isinstance(module, _NORMS)
            (not_decayed if plain else decayed).append(weight)
    return decayed, not_decayed


def _find_norm_biases(model: nn.Module) -> list[Tensor]:
    """The biases of norms that have one."""
    norms = (module for module in model.modules() if isinstance(module, _NORMS))
    return [norm.bias for norm in norms if norm.bias is not None]


def build_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.Optimizer:
    """The optimizer of a model; `update_weights` sets the learning rate and applies both decays.

    Norms and biases get no decay of any kind, and no trust ratio.
    """
    if settings.name not in OPTIMIZERS:
        hint = suggest(settings.name, OPTIMIZERS)
        raise ConfigError(f"--optimizer {settings.name}: there is no such optimizer; {hint}")
    decayed, not_decayed = split_by_decay(model)
    decays = {
        "decoupled_decay": settings.weight_decay,
        "l2": settings.l2,
        "trust_decay": settings.trust_decay,
    }
    plain = {"trust_ratio": False, **dict.fromkeys(decays, 0.0)}
    scale = settings.norm_bias_lr_scale
    biases = _find_norm_biases(model) if scale != 1 else []
    scaled = {id(bias) for bias in biases}
    groups: list[Group] = [
        {"params": decayed, "trust_ratio": True, **decays},
        {"params": [weight for weight in not_decayed if id(weight) not in scaled], **plain},
    ]
    if biases:
        groups.append({"params": biases, "lr_scale": scale, **plain})
    row = OPTIMIZERS[settings.name]
    return row.kind(groups, lr=0.0, **row.arguments(settings))
