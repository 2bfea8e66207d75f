"""A model in an ONNX file, run by onnxruntime, without torch."""

from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.catalog.variant import METADATA_KEY
from phalanx.data.transforms.transform import CROPS
from phalanx.errors import CheckpointError, ConfigError
from phalanx.export.metadata import ModelMetadata, read_metadata
from phalanx.plan.machine import resolve_device
from phalanx.serve.backend import BackendOptions, refuse_text
from phalanx.serve.batching import Outputs, Rows

_DTYPES = {"tensor": "tensor(float)", "image": "tensor(uint8)"}
_NORMALIZATIONS = ("mean-std", "mean", "per-image", "none")
_LOG_ERRORS = 3  # onnxruntime's level: users cannot act on its warnings, which are about graphs
_CUDA = "CUDAExecutionProvider"


class OnnxBackend:
    """An exported file, run by onnxruntime."""

    def __init__(self, path: Path, options: BackendOptions) -> None:
        self.path = path
        runtime = _import_onnxruntime()
        provider = _choose_provider(runtime, options.device)
        settings = runtime.SessionOptions()
        settings.intra_op_num_threads = options.threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = _LOG_ERRORS
        # threads that spin between batches would take cores away from decoding
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = runtime.InferenceSession(str(path), settings, providers=[provider])
        except Exception as error:  # noqa: BLE001 - its exceptions share no other base
            refuse_text(path)
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{path}: onnxruntime cannot load it ({reason}); it is damaged, or not an ONNX "
                "file; export it again"
            ) from None
        text = self._session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        if text is None:
            raise CheckpointError(
                f"{path}: an ONNX file of another program, without class names and preprocessing; "
                "the server runs only files written by `phalanx export`"
            )
        self.metadata = read_metadata(text, path)
        _refuse_other_preprocessing(path, self.metadata, self._session.get_inputs())
        self.input_kinds = (self.metadata.input,)
        self._names = [output.name for output in self._session.get_outputs()]
        on_gpu = options.device != "cpu"
        self.runtime = f"onnxruntime {runtime.__version__}, {options.device}"
        # cuDNN searches for its fastest kernels anew at each size
        self.batch_sizes = list_batch_sizes(options.max_batch) if on_gpu else ()

    def run(self, rows: Rows) -> Outputs:
        """The outputs for a batch."""
        found = self._session.run(self._names, {self.metadata.input_name: rows})
        return dict(zip(self._names, found, strict=True))


def _import_onnxruntime() -> Any:
    """The package; ConfigError if it is not installed."""
    try:
        return import_module("onnxruntime")
    except ImportError:
        raise ConfigError(
            "ONNX files are run by onnxruntime, which is not installed: "
            "pip install 'phalanx[serve]'"
        ) from None


def choose_device(asked: str) -> str:
    """The device of an ONNX file: auto is a GPU if onnxruntime supports it, else the CPU."""
    if asked != "auto":
        return asked
    providers = _import_onnxruntime().get_available_providers()
    has_gpu = resolve_device(asked).startswith("cuda") and _CUDA in providers
    return "cuda" if has_gpu else "cpu"


def list_batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The sizes to which batches are padded, if each new size costs time: powers of two.

    >>> list_batch_sizes(24)
    (1, 2, 4, 8, 16, 24)
    """
    sizes = [1]
    while sizes[-1] * 2 < max_batch:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, max_batch]))


def _choose_provider(runtime: Any, device: str) -> Any:
    if device == "cpu":
        return "CPUExecutionProvider"
    kind, _, number = device.partition(":")
    if kind != "cuda" or _CUDA not in runtime.get_available_providers():
        raise ConfigError(
            f"--device {device}: this onnxruntime has no {kind.upper()}; use --device cpu, "
            "or pip install onnxruntime-gpu in its place"
        )
    return (_CUDA, {"device_id": int(number or 0)})


def _refuse_other_preprocessing(path: Path, metadata: ModelMetadata, inputs: list[Any]) -> None:
    """Raise CheckpointError if the preprocessing would not produce the model's input."""
    how = metadata.preprocessing
    if how.augment not in CROPS or how.normalization not in _NORMALIZATIONS:
        unknown = how.augment if how.augment not in CROPS else how.normalization
        raise CheckpointError(
            f"{path}: its images are prepared by {unknown!r}, which this Phalanx does not know; "
            "update Phalanx, or export the run again with this one"
        )
    found = {one.name: (one.type, tuple(one.shape[1:])) for one in inputs}
    wanted = _DTYPES[metadata.input], metadata.input_shape
    if found.get(metadata.input_name) != wanted or len(found) != 1:
        given = ", ".join(
            f"{name} {kind} [N, {_join(shape)}]" for name, (kind, shape) in found.items()
        )
        raise CheckpointError(
            f"{path}: its metadata prepares {metadata.input_name} {wanted[0]} [N, "
            f"{_join(wanted[1])}], and the model takes {given}: another preprocessing; "
            "export it again from its run"
        )


def _join(shape: tuple[Any, ...]) -> str:
    return ", ".join(map(str, shape))
