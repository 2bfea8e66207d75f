"""Real runs with --profile: the same weights, and files that say where the time went."""

import gzip
import json
import shutil
from bisect import bisect
from collections import Counter
from pathlib import Path

import pytest

from phalanx.__main__ import main
from phalanx.ranges import RANGES
from small_runs import read_result, run_phalanx, small_run

STEPS = 13  # two are timed: the first of them is the one to look at
UNITS = ["stem", "layer1/0", "layer2/0", "layer3/0", "head"]


def train(digits: Path, run: Path, **options: object) -> dict:
    given = {"model": "resnet8", "steps": STEPS, "validation": "false", "ckpts-per-epoch": 0}
    words = small_run(digits, run, **{**given, **options})
    assert main([word for word in words if word != "--epochs=3"]) == 0
    return read_result(run)


def read_summary(run: Path) -> dict:
    return json.loads((run / "profile" / "summary.json").read_text())


@pytest.fixture(scope="module")
def full_run(digits, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("full") / "run"
    train(digits, run, profile="full", replicas=2, gradient_accumulation=2, batch_size=8)
    return run


def test_a_profile_changes_no_bit_and_is_off_by_default(digits, tmp_path, full_run):
    same = {"replicas": 2, "gradient_accumulation": 2, "batch_size": 8}
    without = train(digits, tmp_path / "off", **same)
    assert without["weights_sha256"] == read_result(full_run)["weights_sha256"]
    assert not (tmp_path / "off" / "profile").exists()
    assert not RANGES.are_recorded


def test_the_profiled_step_is_the_first_timed_one_and_counts_for_no_speed(
    digits, tmp_path, full_run
):
    table = read_summary(full_run)
    assert (table["step"], table["images"]) == (11, 32)
    assert read_result(full_run)["images_per_second"] is not None  # of the two steps after it
    only_that = train(digits, tmp_path / "run", profile="summary", steps=11)
    assert only_that["images_per_second"] is None
    assert train(digits, tmp_path / "off", steps=11)["images_per_second"] is not None


def test_the_parts_of_a_step_fill_it_and_the_passes_are_those_of_its_units(full_run):
    table = read_summary(full_run)
    names = [part["part"] for part in table["parts"]]
    assert [part["part"] for part in table["parts"] if part["is_unit"]] == UNITS
    assert names[0] == "waiting for data"
    assert {"loss", "update", "sum of gradients"} <= set(names)
    assert sum(part["ms"] for part in table["parts"]) == pytest.approx(table["ms"], rel=0.02)
    for part in table["parts"]:
        if part["is_unit"]:
            assert part["forward_ms"] > 0, part
            assert part["backward_ms"] > 0, part


def test_operations_are_counted_over_all_passes(full_run):
    kernels = {row["name"]: row for row in read_summary(full_run)["kernels"]}
    convolutions = 7 * 4  # resnet8's, in two passes of two replicas
    assert kernels["aten::convolution_backward"]["calls"] == convolutions
    assert kernels["aten::convolution_backward"]["part"] in UNITS


def test_the_trace_holds_chrome_events_with_our_ranges_and_rows(full_run):
    trace = json.loads(gzip.decompress((full_run / "profile" / "trace.json.gz").read_bytes()))
    events = trace["traceEvents"]
    assert all("ph" in event and "pid" in event for event in events)
    timed = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and "ts" in event for event in timed)
    marked = [event["name"] for event in timed if event.get("cat") == "user_annotation"]
    for name in ("data", "step", "update", *(f"{unit} forward" for unit in UNITS)):
        assert marked.count(name) == (4 if "forward" in name else 1), name
    rows = [event["name"] for event in timed if event.get("cat") == "phalanx"]
    assert rows[0] == "data"
    assert rows.count("layer2/0 backward") == 4, "a unit is one block of each pass"
    assert rows[-1] in ("update", "other")
    for unit in UNITS:
        assert {f"{unit} forward", f"{unit} backward"} <= set(rows)
    last_backward = len(rows) - 1 - rows[::-1].index("stem backward")
    assert "head forward" not in rows[last_backward:], "units go back from the last to the first"
    assert any("Input Dims" in event.get("args", {}) for event in timed), "full has shapes"
    assert any(event.get("cat") == "python_function" for event in timed), "full has stacks"


def test_the_backward_pass_of_every_layer_lies_in_the_backward_row_of_its_unit(full_run):
    trace = json.loads(gzip.decompress((full_run / "profile" / "trace.json.gz").read_bytes()))
    timed = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    rows = [event for event in timed if event.get("cat") == "phalanx"]
    starts = [row["ts"] for row in rows]
    layers = ("aten::convolution_backward", "aten::native_batch_norm_backward")
    found = Counter()
    for event in timed:
        if event["name"] in layers:
            middle = event["ts"] + event["dur"] / 2
            found[rows[bisect(starts, middle) - 1]["name"]] += 1
    of_one_pass = {"stem": 2, "layer1/0": 4, "layer2/0": 4, "layer3/0": 4}
    assert found == {f"{unit} backward": 4 * count for unit, count in of_one_pass.items()}


def test_the_text_lines_up_and_the_report_shows_the_picture(full_run):
    lines = (full_run / "profile" / "summary.txt").read_text().splitlines()
    assert lines[0] == "resnet8 on cpu in 32.32: step 11 with 32 images"
    table = lines[2 : lines.index("", 3)]
    assert {len(line) for line in table} == {len(table[0])}
    printed = [line.partition("Z  ")[2] for line in (full_run / "log.txt").read_text().splitlines()]
    start = printed.index(lines[0])
    assert printed[start : start + len(lines)] == lines
    assert (full_run / "profile" / "step.png").read_bytes().startswith(b"\x89PNG")
    report = (full_run / "report.html").read_text()
    assert 'alt="one step over time" src="data:image/png;base64,' in report
    assert "ui.perfetto.dev opens it" in report


def test_a_summary_is_printed_and_leaves_no_trace_and_a_short_run_says_so(digits, tmp_path, capsys):
    train(digits, tmp_path / "run", profile="summary", steps=2)
    out = capsys.readouterr().out
    assert "part              forward ms  backward ms" in out
    assert "profile: step 2 took " in out
    assert "note: the run has no more than 10 steps in this process: its last one is shown" in out
    assert not (tmp_path / "run" / "profile" / "trace.json.gz").exists()


def test_a_folder_that_cannot_be_written_is_noted_and_the_run_goes_on(
    digits, tmp_path, monkeypatch, capsys
):
    from phalanx.profile import step_profiler

    def refuse(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(step_profiler, "write_atomically", refuse)
    result = train(digits, tmp_path / "run", profile="trace", steps=3)
    assert result["finished"]
    out = capsys.readouterr().out
    assert "note: profile: " in out
    assert "No space left on device" in out
    assert "; the run continues without it" in out
    assert not RANGES.are_recorded


def test_a_resume_may_add_a_profile_and_an_older_run_has_none(digits, tmp_path):
    run = tmp_path / "run"
    words = small_run(digits, run, steps=16, ckpts_per_epoch=6, model="resnet8")
    assert main(words) == 0
    kept = sorted((run / "checkpoints").glob("step-*"))
    assert kept
    config = run / "config.yaml"
    config.write_text(
        "".join(line for line in config.read_text().splitlines(True) if "profile" not in line)
    )
    (run / "summary.json").unlink()
    for path in (run / "checkpoints").iterdir():
        if path.name != kept[0].name:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
    assert main(["train", "--resume", str(run), "--profile", "summary"]) == 0
    assert read_summary(run)["step"] == 16


@pytest.mark.slow  # processes that import torch
def test_every_rank_has_a_folder_of_its_own(digits, tmp_path):
    done = run_phalanx(
        *small_run(
            digits,
            tmp_path / "run",
            model="resnet8",
            steps=3,
            profile="summary",
            shards=2,
            pipeline="true",
            devices=2,
            gradient_accumulation=2,
            batch_size=8,
            validation="false",
        )
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((tmp_path / "run" / "profile" / rank / "summary.json").read_text())
        for rank in ("", "rank-1")
    )
    units = [[part["part"] for part in one["parts"] if part["is_unit"]] for one in (first, second)]
    assert units[0] + units[1] == UNITS
    assert units[0] and units[1]
    assert "rank 1 of 2, stage 1 of 2" in second["title"]
    assert "between stages" in [part["part"] for part in first["parts"]]
