"""The metadata of an exported model; the same in every format, and without torch."""

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.catalog.variant import METADATA_KEY
from phalanx.errors import CheckpointError, ConfigError

PT2_METADATA = f"{METADATA_KEY}.json"  # one of the extra files of a pt2
METADATA_FORMAT = 2  # 1 has no `weights`: they were always trained
WeightsKind = Literal["trained", "file", "random"]  # by a run; read from --init-weights; neither
LOGITS, ACTIVATION_MAP = "logits", "activation_map"  # the outputs
INPUT_NAMES = {"tensor": "input", "image": "image"}
_LONGEST_NAME = 100
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}")


class ModelMetadata(BaseModel):
    """The model in a file: its inputs and outputs, and its origin.

    input: "tensor" is float32 [N, 3, size, size], normalised; "image" is uint8 [N, size, size, 3],
    cut to the model's size, and normalised by the model itself. Outputs: logits, float32
    [N, classes]; with `has_activation_map` also [N, rows, columns], where in the image the
    likeliest class was seen.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: int = METADATA_FORMAT
    name: str  # of the run
    model: str  # as in `phalanx models ls`
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    preprocessing_fingerprint: str  # of the run; read_metadata compares it
    input: Literal["tensor", "image"] = "tensor"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # of the weights
    has_activation_map: bool = False
    averaged: bool = False  # whether the weights are averaged rather than the last ones
    weights: WeightsKind = "trained"
    run: str = ""  # if one has trained the weights
    step: int = 0
    phalanx: str = ""  # the version that wrote it

    @property
    def input_name(self) -> str:
        """The name of the only input."""
        return INPUT_NAMES[self.input]

    @property
    def reference(self) -> str:
        """What an export is compared with, in one word."""
        return "checkpoint" if self.weights == "trained" else "model"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one image, without the batch."""
        size = self.preprocessing.image_size
        return (3, size, size) if self.input == "tensor" else (size, size, 3)


def read_metadata(text: str, where: object) -> ModelMetadata:
    """The metadata in a file; where: the file, for error messages."""
    newer = _find_newer_format(text)
    if newer:
        raise CheckpointError(
            f"{where}: format {newer} of a newer Phalanx, this one reads up to "
            f"{METADATA_FORMAT}; update Phalanx, or export the run again with this one"
        )
    try:
        found = ModelMetadata.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{where}: its metadata is damaged ({place}: {first['msg'].lower()}); export it again"
        ) from None
    if found.preprocessing.fingerprint != found.preprocessing_fingerprint:
        raise CheckpointError(
            f"{where}: its preprocessing is not the one it was exported with: its metadata was "
            "edited, or another version of Phalanx prepares images differently; export the run "
            "again"
        )
    return found


def _find_newer_format(text: str) -> int:
    """The format number if it is newer than ours, else 0."""
    try:
        found = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) and found > METADATA_FORMAT else 0


def check_model_name(name: str) -> None:
    """Raise for a model name that cannot be part of a URL or a file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r}: a name has up to {_LONGEST_NAME} letters, digits, '.', '_' and '-', "
            "and does not begin with '.' or '-', because it is part of URLs and file names"
        )


def make_model_name(text: str) -> str:
    """A model name made from any text; empty if no character of it is allowed."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:_LONGEST_NAME]
