"""A small network as an ONNX file with our metadata, made in milliseconds."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.export.metadata import METADATA_KEY, ModelMetadata

CLASSES = ("ankle boot", "bag", "coat", "dress", "pullover", "sandal", "shirt")
SIZE, CHANNELS = 32, 16


def write_small_onnx(path: Path) -> Path:
    """Convolution, ReLU, mean over the pixels, linear; a tensor of 32 x 32 in, logits out."""
    draw = np.random.default_rng(0)
    shapes = {
        "kernel": (CHANNELS, 3, 3, 3),
        "weight": (CHANNELS, len(CLASSES)),
        "bias": (len(CLASSES),),
    }
    constants = [
        numpy_helper.from_array(draw.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["input", "kernel"], ["a"], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("GlobalAveragePool", ["b"], ["c"]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "weight", "bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", len(CLASSES)])],
        constants,
    )
    opset = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    metadata = ModelMetadata(
        name="small",
        model="resnet8",
        classes=CLASSES,
        preprocessing=Preprocessing(
            image_size=SIZE, augment="resized-crop", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
        ),
    )
    helper.set_model_props(model, {METADATA_KEY: metadata.model_dump_json()})
    onnx.save(model, path)
    return path
