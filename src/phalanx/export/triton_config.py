"""config.pbtxt and labels of a model in a Triton repository."""

import json

from phalanx.catalog.variant import METADATA_KEY
from phalanx.export.metadata import ACTIVATION_MAP, LOGITS, ModelMetadata

LABELS = "labels.txt"
_QUEUE_DELAY_US = 500  # how long requests wait for others to share a batch
_INDENT = "  "


def format_triton_config(
    metadata: ModelMetadata, *, max_batch: int, map_shape: tuple[int, ...] | None
) -> str:
    """The text of config.pbtxt: input and outputs, and batches made from several requests.

    map_shape: of the activation map of one image, where there is one.
    """
    kind = "TYPE_UINT8" if metadata.input == "image" else "TYPE_FP32"
    tensors = [_format_tensor("input", metadata.input_name, kind, metadata.input_shape)]
    logits = (len(metadata.classes),)
    tensors.append(_format_tensor("output", LOGITS, "TYPE_FP32", logits, labels=LABELS))
    if map_shape is not None:
        tensors.append(_format_tensor("output", ACTIVATION_MAP, "TYPE_FP32", map_shape))
    batching = f"dynamic_batching {{\n  max_queue_delay_microseconds: {_QUEUE_DELAY_US}\n}}"
    head = [
        f'name: "{metadata.name}"',
        'backend: "onnxruntime"',
        'default_model_filename: "model.onnx"',
        f"max_batch_size: {max_batch}",
    ]
    about = json.dumps(metadata.model_dump(mode="json"))  # only ASCII
    quoted = about.replace("\\", r"\\").replace('"', r"\"")
    parameter = (
        f'parameters {{\n  key: "{METADATA_KEY}"\n  value: {{ string_value: "{quoted}" }}\n}}'
    )
    return "\n".join([*head, *tensors, batching, parameter]) + "\n"


def _format_tensor(
    role: str, name: str, kind: str, shape: tuple[int, ...], *, labels: str = ""
) -> str:
    """One input or output, without the batch."""
    lines = [f'name: "{name}"', f"data_type: {kind}", f"dims: [ {', '.join(map(str, shape))} ]"]
    lines += [f'label_filename: "{labels}"'] if labels else []
    return "\n".join([f"{role} {{", *(f"{_INDENT}{line}" for line in lines), "}"])


def format_labels(metadata: ModelMetadata) -> str:
    """One class per line, in the order of the logits."""
    return "".join(f"{' '.join(name.split())}\n" for name in metadata.classes)
