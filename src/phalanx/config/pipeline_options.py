"""Options for a model that is split into stages."""

from typing import Literal

from phalanx.config.fields import Section, option


class PipelineConfig(Section):
    """Pipeline: a model cut into stages, each on a device of its own."""

    pipeline: bool = option(
        False,
        "Run the stages of a model as a pipeline, several micro-batches at a time.",
        resumable=True,
    )
    pipeline_splits: str | None = option(
        None,
        "Where stages start: names of units, such as layer2/0, with commas or spaces.",
        resumable=True,
        auto="stages of about the same cost",
    )
    shards: int | None = option(
        None,
        "Number of stages of a model; 1 runs all of them on one device.",
        low=1,
        high=1024,
        resumable=True,
        auto="one more than --pipeline-splits names",
    )
    pipeline_schedule: Literal["Grouped", "Interleaved", "Sequential"] = option(
        "Grouped",
        "Grouped: forward passes of a group, then backward; Interleaved: alternating; Sequential: "
        "one micro-batch at a time.",
        resumable=True,
    )
    pipeline_validation_model: bool = option(
        False,
        "Score in stages, too; otherwise every device gets the whole model to score.",
        resumable=True,
    )
    sharding_include_filter: str | None = option(
        None,
        "Without --pipeline: cut only before units whose names contain one of these words.",
        resumable=True,
        auto="before any unit",
    )
    sharding_exclude_filter: str | None = option(
        None,
        "Without --pipeline: never cut before units whose names contain one of these words.",
        resumable=True,
        auto="none is left out",
    )
