"""The model repository that Triton takes, read with NVIDIA's own definition of its config."""

import importlib.util
import json
from pathlib import Path

import onnxruntime
import pytest
from google.protobuf import text_format

import phalanx
from phalanx.export.metadata import ModelMetadata
from phalanx.export.triton_config import format_labels, format_triton_config


@pytest.fixture(scope="module")
def read_config():
    """Parses config.pbtxt; the definition alone, whose package would import gRPC."""
    package = importlib.util.find_spec("tritonclient")
    if package is None:
        pytest.skip("tritonclient is not installed")
    path = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("triton_model_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda text: text_format.Parse(text, module.ModelConfig()), module


def test_the_repository_is_one_of_tritons(run, built_model, tmp_path, read_config):
    parse, definition = read_config
    out = tmp_path / "models"
    done = phalanx.export(run, format="triton", out=out, max_batch=16, name="digits")
    root = tmp_path / "models" / "digits"
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {"config.pbtxt", "labels.txt", "1/model.onnx", "README.md"}
    config = parse((root / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("digits", "onnxruntime", 16)
    assert config.HasField("dynamic_batching")
    session = onnxruntime.InferenceSession(root / "1" / config.default_model_filename)
    types = {definition.TYPE_UINT8: "tensor(uint8)", definition.TYPE_FP32: "tensor(float)"}
    for ours, theirs in (
        (config.input, session.get_inputs()),
        (config.output, session.get_outputs()),
    ):
        described = [(one.name, types[one.data_type], list(one.dims)) for one in ours]
        assert described == [(one.name, one.type, one.shape[1:]) for one in theirs]
    assert (root / config.output[0].label_filename).read_text().split() == list("0123456789")
    about = json.loads(config.parameters["phalanx"].string_value)
    assert ModelMetadata.model_validate_json(json.dumps(about)) == done.metadata
    assert (done.path, done.card) == (root, root / "README.md")


def test_a_repository_holds_several_models(run, built_model, tmp_path):
    for name in ("one", "two", "one"):  # the third replaces the first
        phalanx.export(run, format="triton", out=tmp_path / "models", name=name, check_images=1)
    cards = sorted((tmp_path / "models").glob("*/README.md"))
    assert [card.parent.name for card in cards] == ["one", "two"]
    assert len([*(tmp_path / "models").iterdir()]) == 2


def test_class_names_of_any_kind(exported, read_config):
    names = ('say "hi"', "back\\slash", "größe 鞋", "two\nlines")
    about = exported.metadata.model_copy(update={"classes": names, "input": "image"})
    config = read_config[0](format_triton_config(about, max_batch=1, map_shape=None))
    assert tuple(json.loads(config.parameters["phalanx"].string_value)["classes"]) == names
    assert (config.input[0].name, list(config.input[0].dims)) == ("image", [12, 12, 3])
    assert config.input[0].data_type == read_config[1].TYPE_UINT8
    assert [one.name for one in config.output] == ["logits"] and config.output[0].dims == [4]
    assert format_labels(about).splitlines() == [*names[:3], "two lines"]
