"""The files of each format, and how to run them for the check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.assemble.session import Session
from phalanx.export.metadata import ModelMetadata
from phalanx.export.network import ExportNetwork, copy_network
from phalanx.export.onnx_file import build_onnx, make_example, open_onnx, serialise_onnx
from phalanx.export.parity import Runner
from phalanx.export.timm_config import format_timm_config
from phalanx.export.torch_program import open_program, serialise_program
from phalanx.export.triton_config import LABELS, format_labels, format_triton_config
from phalanx.export.weights_file import import_timm, open_timm, open_weights, serialise_weights
from phalanx.plan.model import build_variant

_NO_TIMM = (
    "timm itself was not run, since it could not be imported: the weights were checked in "
    "Phalanx's own network, config.json was not"
)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An export that has not been moved to its destination yet."""

    files: Mapping[str, str | bytes]  # by path within the export; or only one, its file
    open: Callable[[Path], Runner]  # given the folder they were written to
    network: ExportNetwork | None = None  # if it was written
    onnx: Any = None  # the model of an ONNX file, whose nodes name their modules
    notes: tuple[str, ...] = ()  # on what could not be checked


def _build_onnx_draft(session: Session, metadata: ModelMetadata, file: str, _: int) -> Draft:
    network = ExportNetwork(copy_network(session), metadata, fold=True)
    model = build_onnx(network, metadata)
    return Draft(
        files={file: serialise_onnx(model)},
        open=lambda folder: open_onnx(folder / file),
        network=network,
        onnx=model,
    )


def _build_pt2_draft(session: Session, metadata: ModelMetadata, file: str, _: int) -> Draft:
    network = ExportNetwork(copy_network(session), metadata, fold=True)
    return Draft(
        files={file: serialise_program(network, metadata)},
        open=lambda folder: open_program(folder / file),
        network=network,
    )


def _build_safetensors_draft(session: Session, metadata: ModelMetadata, file: str, _: int) -> Draft:
    return Draft(
        files={file: _serialise_session(session, metadata)},
        open=lambda folder: open_weights(folder / file, copy_network(session), metadata),
    )


def _build_timm_draft(session: Session, metadata: ModelMetadata, _: str, __: int) -> Draft:
    file, timm = "model.safetensors", import_timm()

    def open_folder(folder: Path) -> Runner:
        if timm is not None:
            return open_timm(timm, folder)
        return open_weights(folder / file, copy_network(session), metadata)

    return Draft(
        files={
            "config.json": format_timm_config(build_variant(session.config), metadata),
            file: _serialise_session(session, metadata),
        },
        open=open_folder,
        notes=() if timm is not None else (_NO_TIMM,),
    )


def _build_triton_draft(session: Session, metadata: ModelMetadata, _: str, max_batch: int) -> Draft:
    inner = _build_onnx_draft(session, metadata, "1/model.onnx", max_batch)
    assert inner.network is not None
    outputs = inner.network(make_example(metadata))
    map_shape = tuple(outputs[1].shape[1:]) if metadata.has_activation_map else None
    config = format_triton_config(metadata, max_batch=max_batch, map_shape=map_shape)
    own = {"config.pbtxt": config, LABELS: format_labels(metadata)}
    return replace(inner, files={**inner.files, **own})


def _serialise_session(session: Session, metadata: ModelMetadata) -> bytes:
    layout = build_variant(session.config).norm.layout
    return serialise_weights(session.model, metadata, layout)


# takes a session, the metadata, a name, and the largest batch size
DRAFT_BUILDERS: dict[str, Callable[[Session, ModelMetadata, str, int], Draft]] = {
    "onnx": _build_onnx_draft,
    "pt2": _build_pt2_draft,
    "safetensors": _build_safetensors_draft,
    "timm": _build_timm_draft,
    "triton": _build_triton_draft,
}
