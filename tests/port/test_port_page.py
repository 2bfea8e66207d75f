"""docs/port.md is what the tables say."""

import runpy
from pathlib import Path

from phalanx.port.dialect_choice import DIALECTS

HOME = Path(__file__).parents[2]


def test_the_page_is_fresh_and_has_every_option():
    page = (HOME / "docs" / "port.md").read_text(encoding="utf-8")
    writer = runpy.run_path(str(HOME / "scripts" / "write_docs.py"))
    assert page == writer["port_page"](), "stale: run `make docs`"
    for dialect in DIALECTS.values():
        names = {option.name for script in dialect.scripts.values() for option in script.options}
        assert len(names) > 20
        for name in names:
            assert f"`--{name}`" in page or f"`-{name}`" in page, f"{dialect.name}: {name}"
