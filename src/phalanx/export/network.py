"""The exported network: from its input to logits and the activation map of the top class."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from phalanx.assemble.build import build_network
from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.assemble.session import Session
from phalanx.data.transforms.normalization import find_scale_and_shift
from phalanx.export.fold import convert_weights, fold_norms
from phalanx.export.metadata import ModelMetadata
from phalanx.models.layers import Dropout, GlobalAvgPool, GlobalMaxPool, Scale
from phalanx.models.units import UnitModel, to_unit_model

_POOLS = (GlobalAvgPool, GlobalMaxPool)


def copy_network(session: Session) -> UnitModel:
    """A session's model as plain modules on the CPU, without parts that only training needs."""
    # everything is in 32 bits
    model = session.config.model.model_copy(update={"full_precision_norm": False})
    config = session.config.model_copy(update={"model": model})
    plan = replace(session.plan, recompute_patterns=None)
    network = build_network(config, plan, torch.device("cpu"))
    network.load_state_dict(session.model.state_dict())
    for weight in network.parameters():
        weight.requires_grad_(False)
    plain = network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return to_unit_model(plain.eval())


class ExportNetwork(nn.Module):
    """A network with the input that the metadata names, and one or two outputs.

    Made of a model that is its own from then on: with `fold`, without batch norms.
    """

    def __init__(self, model: UnitModel, metadata: ModelMetadata, *, fold: bool) -> None:
        super().__init__()
        self._half = getattr(torch, metadata.dtype) if metadata.dtype != "float32" else None
        self.normalise = (
            _PixelNormaliser(metadata.preprocessing) if metadata.input == "image" else None
        )
        self.folded = fold_norms(model) if fold else []
        if self._half is not None:
            convert_weights(model, self._half)
        self.model = model

    @property
    def has_activation_map(self) -> bool:
        """Whether it has the second output."""
        return find_head(self.model) is not None

    def prepare(self, images: Tensor) -> Tensor:
        """The model's input: normalised, and in its weights' type."""
        x = images if self.normalise is None else self.normalise(images)
        return x if self._half is None else x.to(self._half)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """The logits and, if the head allows it, the activation map, both in 32 bits."""
        x = self.prepare(images)
        head = find_head(self.model)
        if head is None:
            return (self.model(x).float(),)
        before, after, linear = head
        for path in before:
            x = self.model.get_submodule(path)(x)
        features = x
        for path in after:
            x = self.model.get_submodule(path)(x)
        logits = x.float()
        weights = self.model.get_submodule(linear).get_parameter("weight").float()
        chosen = weights[logits.argmax(1)].unsqueeze(1)  # [N, 1, C]
        seen = torch.matmul(chosen, features.float().flatten(2))
        return logits, seen.view(-1, *features.shape[2:])


def find_head(model: UnitModel) -> tuple[list[str], list[str], str] | None:
    """The modules before the last pool, those from it on, and the linear layer among the latter.

    None where the model does not end with a pool over the whole image and one linear layer.
    """
    if type(model).forward is not UnitModel.forward:
        return None
    paths = [path for unit in model.units.values() for path in unit]
    kinds = [model.get_submodule(path) for path in paths]
    pools = [place for place, module in enumerate(kinds) if isinstance(module, _POOLS)]
    if not pools:
        return None
    after = kinds[pools[-1] + 1 :]
    linears = [module for module in after if isinstance(module, nn.Linear)]
    others = [m for m in after if not isinstance(m, nn.Linear | Dropout | Scale | nn.Identity)]
    if len(linears) != 1 or others:
        return None
    cut = pools[-1]
    return paths[:cut], paths[cut:], paths[kinds.index(linears[0])]


class _PixelNormaliser(nn.Module):
    """Normalises bytes [N, size, size, 3], as data/loading/device.py does, in a module.

    Written with operations that every format has.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        how = preprocessing.normalization
        constants = torch.tensor(find_scale_and_shift(preprocessing.mean, preprocessing.std, how))
        self._per_image = how == "per-image"
        self.register_buffer("scale", constants[0].view(3, 1, 1), persistent=False)
        self.register_buffer("shift", constants[1].view(3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """The normalised images, [N, 3, size, size]."""
        values = pixels.float().permute(0, 3, 1, 2)
        if not self._per_image:
            return values * self.scale + self.shift
        mean = values.mean((1, 2, 3), keepdim=True)
        centred = values - mean
        least = float(values.shape[1] * values.shape[2] * values.shape[3]) ** -0.5
        std = (centred * centred).mean((1, 2, 3), keepdim=True).sqrt().clamp_min(least)
        return centred / std
