"""Where an export and its checkpoint diverge: the first unit whose output differs."""

import ast
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.assemble.session import Session
from phalanx.export.drafts import Draft
from phalanx.export.fold import fold_norms
from phalanx.export.network import copy_network
from phalanx.export.parity import ParityCase
from phalanx.models.units import UnitModel

_LEAST_DIFFERENCE = 0.01  # relative to a unit's largest value: far more than rounding
_SCOPES = "pkg.torch.onnx.name_scopes"  # of a node: the modules it belongs to, outermost first
_Outputs = Mapping[str, NDArray[Any]]


def explain_disagreement(
    session: Session, draft: Draft, case: ParityCase, dtype: str, row: int
) -> str:
    """The first unit that differs for an image, the likely cause, and what to do."""
    way_out = "use another --format" if dtype == "float32" else "use --dtype float32"
    if draft.network is None:
        return way_out
    pixels, given = case.images.pixels[row : row + 1], case.inputs[row : row + 1]
    network = draft.network
    with torch.no_grad():
        images = session.normaliser(pixels)
        expected = _run_units(copy_network(session), images)
        folded = copy_network(session)
        fold_norms(folded)
        in_32_bits = _run_units(folded, images)
        prepared = network.prepare(torch.from_numpy(np.ascontiguousarray(given)))
        ours = _run_units(network.model, prepared)
    unit = _find_first_difference(expected, in_32_bits)
    if unit:  # even in 32 bits: another type of weights would not help
        return (
            f"{unit} is the first unit to differ, with folded norms; use --format safetensors, "
            "which keeps them"
        )
    unit = _find_first_difference(in_32_bits, ours)
    if unit:
        return f"{unit} is the first unit to differ, in {dtype}; {way_out}"
    if draft.onnx is None:
        return f"every unit agrees before the file is written; {way_out}"
    unit = _find_first_difference(ours, _run_onnx_units(draft.onnx, network.model, given))
    return f"{unit} is the first unit to differ in the file; {way_out}" if unit else way_out


def _run_units(model: UnitModel, x: Tensor) -> dict[str, NDArray[Any]]:
    """The output of each unit; only of the whole model if it has its own forward."""
    if type(model).forward is not UnitModel.forward:
        return {"the network": model(x).float().numpy()}
    found = {}
    for unit in model.units:
        x = model.run_unit(unit, x)
        found[unit] = x.float().numpy()
    return found


def _find_first_difference(expected: _Outputs, found: _Outputs) -> str:
    """The first unit whose output clearly differs; empty if none does."""
    for unit, wanted in expected.items():
        if unit not in found:
            continue
        largest = max(float(np.abs(wanted).max()), 1e-6)
        difference = np.abs(found[unit].astype(np.float32) - wanted)
        if not np.isfinite(difference).all() or difference.max() > _LEAST_DIFFERENCE * largest:
            return unit
    return ""


def _run_onnx_units(model: Any, network: UnitModel, given: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The outputs of the nodes at which each unit of an ONNX model ends."""
    import onnx
    import onnxruntime

    last: dict[str, str] = {}
    for node in model.graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
        modules = set(ast.literal_eval(scopes))
        for unit, paths in network.units.items():
            if modules & {f"model.{path}" for path in paths}:
                last[unit] = node.output[0]
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in last.values())
    session = onnxruntime.InferenceSession(
        shown.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    outputs = session.run([*last.values()], {session.get_inputs()[0].name: given})
    return dict(zip(last, outputs, strict=True))
