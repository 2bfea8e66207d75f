"""What an exported file says of itself, and files that say something else."""

import json

import pytest

from phalanx.errors import CheckpointError
from phalanx.export.metadata import INPUT_NAMES, METADATA_FORMAT, read_metadata


def changed(exported, **changes):
    """The metadata as text, with some values changed."""
    return json.dumps({**json.loads(exported.metadata.model_dump_json()), **changes})


def test_metadata_is_read_as_it_was_written(exported):
    assert read_metadata(changed(exported), "a.onnx") == exported.metadata
    assert exported.metadata.input_name == INPUT_NAMES["tensor"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": METADATA_FORMAT + 1, "what": "is new"},
            "a.onnx: format 3 of a newer Phalanx, this one reads up to 2; update Phalanx, or "
            "export the run again with this one",
        ),
        ({"classes": 3}, "a.onnx: its metadata is damaged (classes: input should be a valid"),
        (
            {"preprocessing_fingerprint": "0" * 64},
            "a.onnx: its preprocessing is not the one it was exported with",
        ),
    ],
)
def test_other_metadata_is_refused(exported, changes, message):
    with pytest.raises(CheckpointError) as error:
        read_metadata(changed(exported, **changes), "a.onnx")
    assert str(error.value).startswith(message)


def test_text_that_is_no_metadata_is_refused():
    with pytest.raises(CheckpointError, match="its metadata is damaged"):
        read_metadata("not JSON", "a.onnx")
