"""Files as older programs left them, written by the packages that they used."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

Arrays = dict[str, np.ndarray]


def write_npz(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)
    return path


def write_keras(path: Path, arrays: Arrays, *, whole: bool = False, scope: str = "") -> Path:
    """As Keras 2 saves weights, or a whole model; scope: what a second building puts behind."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        root = file.create_group("model_weights") if whole else file
        layers = list(dict.fromkeys(name.split("/")[0] for name in arrays))
        bare = ["input_1", "conv1_relu", "avg_pool"]
        root.attrs["layer_names"] = [layer.encode() for layer in (*layers, *bare)]
        for layer in layers:
            group = root.create_group(layer)
            weights = {
                f"{layer}{scope}/{name.split('/')[1]}:0": array
                for name, array in arrays.items()
                if name.split("/")[0] == layer
            }
            group.attrs["weight_names"] = [name.encode() for name in weights]
            for name, array in weights.items():
                group.create_dataset(name, data=array)
        for layer in bare:
            root.create_group(layer).attrs["weight_names"] = np.array([], dtype="S1")
    return path


def write_onnx(path: Path, arrays: Arrays, *, packed: bool = False) -> Path:
    """packed: 16-bit numbers in pairs, as PopART writes them."""
    onnx = pytest.importorskip("onnx")
    tensors = []
    for name, array in arrays.items():
        if packed and array.dtype == np.float16:
            tensor = onnx.TensorProto(
                name=name, data_type=onnx.TensorProto.FLOAT16, dims=array.shape
            )
            flat = np.zeros(-(-array.size // 2) * 2, np.float16)
            flat[: array.size] = array.ravel()
            tensor.int32_data.extend(flat.view(np.int32).tolist())
        else:
            tensor = onnx.numpy_helper.from_array(array, name)
        tensors.append(tensor)
    graph = onnx.helper.make_graph([], "BuilderGraph", [], [], initializer=tensors)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


def write_pt(path: Path, arrays: Arrays, **more: Any) -> Path:
    import torch

    state = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    torch.save({"epoch": 9, "model_state_dict": state, "loss": 0.5, **more}, path)
    return path
