"""Reads the files of older programs: what they hold as arrays by name, without running code."""

import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.errors import CheckpointError, ConfigError
from phalanx.port_weights.match import Array
from phalanx.port_weights.names_popart import POPART_NAMINGS
from phalanx.port_weights.names_pytorch import PYTORCH_NAMINGS
from phalanx.port_weights.names_tensorflow import KERAS_NAMINGS, TENSORFLOW1_NAMINGS
from phalanx.port_weights.naming import Naming

if TYPE_CHECKING:
    from torch import Tensor

_HDF5, _ZIP, _PICKLE = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04", b"\x80"
_CHECKPOINT_FILE = re.compile(r"(.+)\.(index|meta|data-\d+-of-\d+)")
# what zipfile, numpy, h5py and onnx raise for a file that is cut short, changed or something else
_BROKEN = (
    *(OSError, EOFError, MemoryError, OverflowError, RuntimeError, SyntaxError),
    *(AttributeError, LookupError, TypeError, ValueError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
_KINDS = ".pt, .pth, .ckpt, .safetensors, .h5, .onnx or .npz"


@dataclass(frozen=True)
class OldFile:
    """What a file of old weights holds."""

    path: Path
    kind: str  # in words: "Keras weights"
    namings: tuple[Naming, ...]  # the tables that its names may be of
    arrays: dict[str, Array]
    settings: dict[str, Any] = field(default_factory=dict)  # options its program stored with it
    others: tuple[str, ...] = ()  # what is in it and is no array of numbers
    types: dict[str, str] = field(default_factory=dict)  # of arrays that were converted to be read


def read_old_file(path: Path) -> OldFile:
    """The arrays of a file, whatever program wrote it."""
    _refuse_tensorflow_checkpoint(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; name the file with the weights in it")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; old weights are {_KINDS} files")
    try:
        with path.open("rb") as file:
            first = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check it") from error
    return _choose_reader(path, first)(path)


def _choose_reader(path: Path, first: bytes) -> Callable[[Path], OldFile]:
    """By what the file begins with, else by its name: .npz and .pt are both zip archives."""
    if path.suffix == ".safetensors":
        return _read_safetensors
    if first.startswith(_HDF5):
        return _read_keras
    if first.startswith(_ZIP):
        return _read_npz if _holds_arrays(path) else _read_torch
    if first.startswith(_PICKLE):
        return _read_torch
    if path.suffix == ".onnx" and first:
        return _read_onnx
    found = f"begins with {first!r}" if first else "is empty"
    raise CheckpointError(f"{path}: {found}, which no {_KINDS} file does; is it the right file?")


def _holds_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    except _BROKEN:
        return path.suffix == ".npz"


# --- TensorFlow 1 ---


def _refuse_tensorflow_checkpoint(path: Path) -> None:
    """A checkpoint of TensorFlow 1 is refused with the two lines that make an .npz of it."""
    found = _CHECKPOINT_FILE.fullmatch(path.name) if path.is_file() else None
    prefix = path.with_name(found[1]) if found else path
    if path.name == "checkpoint" and path.is_file():
        prefix = path.parent
    indexes = sorted(prefix.glob("*.index"), key=lambda index: index.lstat().st_mtime)
    if indexes and not (prefix / "checkpoint").exists():  # which says what is the latest
        prefix = indexes[-1].with_suffix("")
    if found or indexes or Path(f"{prefix}.index").is_file():
        raise CheckpointError(
            f"{path}: is a TensorFlow 1 checkpoint, which only TensorFlow reads; where it is "
            "installed, these two lines of Python turn it into an .npz for `phalanx port "
            "weights`:\n"
            "  import numpy, tensorflow; "
            f"reader = tensorflow.train.load_checkpoint({str(prefix)!r})\n"
            '  numpy.savez("weights.npz", **{name: reader.get_tensor(name) for name in '
            "reader.get_variable_to_shape_map()})"
        )


def _read_npz(path: Path) -> OldFile:
    """Variables of TensorFlow 1, by their names, perhaps with `:0` behind."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            read = {name.removesuffix(":0"): _read_plain(file, name) for name in file.files}
    except _BROKEN as error:
        raise CheckpointError(f"{path}: is truncated or damaged; make it again") from error
    arrays = {name: array for name, array in read.items() if array is not None}
    others = [name for name, array in read.items() if array is None]
    return _separate_numbers(
        path, "TensorFlow 1 variables", namings=TENSORFLOW1_NAMINGS, arrays=arrays, others=others
    )


def _read_plain(file: Mapping[str, Array], name: str) -> Array | None:
    """One array; None for Python objects, whose code would have to be run."""
    try:
        return file[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            return None
        raise


# --- PyTorch ---


def _read_torch(path: Path) -> OldFile:
    """A state dict, alone or in what a script or Lightning saved."""
    from phalanx.models.weights import read_pickled

    tensors, settings = read_pickled(path)
    return _take_tensors(path, tensors, settings)


def _read_safetensors(path: Path) -> OldFile:
    """The same names in a safetensors file."""
    from phalanx.models.weights import read_safetensors

    return _take_tensors(path, read_safetensors(path), {})


def _take_tensors(path: Path, tensors: "dict[str, Tensor]", settings: dict[str, Any]) -> OldFile:
    """Tensors as arrays: numpy does not have all of torch's types."""
    arrays, types = {}, {}
    for full_name, tensor in tensors.items():
        name = _clean_torch_name(full_name)
        types[name] = str(tensor.dtype).removeprefix("torch.")
        arrays[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return OldFile(path, "PyTorch weights", PYTORCH_NAMINGS, arrays, settings, types=types)


_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_layer_to_call|layer)\.")
_CAST_NORM = re.compile(r"((?:^|\.)(?:_?bn\d|downsample\.1))\.1(\.\w+)")


def _clean_torch_name(name: str) -> str:
    """The name without what pipeline stages, recomputation and 32-bit norms put into it.

    >>> _clean_torch_name("layer2._layer_to_call.0.conv1.layer.weight")
    'layer2.0.conv1.weight'
    >>> _clean_torch_name("layer1.0.bn2.1.running_var"), _clean_torch_name("bn1.1.weight")
    ('layer1.0.bn2.running_var', 'bn1.weight')
    """
    return _CAST_NORM.sub(r"\1\2", _WRAPPER.sub("", name))


# --- Keras ---


def _read_keras(path: Path) -> OldFile:
    """What Keras' save_weights or save wrote: layers, and the weights of each by name."""
    h5py = _import_extra("h5py", path)
    try:
        with h5py.File(path, "r") as file:
            arrays = dict(_iterate_keras(file.get("model_weights", file), path))
    except _BROKEN as error:
        raise CheckpointError(
            f"{path}: is truncated or damaged ({error}); copy it again"
        ) from error
    return _separate_numbers(path, "Keras weights", namings=KERAS_NAMINGS, arrays=arrays)


def _iterate_keras(layers: Any, path: Path) -> Iterator[tuple[str, Array]]:
    """The weights of every layer of an HDF5 group."""
    if "layer_names" not in layers.attrs:
        raise CheckpointError(
            f"{path}: has no layer_names, as Keras' save_weights to an .h5 file leaves them; save "
            "it again that way with Keras 2"
        )
    for layer in map(_to_text, layers.attrs["layer_names"]):
        names = [_to_text(name) for name in layers[layer].attrs.get("weight_names", ())]
        for name, key in zip(_name_keras_weights(layer, names), names, strict=True):
            yield name, np.asarray(layers[layer][key])


def _to_text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _name_keras_weights(layer: str, names: list[str]) -> list[str]:
    """Layer and weight, as conv1_conv/kernel.

    Keras numbers the scopes of a model that is built anew, so the layer's own name is the one to
    trust, unless the layer is a whole model.
    """
    ends = [name.partition(":")[0].split("/") for name in names]
    if len({end[-1] for end in ends}) == len(ends):
        return [f"{layer}/{end[-1]}" for end in ends]
    return ["/".join(end[-2:]) for end in ends]


# --- PopART ---


def _read_onnx(path: Path) -> OldFile:
    """The initializers of an ONNX model."""
    onnx = _import_extra("onnx", path)
    decode_error = import_module("google.protobuf.message").DecodeError
    try:
        graph = onnx.load(str(path), load_external_data=False).graph
        arrays = {_to_text(tensor.name): _to_array(onnx, tensor) for tensor in graph.initializer}
    except decode_error as error:
        raise CheckpointError(f"{path}: is not a whole ONNX file; copy it again") from error
    except _BROKEN as error:
        raise CheckpointError(f"{path}: holds a tensor that cannot be read: {error}") from error
    return _separate_numbers(
        path, "initializers of an ONNX model", namings=POPART_NAMINGS, arrays=arrays
    )


def _to_array(onnx: ModuleType, tensor: Any) -> Array:
    """One initializer; PopART packs two 16-bit numbers into each 32-bit one."""
    count = int(np.prod(tensor.dims, dtype=np.int64))
    if tensor.HasField("data_location") and tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError(f"{tensor.name} is kept in another file; save the model in one")
    packed = len(tensor.int32_data)
    if tensor.data_type == onnx.TensorProto.FLOAT16 and count > packed == (count + 1) // 2:
        halves = np.array(tensor.int32_data, dtype="<i4").view("<f2")
        return halves[:count].reshape(tuple(tensor.dims))
    return np.asarray(onnx.numpy_helper.to_array(tensor))


def _import_extra(name: str, path: Path) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(
            f"{path}: reading it needs {name}, which is not installed; pip install 'phalanx[port]'"
        ) from None


def _separate_numbers(
    path: Path,
    kind: str,
    *,
    namings: tuple[Naming, ...],
    arrays: Mapping[str, Array],
    others: Iterable[str] = (),
) -> OldFile:
    """Numbers apart from what is none, such as names."""
    numbers = {name: array for name, array in arrays.items() if _is_number(array)}
    rest = tuple(name for name in arrays if name not in numbers)
    return OldFile(path, kind, namings, numbers, others=(*others, *rest))


def _is_number(array: Array) -> bool:
    return array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"
