"""The pages: their links and anchors lead somewhere, and their maps name what is there."""

import re
from pathlib import Path

import pytest

import phalanx

PACKAGE = Path(phalanx.__file__).parent
HOME = PACKAGE.parents[1]
PAGES = sorted([*HOME.glob("*.md"), *HOME.glob("docs/**/*.md")])
NO_PACKAGE = ("__init__", "__main__", "presets", "py", "__pycache__")


def read_prose(page: Path) -> str:
    """A page without its code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def find_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", read_prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_links_lead_to_files_and_headings(page):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in find_anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_page_can_be_reached_from_the_readme():
    reached, ahead = set(), [HOME / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", read_prose(page))
        ahead += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert [page.name for page in PAGES if page not in reached] == []


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "## Code map"), ("docs/design.md", "## Packages")]
)
def test_maps_name_every_package_and_no_other(page, heading):
    section = (HOME / page).read_text(encoding="utf-8").partition(heading)[2]
    lines = section.partition("```text\n")[2].partition("```")[0].splitlines()
    names = [re.split("  +", line)[0] for line in lines]
    named = {name.strip(" /") for line in names for name in line.split(",")}
    there = {path.name.partition(".")[0] for path in PACKAGE.iterdir()} - set(NO_PACKAGE)
    assert named == there
