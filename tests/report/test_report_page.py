import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from html_page import Page
from phalanx.errors import CheckpointError
from phalanx.report.folder import create_run
from phalanx.report.plots import MOST_POINTS, downsample_curve, plot_loss
from phalanx.report.records import Records, StepRow
from phalanx.report.report_page import describe_data_wait, write_report
from phalanx.report.summary import (
    AverageScore,
    BestScore,
    Numerics,
    read_average_score,
    read_summary,
    write_average_score,
    write_summary,
)
from synthetic_run import (
    CONFIG,
    STEPS_PER_EPOCH,
    log_row,
    make_facts,
    make_run,
    make_summary,
    score_row,
    step_row,
    write_history,
)

pytestmark = pytest.mark.draws

SECTIONS = ["curves", "confusion", "gallery", "options", "environment", "files"]


def read_page(run):
    return Page(write_report(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(finished_run):
    return read_page(finished_run)


def test_a_finished_run_shows_everything(page):
    assert page.sections == SECTIONS
    assert page.tags.count("svg") == 5
    assert page.tags.count("img") == 24
    for words in (
        "demo finished",
        "top-1 85.20% of 1,500 images\n95% interval 83.31% to 86.91%",
        "best top-1 85.20% at step 625",
        "steps 625 5 epochs",
        "images per second 2,310 on cpu",
        "The data kept up: training waited for it 1.2% of the time.",
        "Most frequent mistakes",
        "2 of 11 options differ from their defaults",
        "learning-rate 0.1 flag",
        "replicas.folded 2",
        "step-00000625",
    ):
        assert words in page.text


def test_changed_options_come_first(page):
    assert page.text.index("learning-rate 0.1 flag") < page.text.index("data embedded")


def test_the_page_needs_nothing_from_outside(page):
    assert len(page.addresses) > 24
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in page.addresses)
    assert "script" not in page.tags
    assert "link" not in page.tags


def test_the_same_folder_gives_the_same_page(finished_run):
    first = write_report(finished_run).read_bytes()
    finished_run.report.unlink()
    # report.html itself must not be part of what it is made from
    assert write_report(finished_run).read_bytes() == first


def test_a_run_that_has_not_begun_says_so(tmp_path):
    run = create_run(tmp_path / "new", config_text=CONFIG.format(lr=1), facts=make_facts())
    page = read_page(run)
    assert page.sections == SECTIONS
    assert "unfinished" in page.text
    assert "Nothing trained yet." in page.text
    assert page.text.count("No evaluation yet.") == 1
    assert "No pictures of mistakes have been kept yet." in page.text


def test_without_scores_and_metrics_there_is_no_curve_of_top1(tmp_path):
    run = create_run(tmp_path / "bare", config_text=CONFIG.format(lr=1), facts=make_facts())
    records, bare = Records(run.path), {"grad_norm": None, "top1": None}
    records.add_steps([replace(step_row(step), **bare) for step in range(1, 26)])
    records.add_log(replace(log_row(25), **bare))
    page = read_page(run)
    assert "Loss" in page.text and "Top-1" not in page.text


def test_a_finished_run_without_validation_does_not_promise_one(tmp_path):
    run = create_run(tmp_path / "unscored", config_text=CONFIG.format(lr=1), facts=make_facts())
    write_history(run.path, 30)
    scores = {name: None for name in ("top1", "top5", "interval95", "best")}
    write_summary(run.path, make_summary(scored=None, **scores))
    text = read_page(run).text
    assert "top-1 none nothing was scored" in text and "Nothing was scored." in text
    assert "No pictures of mistakes were kept." in text
    assert "yet" not in text


def test_a_page_without_its_metrics_does_not_replace_the_one_with_them(tmp_path):
    run = make_run(tmp_path / "copied")
    page = write_report(run).read_bytes()
    (run.path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: is missing; restore it from a co"):
        write_report(run)
    assert run.report.read_bytes() == page


def test_a_fork_has_its_own_name_and_names_its_parent(tmp_path):
    parent = {"run": "first", "checkpoint": "runs/first/checkpoints/step-00000075", "step": 75}
    run = make_run(tmp_path / "longer", name="first", parent={**parent, "weights_sha256": "ab"})
    page = read_page(run)
    assert page.text.startswith("longer longer finished")
    assert "; forked from first at step 75 top-1" in page.text
    assert "checkpoint runs/first/checkpoints/step-00000075" in page.text


def test_one_epoch_is_singular(tmp_path):
    run = create_run(tmp_path / "one", config_text=CONFIG.format(lr=1), facts=make_facts())
    write_history(run.path, STEPS_PER_EPOCH)
    assert "steps 125 1 epoch " in read_page(run).text


@pytest.mark.parametrize(
    ("best", "told"),
    [
        (
            BestScore(step=375, top1=0.81),
            "at step 625, which was not saved\nthe best checkpoint: 81.00% at step 375",
        ),
        (None, "at step 625, which was not saved"),
    ],
)
def test_a_better_score_than_that_of_any_checkpoint_is_told(tmp_path, best, told):
    run = make_run(tmp_path / "run")
    write_summary(run.path, make_summary(best=best))
    assert f"best top-1 85.20% {told}" in read_page(run).text


def test_the_average_of_checkpoints_is_told_while_it_is_there(tmp_path):
    run = make_run(tmp_path / "averaged")
    account = {"strategy": "mean", "count": 3, "steps": [375, 500, 625]}
    score = AverageScore(account=account, newest=score_row(250), average=score_row(625))
    write_average_score(run.path, score)
    assert read_average_score(run.path) == score
    assert "top-1 of the average" not in read_page(run).text
    (run.checkpoints / "average").mkdir()
    told = "of 3 checkpoints, steps 375 to 625\n95% interval 83.31% to 86.91%; the newest 76.53%"
    assert f"top-1 of the average 85.20% {told}" in read_page(run).text


def test_the_numerics_of_16_bits_are_told(tmp_path):
    run = make_run(tmp_path / "half")
    told = Numerics(
        updates_lost=0.559,
        lost_to_rounding=-2e-6,
        gradients_zero=0.0015,
        gradients_not_finite=3,
        skipped_steps=20,
        loss_scales=tuple((step, 2.0**16 / 2**step) for step in range(20)),
    )
    write_summary(run.path, make_summary(numerics=told))
    page = read_page(run)
    for words in (
        "55.90% of the weight updates changed nothing in their step",
        " 0.00% of the total change of the weights was lost to rounding",
        "0.15% of the gradient values were zero",
        "the loss scale changed 20 times; the last were",
        "loss scale 256 from step 8 on",
        "gradient values that were not finite: 3",
        "steps that overflowed and were skipped: 20",
    ):
        assert words in page.text
    assert "from step 7 on" not in page.text


def test_summaries_from_before_rounding_was_measured_are_read(tmp_path):
    run = make_run(tmp_path / "old")
    known = {"updates_lost": 0.5, "gradients_zero": 0.0, "gradients_not_finite": 0}
    older = {**known, "skipped_steps": 0, "loss_scales": []}
    plain = json.loads((run.path / "summary.json").read_text())
    (run.path / "summary.json").write_text(json.dumps({**plain, "numerics": older}))
    assert read_summary(run.path).numerics.lost_to_rounding is None
    assert "50.00% of the weight updates" in read_page(run).text


def test_a_run_that_failed_says_why(tmp_path):
    run = create_run(tmp_path / "new", config_text=CONFIG.format(lr=1), facts=make_facts())
    box = run.path / "blackbox.json"
    box.write_text(json.dumps({"why": "DivergedError: step 6: loss nan; start <again>"}))
    text = read_page(run).text
    assert "failed" in text and "The run failed: step 6: loss nan; start <again>" in text
    for damaged in ("[", "[]", "{}"):
        box.write_text(damaged)
        assert "unfinished" in read_page(run).text
    done = make_run(tmp_path / "done")
    (done.path / "blackbox.json").write_text(json.dumps({"why": "OSError: of an earlier trial"}))
    assert "The run failed" not in read_page(done).text


@pytest.mark.parametrize("steps", [3, 30, 140])
def test_an_unfinished_run_shows_what_there_is(tmp_path, steps):
    run = create_run(tmp_path / "new", config_text=CONFIG.format(lr=1), facts=make_facts())
    write_history(run.path, steps)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 141, "epo')
    page = read_page(run)
    assert f"steps {steps} " in page.text
    assert ("no evaluation yet" in page.text) == (steps < 125)
    assert page.tags.count("svg") == {3: 2, 30: 5, 140: 5}[steps]


def test_texts_cannot_break_the_page(tmp_path):
    evil = "<script>alert('x')</script>&\""
    run = make_run(
        tmp_path / "evil",
        classes=[f"{evil}{k}" for k in range(7)],
        name=evil,
        command=evil,
        origins={"model": evil},
        environment={evil: evil},
        data={evil: evil},
        parent={"run": evil},
    )
    run.config.write_text(f"model: '{evil.replace(chr(39), chr(39) * 2)}'\n")
    page = read_page(run)
    assert "script" not in page.tags
    assert page.sections == SECTIONS
    assert page.text.count("alert('x')") > 10


def test_many_classes_get_pairs_and_no_matrix(tmp_path):
    run = make_run(tmp_path / "many", classes=[f"kind {k}" for k in range(41)])
    text = write_report(run).read_text()
    assert 'class="matrix"' not in text
    assert "Most frequent mistakes" in text
    few = make_run(tmp_path / "few", classes=[f"kind {k}" for k in range(40)])
    assert 'class="matrix"' in write_report(few).read_text()


def test_classes_without_names_are_numbered(tmp_path):
    run = make_run(tmp_path / "run")
    run.update_facts(classes=[])
    assert "class 8" in read_page(run).text


def test_a_diverged_run_is_still_drawn(tmp_path):
    run = create_run(tmp_path / "nan", config_text=CONFIG.format(lr=9), facts=make_facts())
    records = Records(run.path)
    records.add_steps(
        StepRow(
            step=step,
            epoch=step / 10,
            lr=9.0,
            loss=math.nan if step > 5 else float(step),
            grad_norm=math.inf,
            top1=0.1,
        )
        for step in range(1, 11)
    )
    records.flush()
    assert "loss by epoch" in write_report(run).read_text()


def test_damage_is_named_and_not_drawn_over(tmp_path):
    run = make_run(tmp_path / "run")
    run.summary.write_text("{}")
    with pytest.raises(CheckpointError, match=r"summary\.json: lacks"):
        write_report(run)


def test_long_curves_are_thinned_to_their_bounds():
    x, y = np.arange(100_000), np.zeros(100_000)
    y[77_777], y[77_778], y[5], y[9] = 3.0, -2.0, np.nan, np.inf
    xs, ys = downsample_curve(x, y)
    assert len(xs) == len(ys) <= MOST_POINTS * 1.1
    assert (np.nanmax(ys), np.nanmin(ys)) == (3.0, -2.0)
    assert not np.isnan(ys).any()
    assert len(downsample_curve(x[:900], y[:900])[0]) == 900


def test_drawings_leave_their_colours_to_the_page():
    columns = {"epoch": [0.1, 0.2], "loss": [2.0, 1.0]}
    svg = plot_loss(columns, [], scores=[])
    assert "var(--train)" in svg
    assert "#030405" not in svg
    assert svg.startswith('<svg viewBox="')


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        (None, "was not measured: the first steps after a start do not count"),
        (0.01, "kept up"),
        (0.1, "nearly kept up"),
        (0.5, "held training"),
    ],
)
def test_waiting_gets_a_verdict(wait, words):
    assert words in describe_data_wait(wait)


def test_a_report_needs_no_torch(finished_run):
    code = (
        "import sys; from pathlib import Path\n"
        "from phalanx.report import compare, console, report_page\n"
        "from phalanx.report.folder import open_run\n"
        "run = open_run(Path(sys.argv[1])); report_page.write_report(run)\n"
        "compare.compare_runs(run, run)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin"}
    command = [sys.executable, "-c", code, str(finished_run.path)]
    assert subprocess.run(command, env=env, check=False).returncode == 0
