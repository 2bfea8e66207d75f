"""The page about a set of images: what is wrong with it, with the pictures it is true of."""

import base64
import io
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.verify.verify import (
    MISSING,
    NOTES,
    ImageLocation,
    VerifyResult,
    describe_problems,
)
from phalanx.disk import out_errors, write_atomically
from phalanx.report.markup import note, section, table
from phalanx.report.page_style import STYLE
from phalanx.units import format_count

_SINGLE_SHOWN, _GROUPS_SHOWN, _MEMBERS_SHOWN = 24, 24, 6
_THUMBNAIL, _QUALITY, _FEW_PIXELS = 160, 80, 64
_CLASSES_SHOWN = 1000

_Pixels = NDArray[np.uint8]
_Look = Callable[[str, int], _Pixels | None]  # the picture of a split's number, where there is one


def write_verify_page(path: Path, verdict: VerifyResult, look: _Look) -> None:
    """Write the page; `look` gives the pictures."""
    page = render_page(verdict, look)
    with out_errors(path, "then run the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)


def render_page(verdict: VerifyResult, look: _Look) -> str:
    """The whole page as HTML, pictures and all."""
    kinds = sorted(verdict.single, key=lambda kind: kind in NOTES)  # notes come last
    singles = [
        _single_section(kind, verdict.single[kind], look) for kind in kinds if verdict.single[kind]
    ]
    wrong = sum(1 for kind in kinds if verdict.single[kind] and kind not in NOTES)
    groups = [_group_section(kind, found, look) for kind, found in verdict.groups.items() if found]
    found = [*singles[:wrong], *groups, *singles[wrong:]]
    body = "\n".join([_headline(verdict), _findings(verdict), *found, _balance(verdict)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_as_text(verdict.folder)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _headline(verdict: VerifyResult) -> str:
    """The folder, whether all is well, and how much there is."""
    state, word = "unfinished" if verdict.wrong else "finished", describe_problems(verdict.wrong)
    tiles = [(split, format_count(count), "images") for split, count in verdict.images.items()]
    tiles.append(("classes", format_count(len(verdict.classes)), ""))
    drawn = "".join(
        f'<div class="tile"><span>{label}</span><b>{value}</b><span>{detail}</span></div>'
        for label, value, detail in tiles
    )
    return (
        f'<header>\n<h1>{_as_text(verdict.folder)} <span class="state {state}">{word}</span></h1>\n'
        f'<p class="muted">{_as_text(verdict.data)}, manifest <code>{verdict.manifest}</code></p>\n'
        f'<div class="tiles">{drawn}</div>\n</header>'
    )


def _findings(verdict: VerifyResult) -> str:
    """How often each kind was found."""
    rows = [
        [escape(kind) + (" (a note)" if kind in NOTES else ""), format_count(count)]
        for kind, count in verdict.totals.items()
    ]
    missing = [f"<li>{_as_text(line)}</li>" for line in verdict.missing[:_CLASSES_SHOWN]]
    told = f"<h3 class='apart'>{escape(MISSING)}</h3><ul>{''.join(missing)}</ul>" if missing else ""
    body = table(["what", "found"], rows, numbers=1) + told
    return section("findings", "Findings", body=body)


def _single_section(kind: str, places: list[ImageLocation], look: _Look) -> str:
    """The images that one kind of finding is true of."""
    figures = "".join(_figure(place, look) for place in places[:_SINGLE_SHOWN])
    body = _left_out(len(places), _SINGLE_SHOWN) + f'<div class="gallery">\n{figures}\n</div>'
    return section(_as_id(kind), f"{_as_title(kind)}: {format_count(len(places))}", body=body)


def _group_section(kind: str, groups: list[list[ImageLocation]], look: _Look) -> str:
    """Images that are the same, group by group."""
    drawn = []
    for group in groups[:_GROUPS_SHOWN]:
        figures = "".join(_figure(place, look) for place in group[:_MEMBERS_SHOWN])
        drawn.append(
            f"<h3 class='apart'>{len(group)} images</h3>"
            f'{_left_out(len(group), _MEMBERS_SHOWN)}<div class="gallery">{figures}</div>'
        )
    body = _left_out(len(groups), _GROUPS_SHOWN) + "\n".join(drawn)
    title = f"{_as_title(kind)}: {format_count(len(groups))} groups"
    return section(_as_id(kind), title.replace(": 1 groups", ": 1 group"), body=body)


def _left_out(count: int, shown: int) -> str:
    """A sentence that there is more than is shown."""
    return note(f"The first {shown} of {format_count(count)}.") if count > shown else ""


def _figure(place: ImageLocation, look: _Look) -> str:
    """One image with where it lies and what is wrong with it."""
    pixels = look(place.split, place.number)
    said = f'<span class="said">{_as_text(place.why)}</span><br>' if place.why else ""
    return (
        f"<figure>{_picture(pixels, place.name)}<figcaption>{said}{place.split}, "
        f'{_as_text(place.label)}<br><span class="muted">{_as_text(place.name)}</span>'
        "</figcaption></figure>"
    )


def _picture(pixels: _Pixels | None, name: str) -> str:
    """The image as a small JPEG inside the page; an empty frame where there is none to see."""
    if pixels is None:
        return '<img alt="cannot be shown" src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">'
    from PIL import Image

    kind = "few" if max(pixels.shape) <= _FEW_PIXELS else "many"
    image = Image.fromarray(pixels)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=_QUALITY)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img class="{kind}" alt="{_as_text(name)}" src="data:image/jpeg;base64,{data}">'


def _balance(verdict: VerifyResult) -> str:
    """How many images each class has in each split."""
    splits = list(verdict.counts)
    rows = [
        [_as_text(name), *(format_count(verdict.counts[split][label]) for split in splits)]
        for label, name in enumerate(verdict.classes[:_CLASSES_SHOWN])
    ]
    body = _left_out(len(verdict.classes), _CLASSES_SHOWN)
    body += table(["class", *splits], rows, numbers=len(splits))
    return section("classes", "Images of each class", body=body)


def _as_text(text: str) -> str:
    """Text for the page; bytes of a name that are no letters become question marks."""
    return escape(text.encode(errors="replace").decode())


def _as_title(kind: str) -> str:
    """A kind of finding as a heading."""
    return kind[:1].upper() + kind[1:]


def _as_id(kind: str) -> str:
    """A kind of finding as the name of its section."""
    return kind.lower().replace(" ", "-")
