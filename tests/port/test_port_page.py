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


def test_a_table_that_another_program_has_is_not_printed_again():
    page = (HOME / "docs" / "port.md").read_text(encoding="utf-8")
    assert page.count("`--webdataset-percentage-to-use`") == 1
    assert page.count("`efficientnet-b0-g16-gn-16ipu-mk2`") == 1
    assert "`train_lightning.py` (and the options of `train.py` of PyTorch)" in page
