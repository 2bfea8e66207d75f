"""Only weights: safetensors files with timm's names, batch norms not folded."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from phalanx.catalog.variant import METADATA_KEY, NORM_LAYOUT_KEY
from phalanx.export.metadata import ModelMetadata
from phalanx.export.network import ExportNetwork
from phalanx.export.onnx_file import quiet_exporters
from phalanx.export.parity import RunFailed, Runner
from phalanx.models.units import UnitModel


def serialise_weights(model: nn.Module, metadata: ModelMetadata, norm_layout: str) -> bytes:
    """The bytes of a safetensors file: weights and running statistics, with the metadata."""
    dtype = getattr(torch, metadata.dtype)
    tensors = {name: _convert(name, t, dtype) for name, t in model.state_dict().items()}
    about = {
        "format": "pt",  # as Hugging Face's readers require
        NORM_LAYOUT_KEY: norm_layout,
        METADATA_KEY: metadata.model_dump_json(),
    }
    return save(tensors, about)


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is written; statistics of norms stay in 32 bits."""
    keeps = not tensor.is_floating_point() or name.endswith(("running_mean", "running_var"))
    return tensor.contiguous() if keeps else tensor.to(dtype).contiguous()


def open_weights(path: Path, network: UnitModel, metadata: ModelMetadata) -> Runner:
    """A function that runs a network with the weights of a file; changes the network."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    target = network.model if [*network.units] == ["model"] else network
    assert isinstance(target, nn.Module)
    target.load_state_dict(tensors)
    wide = metadata.model_copy(update={"dtype": "float32", "input": "tensor"})
    run = run_torch(ExportNetwork(network, wide, fold=False))
    return lambda batch: run(batch)[:1]  # the activation map is not part of the file


def import_timm() -> Any:
    """timm, if it is installed and works with this torch, else None."""
    try:
        with quiet_exporters():
            return import_module("timm")
    except (ImportError, RuntimeError, OSError):
        return None


def open_timm(timm: Any, folder: Path) -> Runner:
    """A function that runs timm's network, built from a folder's config.json and weights."""
    try:
        with quiet_exporters():
            model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError, OSError) as error:
        reason = " ".join(str(error).split())
        raise RunFailed(
            f"timm {timm.__version__} refuses it ({reason}); update timm, or use --format "
            "safetensors"
        ) from error
    return run_torch(lambda images: (model(images),))


def run_torch(network: Any) -> Runner:
    """A network of torch as a function of arrays."""

    def run(batch: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        with torch.no_grad():
            return tuple(part.numpy() for part in network(torch.from_numpy(batch)))

    return run
