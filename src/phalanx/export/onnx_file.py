"""ONNX files: written from the network, and run by onnxruntime."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim

from phalanx.catalog.variant import METADATA_KEY
from phalanx.errors import CheckpointError
from phalanx.export.metadata import ACTIVATION_MAP, LOGITS, ModelMetadata
from phalanx.export.network import ExportNetwork
from phalanx.export.parity import RunFailed, Runner

_OPSET = 18  # supported by onnxruntime 1.14 and later
_NOISY_LOGGERS = (
    *("torch", "torch.onnx", "torch.export", "torch.fx", "torch._dynamo", "onnxscript"),
)
_TRACE_ERRORS = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
)


@contextmanager
def convert_trace_errors(metadata: ModelMetadata) -> Iterator[None]:
    """A quiet context that traces a network; CheckpointError if it cannot be traced."""
    try:
        with quiet_exporters(), torch.no_grad():
            yield
    except _TRACE_ERRORS as error:
        cause = error
        while isinstance(cause.__cause__, _TRACE_ERRORS):
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0]
        raise CheckpointError(
            f"{metadata.model}: torch.export cannot trace it ({reason}); change its forward so "
            "that nothing depends on the values of a tensor, or use --format safetensors"
        ) from error


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """A context without the exporters' messages, such as that torchvision is missing."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


def make_example(metadata: ModelMetadata) -> Tensor:
    """A batch for tracing: of two images, since one would fix the batch size to one."""
    dtype = torch.uint8 if metadata.input == "image" else torch.float32
    return torch.zeros(2, *metadata.input_shape, dtype=dtype)


def build_onnx(network: ExportNetwork, metadata: ModelMetadata) -> Any:
    """The network as an ONNX model whose nodes name their modules."""
    names = [LOGITS, ACTIVATION_MAP] if metadata.has_activation_map else [LOGITS]
    with convert_trace_errors(metadata):
        found = torch.onnx.export(
            network,
            (make_example(metadata),),
            dynamo=True,
            dynamic_shapes=({0: Dim("batch")},),
            input_names=[metadata.input_name],
            output_names=names,
            opset_version=_OPSET,
            verbose=False,
        )
    assert found is not None
    model = found.model_proto
    model.producer_name, model.producer_version = "phalanx", metadata.phalanx
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, metadata.model_dump_json()
    return model


def serialise_onnx(model: Any) -> bytes:
    """The bytes of the file, without the local file names that exporters add."""
    import onnx

    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*plain.graph.value_info, *plain.graph.input, *plain.graph.output):
        del value.metadata_props[:]
    del plain.graph.metadata_props[:]
    return plain.SerializeToString()


def open_onnx(path: Path) -> Runner:
    """A function that runs a file with onnxruntime on a CPU, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    with _convert_run_errors():
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    name = session.get_inputs()[0].name

    def run(batch: NDArray[Any]) -> tuple[NDArray[np.float32], ...]:
        with _convert_run_errors():
            return tuple(session.run(None, {name: batch}))

    return run


@contextmanager
def _convert_run_errors() -> Iterator[None]:
    """A context that turns errors of onnxruntime into RunFailed."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kinds = [kind for kind in vars(state).values() if isinstance(kind, type)]
    refusals = tuple(kind for kind in kinds if issubclass(kind, Exception))
    try:
        yield
    except refusals as error:
        raise RunFailed(" ".join(str(error).split())) from error
