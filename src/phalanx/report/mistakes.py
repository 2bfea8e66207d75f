"""The sections of report.html about what the model gets wrong."""

import base64
import io
from html import escape

import numpy as np
from numpy.typing import NDArray

from phalanx.report.markup import note, section, table
from phalanx.report.material import Material
from phalanx.report.predictions import Prediction, confusion_matrix
from phalanx.units import format_count

_MOST_CLASSES = 40  # beyond this a matrix is a carpet, and the worst pairs say more
_MOST_PAIRS, _FEW_PAIRS = 20, 5
_THUMBNAIL, _FEW_PIXELS = 160, 64


def confusion(material: Material) -> str:
    """What was taken for what: a matrix, or the worst pairs where classes are many."""
    rows = material.predictions
    if not rows:
        return section("confusion", "Confusion", body=note("No evaluation yet."))
    labels, guesses = [row.label for row in rows], [row.top[0] for row in rows]
    known = len(material.facts.get("classes") or [])
    classes = max(known, max(labels) + 1, max(guesses) + 1)
    counts = confusion_matrix(labels, guesses, classes=classes)
    body = _matrix(material, counts) if classes <= _MOST_CLASSES else ""
    return section("confusion", "Confusion", body=body + _confused_pairs(material, counts))


def _matrix(material: Material, counts: NDArray[np.int64]) -> str:
    """The confusion matrix as a table: true classes down, predicted ones across."""
    names = [escape(material.class_name(k)) for k in range(len(counts))]
    heads = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
    rows = "\n".join(
        f'<tr><th scope="row">{name}</th>{_matrix_cells(counts[at], at)}</tr>'
        for at, name in enumerate(names)
    )
    return (
        note("Rows are true classes, columns what the model said; shades are shares of a row.")
        + f'<div class="scroll"><table class="matrix"><thead><tr><td></td>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>\n"
    )


def _matrix_cells(counts: NDArray[np.int64], true: int) -> str:
    """One row of the matrix, shaded by share; mistakes in another colour than hits."""
    total = max(int(counts.sum()), 1)
    cells = []
    for at, count in enumerate(counts.tolist()):
        colour = "--heat" if at == true else "--wrong"
        # mistakes are rare: without a lift their shades would all look like none
        share = count / total if at == true else (count / total) ** 0.5
        shade = f' style="background: rgba(var({colour}), {share * 0.85:.3f})"' if count else ""
        cells.append(f"<td{shade}>{count}</td>" if count else '<td class="zero">0</td>')
    return "".join(cells)


def _confused_pairs(material: Material, counts: NDArray[np.int64]) -> str:
    """The most frequent mistakes as a table."""
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_PAIRS]
    pairs = [divmod(int(at), len(counts)) for at in order if wrong.flat[at] > 0]
    if not pairs:
        return note("Every scored image was classified correctly.")
    limit = _MOST_PAIRS if len(counts) > _MOST_CLASSES else _FEW_PAIRS
    rows = [
        [
            escape(material.class_name(true)),
            escape(material.class_name(said)),
            format_count(wrong[true, said]),
            f"{wrong[true, said] / counts[true].sum():.1%}",
        ]
        for true, said in pairs[:limit]
    ]
    heads = ["true class", "was taken for", "images", "of its class"]
    return f"<h3 class='apart'>Most frequent mistakes</h3>{table(heads, rows, numbers=2)}"


def gallery(material: Material) -> str:
    """The most confident mistakes, to look at."""
    title = "Most confidently wrong"
    worst = material.worst
    said = {row.index: row for row in material.predictions if not row.correct}
    at = [] if worst is None else [k for k, i in enumerate(worst.indices) if int(i) in said]
    if worst is None or not at:
        return section("gallery", title, body=note("No pictures of mistakes were kept yet."))
    figures = [_picture(material, said[int(worst.indices[k])], pixels=worst.pixels[k]) for k in at]
    told = note(f"At step {format_count(worst.step)}: what the model said and how sure it was.")
    return section(
        "gallery", title, body=f'{told}<div class="gallery">\n{"".join(figures)}\n</div>'
    )


def _picture(material: Material, row: Prediction, *, pixels: NDArray[np.uint8]) -> str:
    """One mistake: the image, what the model said, and what it is."""
    guess, true = material.class_name(row.top[0]), material.class_name(row.label)
    # few pixels stay sharp squares; many are smoothed
    kind = "few" if max(pixels.shape) <= _FEW_PIXELS else "many"
    return (
        f'<figure><img class="{kind}" alt="{escape(row.id)}" src="{_as_png(pixels)}"><figcaption>'
        f'<span class="said">{escape(guess)}</span> {row.confidence:.1%}<br>'
        f'is {escape(true)}<br><span class="muted">{escape(row.id)}</span>'
        "</figcaption></figure>"
    )


def _as_png(pixels: NDArray[np.uint8]) -> str:
    """An image as a data address."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
