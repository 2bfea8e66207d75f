"""RMSprop in TensorFlow's form."""

import torch
from torch import Tensor

from phalanx.optim.rule import Group, Rule


class RmspropTf(Rule):
    """s = d * s + (1 - d) * g²; b = momentum * b + lr * g / sqrt(s + eps); w -= b.

    PyTorch's form has eps outside the root and the learning rate outside the buffer. `start` is
    the first s: 1 in TensorFlow 1 and in PopART's variant of that name, 0 in Keras.
    """

    def move(self, weights: list[Tensor], gradients: list[Tensor], group: Group) -> None:
        """Change weights, mean squares and buffers."""
        squares = self.slots(weights, "square_avg", group["start"])
        torch._foreach_mul_(squares, group["decay_rate"])
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - group["decay_rate"])
        roots = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(roots)
        if not group["momentum"]:
            torch._foreach_addcdiv_(weights, gradients, roots, value=-group["lr"])
            return
        buffers = self.slots(weights, "momentum_buffer")
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_addcdiv_(buffers, gradients, roots, value=group["lr"])
        torch._foreach_sub_(weights, buffers)
