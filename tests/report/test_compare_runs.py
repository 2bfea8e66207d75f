import json
import math
from dataclasses import replace

from phalanx.report.compare import compare_runs, render_comparison
from phalanx.report.folder import create_run
from phalanx.report.predictions import write_predictions
from phalanx.report.records import Records
from synthetic_run import (
    CLASSES,
    CONFIG,
    make_facts,
    make_predictions,
    make_run,
    step_row,
    write_history,
)


def short_run(path, steps, *, seed=0):
    run = create_run(path, config_text=CONFIG.format(lr=0.1), facts=make_facts())
    write_history(path, steps, seed=seed)
    return run


def test_equal_runs_are_identical(tmp_path, finished_run):
    twin = make_run(tmp_path / "twin")
    comparison = compare_runs(finished_run, twin)
    assert comparison.options == comparison.data == comparison.surroundings == []
    assert comparison.divergence is None
    assert comparison.paired["p"] == 1.0
    text = render_comparison(comparison)
    assert "identical to step 625\n" in text
    assert "the same fingerprints" in text
    assert "no difference that 1,500 images can show" in text


def test_different_runs_say_where_and_which_is_better(tmp_path, finished_run):
    other = make_run(
        tmp_path / "other",
        lr="0.2",
        accuracy=0.95,
        data={"train": "5f0c", "valid": "ffff"},
        chosen={"device": "cuda:0", "precision": "32.32", "threads": 2},
        environment={"phalanx": "0.1.0", "torch": "2.14.0", "python": "3.11.7"},
    )
    text = render_comparison(compare_runs(finished_run, other))
    lines = [line.split() for line in text.splitlines()]
    assert ["learning-rate", "0.1", "0.2"] in lines
    assert ["valid", "91aa", "ffff"] in lines
    assert ["torch", "2.13.0", "2.14.0"] in lines
    assert ["commit", "1a2b", "(not", "set)"] in lines
    assert ["device", "cpu", "cuda:0"] in lines
    assert not any("python" in line for line in lines)
    assert "1,500 images were scored by both: 0 right only in A" in text
    assert text.endswith("B is better")


def test_the_first_differing_step_and_quantity_are_named(tmp_path):
    a, b = short_run(tmp_path / "a", 20), short_run(tmp_path / "b", 12)
    other = step_row(13, seed=9)
    records = Records(b.path)
    records.add_steps([other, step_row(14)])
    records.flush()
    divergence = compare_runs(a, b).divergence
    assert (divergence.step, divergence.quantity) == (13, "loss")
    assert (divergence.a, divergence.b) == (step_row(13).loss, other.loss)
    told = f"the runs diverge at step 13: loss is {divergence.a!r} in A and {divergence.b!r} in B"
    assert told in render_comparison(compare_runs(a, b))


def test_the_earliest_difference_counts_whatever_the_quantity(tmp_path):
    a, b = short_run(tmp_path / "a", 20), short_run(tmp_path / "b", 12)
    records = Records(b.path)
    records.add_steps([replace(step_row(13), grad_norm=7.0), replace(step_row(14), loss=7.0)])
    records.flush()
    divergence = compare_runs(a, b).divergence
    assert (divergence.step, divergence.quantity, divergence.b) == (13, "grad_norm", 7.0)


def test_steps_without_metrics_are_compared_by_their_loss(tmp_path):
    a, b = short_run(tmp_path / "a", 20), short_run(tmp_path / "b", 12)
    records, bare = Records(b.path), {"grad_norm": None, "top1": None}
    records.add_steps([replace(step_row(step), **bare) for step in (13, 14)])
    records.flush()
    assert compare_runs(a, b).divergence is None
    records.add_steps([replace(step_row(15), loss=7.0, **bare)])
    records.flush()
    divergence = compare_runs(a, b).divergence
    assert (divergence.step, divergence.quantity) == (15, "loss")


def test_a_shorter_run_is_identical_as_far_as_it_goes(tmp_path):
    a, b = short_run(tmp_path / "a", 20), short_run(tmp_path / "b", 12)
    text = render_comparison(compare_runs(a, b))
    assert "identical to step 12 (A has 20, B has 12)" in text
    assert "A  no evaluation\n" in text


def test_runs_that_recorded_nothing_say_so(tmp_path):
    a, b = short_run(tmp_path / "a", 0), short_run(tmp_path / "b", 5)
    assert "there is no step that both runs recorded" in render_comparison(compare_runs(a, b))


def test_a_loss_that_is_no_number_equals_itself(tmp_path):
    runs = [short_run(tmp_path / name, 3) for name in "ab"]
    for run in runs:
        line = (
            '{"step": 4, "epoch": 0.1, "lr": 0.1, "loss": "nan", "grad_norm": "inf", "top1": 0.0}'
        )
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
    assert compare_runs(*runs).divergence is None


def test_only_images_that_both_scored_are_paired(tmp_path):
    a, b = short_run(tmp_path / "a", 125), short_run(tmp_path / "b", 125)
    rows = make_predictions(images=100)
    write_predictions(a.path, rows, classes=CLASSES)
    write_predictions(b.path, list(reversed(rows[:60])), classes=CLASSES)
    comparison = compare_runs(a, b)
    assert comparison.paired["n"] == 60
    told = "60 images were scored by both (40 only in A, 0 only in B)"
    assert told in render_comparison(comparison)


def test_an_image_under_another_label_is_another_image(tmp_path):
    a, b = short_run(tmp_path / "a", 125), short_run(tmp_path / "b", 125)
    rows = make_predictions(images=10)
    write_predictions(a.path, rows, classes=CLASSES)
    wrong = replace(rows[0], label=rows[0].label + 1)
    write_predictions(b.path, [wrong, *rows[1:]], classes=CLASSES)
    assert compare_runs(a, b).paired["n"] == 9


def test_without_shared_images_the_intervals_speak(tmp_path):
    a, b = short_run(tmp_path / "a", 125), short_run(tmp_path / "b", 625)
    text = render_comparison(compare_runs(a, b))
    assert text.endswith(
        "no image was scored by both, so only the intervals can be compared: B is better"
    )
    same = render_comparison(compare_runs(a, a))
    assert same.endswith("they overlap")


def test_a_comparison_is_plain_data(tmp_path):
    a, b = short_run(tmp_path / "a", 3), short_run(tmp_path / "b", 2)
    records = Records(b.path)
    records.add_steps([replace(step_row(3), loss=math.nan)])
    records.flush()
    values = json.loads(json.dumps(compare_runs(a, b).to_dict(), allow_nan=False))
    assert values["divergence"]["quantity"] == "loss"
    assert values["divergence"]["b"] == "nan"
    assert values["parting"] == values["divergence"], "scripts may still know the older name"
