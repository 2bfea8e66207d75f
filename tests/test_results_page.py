"""docs/bench/README.md: every row from a dated file that says how to measure it again."""

import json
import re
import runpy
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
BENCH = HOME / "docs" / "bench"
RESULTS = sorted((BENCH / "results").glob("*.json"))
MEASURED = {
    "kind": "infer", "name": "resnet50", "command": "phalanx bench infer resnet50 --json",
    "median": 1234.5, "low": 1200.0, "high": 1300.0, "n": 10, "data": "synthetic", "devices": 1,
    "batch": {"global": 64, "micro": 64},
    "latency_ms": {"p50": 1.5, "p95": 2.0, "p99": None, "n": 50},
    "peak_memory_bytes": 2_500_000_000, "trusted": True, "problems": [],
    "environment": {
        "commit": "0123abc", "phalanx": "0.1.0", "torch": "2.13.0", "python": "3.11.7",
        "device": "one GPU", "cores": 16, "date": "2026-11-17T08:00:00+00:00",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def writer():
    return runpy.run_path(str(HOME / "scripts" / "write_docs.py"))


@pytest.fixture
def folder(tmp_path):
    """A folder of results without any."""
    (tmp_path / "results").mkdir()
    (tmp_path / "pages.json").write_text("{}")
    return tmp_path


def test_the_page_is_fresh(writer):
    page = (BENCH / "README.md").read_text(encoding="utf-8")
    assert page == writer["bench_page"](), "stale: run `make docs`"


def test_every_row_has_its_file_and_every_file_its_rows():
    page = (BENCH / "README.md").read_text(encoding="utf-8")
    assert len(RESULTS) > 20
    sections = page.split("\n## ")[1:]
    linked = [re.search(r"\]\((results/[^)]*)\)", section)[1] for section in sections]
    assert sorted(linked) == [f"results/{path.name}" for path in RESULTS]
    for section, name in zip(sections, linked, strict=True):
        figures = json.loads((BENCH / name).read_text(encoding="utf-8"))["figures"]
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
            one["what"] for one in figures
        ], name
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert [link for link in links if not (BENCH / link).exists()] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_file_says_what_it_takes_to_measure_again(path):
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert re.match(r"2\d{3}-\d\d(-\d\d)?$", facts["date"]) and path.stem.startswith(facts["date"])
    assert (
        facts["command"] and facts["hardware"] and {"torch", "python"} <= facts["versions"].keys()
    )
    for one in facts["figures"]:
        assert one["value"] is not None or one["low"] is not None
        assert one["low"] is None or one["low"] <= one["high"]
        if isinstance(one["value"], float | int) and one["low"] is not None:
            assert one["low"] <= one["value"] <= one["high"]


def test_what_commands_write_becomes_a_section(writer, folder):
    path = folder / "results" / "2026-11-17-resnet50.json"
    path.write_text(json.dumps(MEASURED))
    section = writer["bench_page"](folder).partition("\n## ")[2]
    assert section.splitlines() == [
        "Inference: resnet50",
        "",
        "`phalanx bench infer resnet50 --json`",
        "",
        "2026-11-17; commit `0123abc`; one GPU, 16 cores; torch 2.13.0, Python 3.11.7, "
        "Phalanx 0.1.0. [2026-11-17-resnet50.json](results/2026-11-17-resnet50.json)",
        "",
        "| measured | result | range | n |",
        "|---|---:|---|---:|",
        "| resnet50: synthetic data, batch 64, median | 1,234 images/s | 1,200 to 1,300 (all "
        "blocks) | 10 |",
        "| latency, p50 | 1.5 ms | not recorded | 50 |",
        "| peak memory | 2.5 GB | one run | 1 |",
    ]
    doubtful = {**MEASURED, "trusted": False, "problems": ["noise"]}
    run = {
        "command": "phalanx bench --spec x.yml",
        "results": [
            {"variant": "a_batchsize_64", "facts": MEASURED},
            {"variant": "b", "facts": None},
            {"variant": "c", "facts": doubtful},
        ],
    }
    path.write_text(json.dumps(run))
    section = writer["bench_page"](folder).partition("\n## ")[2]
    assert "2 benchmarks" in section and "`phalanx bench --spec x.yml`" in section
    assert "| a_batchsize_64: synthetic data, batch 64, median | 1,234 images/s" in section
    assert "| c: synthetic data, batch 64 (unreliable: noise), median |" in section


def test_a_file_may_hold_a_measurement_a_line(writer, folder):
    replicated = {**MEASURED, "devices": 4, "batch": {"global": 256, "micro": 64}}
    path = folder / "results" / "2026-11-17-sizes.json"
    path.write_text("".join(json.dumps(one) + "\n" for one in (MEASURED, replicated)))
    section = writer["bench_page"](folder).partition("\n## ")[2]
    assert section.startswith("2 benchmarks\n")
    assert "| resnet50: synthetic data, batch 64, median |" in section
    assert "| resnet50: synthetic data, batch 256 on 4 devices, median |" in section


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("2026-11-17-a", {"commit": ...}, "has no 'commit'; null says that it was not recorded"),
        ("2026-11-17-a", {"figures": [{"what": "x"}]}, "has no 'value'; null says"),
        ("2026-11-16-a", {}, "its name should begin with its date, 2026-11-17"),
    ],
)
def test_a_file_that_lacks_something_is_refused(writer, folder, name, change, told):
    facts = {
        "title": "t", "page": None, "date": "2026-11-17", "command": "c", "commit": None,
        "hardware": "h", "versions": {"torch": None}, "figures": [],
    } | change  # fmt: skip
    kept = {key: value for key, value in facts.items() if value is not ...}
    (folder / "results" / f"{name}.json").write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match=re.escape(told)):
        writer["bench_page"](folder)


def test_a_page_nobody_describes_is_refused(writer, folder):
    (folder / "2026-12-new.md").write_text("# New")
    with pytest.raises(
        SystemExit, match=r"pages\.json and the pages differ: \['2026-12-new\.md'\]"
    ):
        writer["bench_page"](folder)
