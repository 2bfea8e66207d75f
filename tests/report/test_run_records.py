import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import CheckpointError, DiskError
from phalanx.report.records import (
    Records,
    StepRow,
    read_logs,
    read_scores,
    read_steps,
)
from synthetic_run import log_row, score_row, step_row, write_history

FILES = ("metrics.jsonl", "training.csv", "validation.csv")


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_what_is_written_reads_back_bit_for_bit(tmp_path):
    write_history(tmp_path, 125)
    columns = read_steps(tmp_path)
    rows = [step_row(step) for step in range(1, 126)]
    for name in columns:
        assert columns[name] == [getattr(row, name) for row in rows]
    assert read_logs(tmp_path) == [log_row(step) for step in range(25, 126, 25)]
    assert read_scores(tmp_path) == [score_row(125)]


def test_metrics_lines_have_the_documented_form(tmp_path):
    write_history(tmp_path, 125)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert list(lines[0]) == ["step", "epoch", "lr", "loss", "grad_norm", "top1"]
    assert list(lines[-1]) == ["step", "epoch", "valid"]
    assert list(lines[-1]["valid"]) == ["scored", "top1", "top5", "loss", "interval95"]
    header = (tmp_path / "validation.csv").read_text().splitlines()[0]
    assert header == "step,epoch,scored,top1,top1_low,top1_high,top5,loss"


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    records = Records(tmp_path)
    records.add_steps(
        [StepRow(step=1, epoch=0.1, lr=0.1, loss=math.nan, grad_norm=math.inf, top1=-math.inf)]
    )
    records.flush()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    entry = json.loads(line, parse_constant=refuse)
    assert (entry["loss"], entry["grad_norm"], entry["top1"]) == ("nan", "inf", "-inf")
    columns = read_steps(tmp_path)
    assert math.isnan(columns["loss"][0])
    assert (columns["grad_norm"], columns["top1"]) == ([math.inf], [-math.inf])


def test_what_was_not_measured_is_left_out(tmp_path):
    records, bare = Records(tmp_path), {"grad_norm": None, "top1": None}
    records.add_steps([replace(step_row(1), **bare), step_row(2)])
    records.add_log(replace(log_row(25), **bare))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["top1"] for line in lines] == [None, step_row(2).top1]
    assert lines[0]["grad_norm"] is None
    columns = read_steps(tmp_path)
    assert math.isnan(columns["grad_norm"][0]) and math.isnan(columns["top1"][0])
    assert columns["top1"][1] == step_row(2).top1
    (row,) = read_logs(tmp_path)
    assert (row.grad_norm, row.top1, row.loss) == (None, None, log_row(25).loss)


@pytest.mark.parametrize("killed_at", [126, 250, 251, 300])
def test_a_cut_back_run_goes_on_to_the_same_bytes(tmp_path, killed_at):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for folder in (straight, resumed):
        folder.mkdir()
    write_history(straight, 375)
    write_history(resumed, killed_at, seed=0)
    Records(resumed).truncate(125, scored=True)
    write_history(resumed, 375, first_step=125)
    assert contents(resumed) == contents(straight)


def test_torn_lines_are_cut_off(tmp_path):
    write_history(tmp_path, 125)
    whole = contents(tmp_path)
    torn = {
        "metrics.jsonl": b'{"step": 126, "epoch": 1.00',
        # every cell is there, but nothing says that the last one is whole
        "training.csv": b"25,0.2,0.1,1.0,1.0,0.5,2300.0,0.0",
        "validation.csv": b"125,1.0,1500",
    }
    for name, tail in torn.items():
        with (tmp_path / name).open("ab") as file:
            file.write(tail)
    assert len(read_steps(tmp_path)["step"]) == 125
    assert len(read_logs(tmp_path)) == 5
    Records(tmp_path).truncate(125, scored=True)
    assert contents(tmp_path) == whole


def test_a_score_at_the_step_goes_when_it_must_be_taken_again(tmp_path):
    write_history(tmp_path, 250)
    Records(tmp_path).truncate(250, scored=True)
    assert [row.step for row in read_scores(tmp_path)] == [125, 250]
    Records(tmp_path).truncate(250, scored=False)
    assert [row.step for row in read_scores(tmp_path)] == [125]
    assert (tmp_path / "validation.csv").read_text().splitlines()[-1].startswith("125,")
    assert read_steps(tmp_path)["step"][-1] == 250
    assert read_logs(tmp_path)[-1].step == 250


def test_cutting_back_to_the_start_leaves_headers_only(tmp_path):
    write_history(tmp_path, 125)
    Records(tmp_path).truncate(0, scored=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert len((tmp_path / "training.csv").read_text().splitlines()) == 1


def test_cutting_back_an_open_record_keeps_what_was_still_buffered(tmp_path):
    records = Records(tmp_path)
    records.add_steps(step_row(step) for step in range(1, 11))
    records.truncate(7, scored=False)
    records.add_steps([step_row(8)])
    records.flush()
    assert read_steps(tmp_path)["step"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_without_records_reads_as_empty(tmp_path):
    Records(tmp_path).truncate(10, scored=True)
    assert read_steps(tmp_path)["step"] == []
    assert read_logs(tmp_path) == read_scores(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("averaged", [False, True])
def test_every_record_is_on_the_disk_before_a_checkpoint_presumes_it(
    tmp_path, monkeypatch, averaged
):
    synced, really_sync = [], os.fsync

    def note_and_sync(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        really_sync(handle)

    records = Records(tmp_path)
    records.add_score(score_row(125))
    if averaged:
        records.add_averaged_score(score_row(125))  # appended, but perhaps not yet on the disk
    monkeypatch.setattr(os, "fsync", note_and_sync)
    records.flush(sync=True)
    names = {*FILES, "averaged.csv"} if averaged else {*FILES}
    assert {path.name for path in synced if path.is_file()} == names
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    records = Records(tmp_path)
    records.add_steps([step_row(1)])
    with pytest.raises(DiskError, match=r"metrics\.jsonl: no space left .*--resume"):
        records.flush(sync=True)


def test_a_foreign_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: is damaged \(KeyError: 'epoch'\)"):
        read_steps(tmp_path)
