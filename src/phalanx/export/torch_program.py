"""pt2 files: programs of torch.export, which run without the code of a model."""

import io
from pathlib import Path

import torch
from torch.export import Dim

from phalanx.export.metadata import PT2_METADATA, ModelMetadata
from phalanx.export.network import ExportNetwork
from phalanx.export.onnx_file import convert_trace_errors, make_example, quiet_exporters
from phalanx.export.parity import Runner
from phalanx.export.weights_file import run_torch

# of metadata with local file names
_PATH_KEYS = ("stack_trace", "nn_module_stack_trace", "source_fn_stack")


def serialise_program(network: ExportNetwork, metadata: ModelMetadata) -> bytes:
    """The bytes of a pt2 file."""
    with convert_trace_errors(metadata):
        program = torch.export.export(
            network, (make_example(metadata),), dynamic_shapes=({0: Dim("batch")},)
        )
    with quiet_exporters():
        for node in program.graph.nodes:
            for key in _PATH_KEYS:
                node.meta.pop(key, None)
        content = io.BytesIO()
        torch.export.save(program, content, extra_files={PT2_METADATA: metadata.model_dump_json()})
    return content.getvalue()


def open_program(path: Path) -> Runner:
    """A function that runs a file with torch on a CPU."""
    with quiet_exporters():
        return run_torch(torch.export.load(path).module())
