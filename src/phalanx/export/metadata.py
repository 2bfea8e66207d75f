"""What an exported model says of itself; the same in every format, and without torch."""

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.errors import CheckpointError, ConfigError

METADATA_KEY = "phalanx"  # under which a file's own metadata has it, as JSON
PT2_METADATA = f"{METADATA_KEY}.json"  # among the extra files of a pt2
METADATA_FORMAT = 2  # 1 has no `weights`, which were always trained
WeightsKind = Literal["trained", "file", "random"]  # by a run, of --init-weights, by nobody
LOGITS, ACTIVATION_MAP = "logits", "activation_map"  # the outputs
INPUT_NAMES = {"tensor": "input", "image": "image"}
_LONGEST_NAME = 100
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}")


class ModelMetadata(BaseModel):
    """Which model a file holds, what it takes and gives, and where it comes from.

    input: "tensor" is float32 [N, 3, size, size], normalised; "image" is uint8 [N, size, size, 3],
    cut to the model's size, and normalised by the model itself. Outputs: logits, float32
    [N, classes]; with `has_activation_map` also [N, rows, columns], where in the image the
    likeliest class was seen.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: int = METADATA_FORMAT
    name: str  # of the run
    model: str  # as `phalanx models ls` has it
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    preprocessing_fingerprint: str  # of the run, which read_metadata compares
    input: Literal["tensor", "image"] = "tensor"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # of the weights
    has_activation_map: bool = False
    averaged: bool = False  # the average of weights rather than the last ones
    weights: WeightsKind = "trained"
    run: str = ""  # where one has trained them
    step: int = 0
    phalanx: str = ""  # version that wrote it

    @property
    def input_name(self) -> str:
        """That of the one input."""
        return INPUT_NAMES[self.input]

    @property
    def reference(self) -> str:
        """What an export is held against, in a word."""
        return "checkpoint" if self.weights == "trained" else "model"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one image, without the batch."""
        size = self.preprocessing.image_size
        return (3, size, size) if self.input == "tensor" else (size, size, 3)


def read_metadata(text: str, where: object) -> ModelMetadata:
    """The metadata in a file; where: the file, for the message of what is wrong with it."""
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
    """The format number where it is higher than ours, else 0."""
    try:
        found = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) and found > METADATA_FORMAT else 0


def check_model_name(name: str) -> None:
    """Raise for a name of a model that addresses and files cannot have in them."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r}: a name has up to {_LONGEST_NAME} letters, digits, '.', '_' and '-', "
            "and does not begin with '.' or '-', because it is part of URLs and file names"
        )


def make_model_name(text: str) -> str:
    """A name of a model from any text; empty where nothing of it can be in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:_LONGEST_NAME]
