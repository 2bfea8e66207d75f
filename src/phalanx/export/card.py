"""The model card: what a model is, what it scores on which data, and how to use it."""

from phalanx.assemble.session import Session
from phalanx.export.card_facts import (
    describe_data,
    describe_limits,
    describe_recipe,
    describe_scores,
    describe_weights,
)
from phalanx.export.destination import format_card_mark
from phalanx.export.metadata import ModelMetadata
from phalanx.export.options import ExportOptions, ExportSource
from phalanx.export.parity import ParityReport
from phalanx.export.usage import describe_usage

_HEAD = """\
---
library_name: {library}
pipeline_tag: image-classification
tags:
- image-classification
- phalanx-export
{mark}
---
"""
_LIBRARIES = {  # as the Hugging Face hub calls them
    "onnx": "onnx",
    "pt2": "pytorch",
    "safetensors": "pytorch",
    "timm": "timm",
    "triton": "onnx",
}


def render_card(
    session: Session,
    source: ExportSource,
    metadata: ModelMetadata,
    report: ParityReport,
    *,
    options: ExportOptions,
    file: str,
    notes: tuple[str, ...],
) -> str:
    """The text of a model card, in Markdown.

    file: the name of what it describes; notes: what could not be checked.
    """
    size = metadata.preprocessing.image_size
    parts = {
        "": f"{metadata.model} with {len(metadata.classes):,} classes for images of {size}x{size} "
        f"pixels: {describe_weights(source, metadata)}, exported by Phalanx {metadata.phalanx}.",
        "How to use it": describe_usage(metadata, options.format, file),
        "Scores": describe_scores(session, source, metadata),
        "Data": describe_data(session, source),
        "Recipe": describe_recipe(session, source),
        "Limits": describe_limits(metadata),
        "How this export was checked": " ".join(
            [_describe_check(report, metadata), *(f"Note: {note}." for note in notes)]
        ),
    }
    sections = [f"## {title}\n\n{text}" if title else text for title, text in parts.items()]
    head = _HEAD.format(mark=format_card_mark(file), library=_LIBRARIES[options.format])
    return "\n\n".join([f"{head}\n# {metadata.name}", *sections]) + "\n"


def _describe_check(report: ParityReport, metadata: ModelMetadata) -> str:
    """How the file was checked, and how closely it agreed."""
    return (
        f"On {report.source}, in {report.describe_batches()}, its logits differ from the "
        f"{metadata.reference}'s by {report.logits_differ_by:.1e} at most ({report.allowed:.1e} "
        f"are allowed in {metadata.dtype}), and the most likely class is the same for "
        f"{report.describe_top1()}."
    )
