"""Export: writes a model as a file or folder for other programs, after checking that it agrees."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx import __version__
from phalanx.assemble.score import open_checkpoint, open_untrained_model
from phalanx.assemble.session import Session
from phalanx.config.read import Settings
from phalanx.data.loading.image_inputs import NamedImage
from phalanx.errors import CheckpointError
from phalanx.export.card import render_card
from phalanx.export.check_images import CheckImages, choose_check_images
from phalanx.export.destination import (
    CARD,
    choose_card_path,
    move_file,
    move_folder,
    refuse_existing,
    staging_folder,
    write_file,
)
from phalanx.export.disagreement import explain_disagreement
from phalanx.export.drafts import DRAFT_BUILDERS, Draft
from phalanx.export.metadata import ModelMetadata
from phalanx.export.network import ExportNetwork, copy_network, find_head
from phalanx.export.options import ExportOptions, ExportSource
from phalanx.export.parity import ParityCase, ParityReport, RunFailed, Runner, check_parity
from phalanx.models.units import to_unit_model

_FLIP_NOTE = (
    "--flip-averaging: the run scores each image together with its mirror image; the export "
    "answers for the image alone, in half the time"
)


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """What an export wrote, and how it was checked."""

    path: Path  # the file, or the folder
    card: Path
    metadata: ModelMetadata
    checked: ParityReport
    bytes: int
    computes: bool  # whether it contains the network, not only weights
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "path": str(self.path),
            "card": str(self.card),
            "bytes": self.bytes,
            "checked": asdict(self.checked),
            "notes": list(self.notes),
            "metadata": self.metadata.model_dump(mode="json"),
        }


def export_model(
    source: ExportSource,
    options: ExportOptions,
    *,
    images: Sequence[NamedImage] | None,
    needs_data: bool,
) -> ExportedModel:
    """Write a model in another format; it gets its path only if it agrees with the original.

    images: to check it on, else those of its data; needs_data: that data must be there.
    """
    path, files = options.choose_path(source), options.kind.files
    options.refuse_unsupported(source)
    refuse_existing(path, files)
    with _open_source(source) as session, staging_folder(path) as stage:
        metadata = _build_metadata(session, source, options)
        draft = DRAFT_BUILDERS[options.format](session, metadata, path.name, options.max_batch)
        for name, content in draft.files.items():
            write_file(stage / name, content)
        case = _build_parity_case(
            session,
            metadata,
            choose_check_images(session, images, count=options.check_images, needs_data=needs_data),
        )
        report = check_parity(
            _open_draft(draft, stage),
            case,
            dtype=metadata.dtype,
            max_batch=options.max_batch,
            explain=partial(explain_disagreement, session, draft, case, metadata.dtype),
        )
        text = render_card(
            session,
            source,
            metadata,
            report,
            options=options,
            file=path.name,
            notes=draft.notes,
        )
        size = sum(file.stat().st_size for file in stage.rglob("*") if file.is_file())
        write_file(stage / CARD, _to_utf8(text))
        # the check takes a while: another program may have written there
        refuse_existing(path, files)
        card = path / CARD if files else choose_card_path(path)
        if files:
            move_folder(stage, path)
        else:
            move_file(stage / path.name, path)
            move_file(stage / CARD, card)
    return ExportedModel(
        path=path,
        card=card,
        metadata=metadata,
        checked=report,
        bytes=size,
        computes=options.kind.computes,
        notes=(*draft.notes, *((_FLIP_NOTE,) if session.config.augment.flip_averaging else ())),
    )


def _open_source(source: ExportSource) -> Session:
    if isinstance(source.target, Settings):
        return open_untrained_model(source.target, without_data=True)
    return open_checkpoint(source.target)


def _build_metadata(
    session: Session, source: ExportSource, options: ExportOptions
) -> ModelMetadata:
    """The metadata of the export."""
    read = session.preprocessing
    preprocessing = replace(read, mean=tuple(read.mean), std=tuple(read.std))  # JSON has only lists
    origin: dict[str, Any] = {"weights": source.weights}
    if source.checkpoint is not None:
        start = source.checkpoint.start
        stored = start.facts.get("preprocessing_fingerprint", preprocessing.fingerprint)
        if stored != preprocessing.fingerprint:
            raise CheckpointError(
                f"{start.checkpoint}: its preprocessing is not the one it was saved with; it was "
                "changed by hand, or by another version of Phalanx: restore it from a copy"
            )
        averaged = start.use == "score average" or "averaged" in start.facts
        origin |= {
            "run": _to_utf8(source.name),
            "step": start.facts["state"]["step"],
            "averaged": averaged,
        }
    has_head = find_head(to_unit_model(session.model)) is not None
    return ModelMetadata(
        name=options.choose_name(source),
        model=session.config.model.model,
        classes=tuple(map(_to_utf8, session.classes)),
        preprocessing=preprocessing,
        preprocessing_fingerprint=preprocessing.fingerprint,
        input="image" if options.with_preprocessing else "tensor",
        dtype=options.dtype,
        has_activation_map=options.kind.computes and has_head,
        phalanx=__version__,
        **origin,
    )


def _to_utf8(text: str) -> str:
    """The text with bytes that are not UTF-8 escaped, for files that other programs read."""
    return text.encode(errors="backslashreplace").decode()


def _open_draft(draft: Draft, stage: Path) -> Runner:
    """A function that runs the files of an export; CheckpointError if they cannot be opened."""
    try:
        return draft.open(stage)
    except RunFailed as failed:
        raise CheckpointError(
            f"the export cannot be opened, so nothing was written: {failed}"
        ) from None


def _build_parity_case(
    session: Session, metadata: ModelMetadata, images: CheckImages
) -> ParityCase:
    """The original model's outputs for the images, computed by its modules without folding."""
    tensors = session.normaliser(images.pixels)
    model = session.model.eval()
    plain = metadata.model_copy(update={"dtype": "float32", "input": "tensor"})
    outputs: list[tuple[NDArray[np.float32], ...]] = []
    with torch.no_grad():
        network = ExportNetwork(copy_network(session), plain, fold=False)
        for some in tensors.split(session.plan.valid_batch):
            logits = model(some).float()
            maps = network(some.contiguous())[1:] if metadata.has_activation_map else ()
            outputs.append(tuple(part.numpy() for part in (logits, *maps)))
    joined = tuple(np.concatenate(parts) for parts in zip(*outputs, strict=True))
    inputs = images.pixels if metadata.input == "image" else tensors.contiguous().numpy()
    return ParityCase(
        images=images,
        inputs=inputs,
        outputs=joined,
        classes=metadata.classes,
        reference=metadata.reference,
    )
