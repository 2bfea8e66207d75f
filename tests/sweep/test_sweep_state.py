"""What a sweep writes down: read back the same, and refused when its file has changed."""

import csv
import json
import math

import pytest

from phalanx.errors import CheckpointError, ConfigError
from phalanx.sweep.state import Trial, TrialScore, create_sweep, load_sweep
from phalanx.sweep.table import describe_sweep, format_table
from small_sweeps import WIDE, play, read_text


def test_a_journal_reads_back_as_it_was_written(tmp_path):
    sweep = read_text(tmp_path)
    state = create_sweep(tmp_path / "sweep", sweep)
    for trial in play(sweep, tmp_path, count=8).trials:
        state = state.with_trial(trial)
    odd = TrialScore(step=1, epoch=0.5, score=math.inf)
    running = Trial(number=8, values={"lr": 0.1}, points=(odd,), process=("here", 12))
    state = state.with_trial(running)
    assert load_sweep(state.folder, sweep).trials == state.trials
    assert (state.folder / "sweep.yaml").read_text() == WIDE


def test_the_state_of_an_earlier_version_is_read_and_kept(tmp_path):
    sweep = read_text(tmp_path, "search: {keep: {low: 1, high: 9, step: 3}}\ntrials: 2\n")
    trial = """{
      "number": 0,
      "values": {
        "keep": 4
      },
      "state": "failed",
      "points": [
        {
          "step": 8,
          "epoch": 0.5,
          "score": "inf",
          "interval95": [
            0.1,
            0.2
          ]
        }
      ],
      "seconds": 31.5,
      "exit_code": 5,
      "reason": "diverged",
      "rungs": {
        "completed_rung_0": "-inf"
      },
      "process": [
        "here",
        12
      ],
      "score": "inf",
      "epochs": 0.5
    }"""
    state = create_sweep(tmp_path / "sweep", sweep)
    path = state.folder / "sweep.json"
    written = path.read_text().replace('"trials": []', f'"trials": [\n    {trial}\n  ]')
    assert '"high": 7,' in written, "the last number that is reached"
    path.write_text(written)
    (read,) = load_sweep(state.folder, sweep).trials
    assert read == Trial(
        number=0,
        values={"keep": 4},
        state="failed",
        points=(TrialScore(step=8, epoch=0.5, score=math.inf, interval95=(0.1, 0.2)),),
        seconds=31.5,
        exit_code=5,
        reason="diverged",
        rungs={"completed_rung_0": -math.inf},
        process=("here", 12),
    )
    assert path.read_text() == written


def test_a_trial_that_changes_stays_one_trial(tmp_path):
    state = create_sweep(tmp_path / "sweep", read_text(tmp_path))
    trial = Trial(number=0, values={"lr": 0.1})
    twice = state.with_trial(trial).with_trial(trial)
    assert twice.trials == (trial,) and not twice.finished_trials


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("high: 0.6", "high: 0.7", "search lr was {low: 0.02, high: 0.6, log: true}, is {low: 0.0"),
        ("[1e-4, 5e-4, 1e-3]", "[1e-4, 5e-4]", "search weight-decay was [1e-4, 5e-4, 1e-3], is ["),
        ("epochs: 4", "epochs: 5", "options epochs was 4, is 5"),
        ("epochs: 4", "epochs: 4, momentum: 0.9", "options momentum was not given, is 0.9"),
        ("preset: demo", "preset: mnist-resnet8", "preset was demo, is mnist-resnet8"),
        ("trials: 12", "trials: 12\nseed: 1", "seed was 0, is 1"),
        ("trials: 12", "trials: 12\ngoal: loss", "goal was top1, is loss"),
        ("trials: 12", "trials: 11", "trials was 12, is 11; it may only grow"),
    ],
)
def test_a_changed_file_is_refused_with_what_differs(tmp_path, old, new, told):
    folder = tmp_path / "sweep"
    create_sweep(folder, read_text(tmp_path))
    text = WIDE.replace(old, new)
    if "momentum: 0.9" in text:
        text = text.replace("  momentum: {low: 0.8, high: 0.95, step: 0.05}\n", "")
    with pytest.raises(ConfigError) as caught:
        load_sweep(folder, read_text(tmp_path, text))
    message = str(caught.value)
    assert message.startswith(f"{folder}: was started with a different file: ") and told in message
    assert message.endswith(
        f". Restore the old file ({folder / 'sweep.yaml'}), or start over with another --sweep-dir"
    )


def test_more_trials_and_other_comments_are_welcome(tmp_path):
    folder = tmp_path / "sweep"
    create_sweep(folder, read_text(tmp_path))
    more = "# rather more\n" + WIDE.replace("trials: 12", "trials: 20")
    assert load_sweep(folder, read_text(tmp_path, more)).sweep.trials == 20
    assert (folder / "sweep.yaml").read_text() == more


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name, what in (("full", "is not empty and holds no sweep"), ("file", "is a file")):
        with pytest.raises(ConfigError, match=f"{what}; choose another --sweep-dir"):
            create_sweep(tmp_path / name, read_text(tmp_path))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "format 2 is not one this version reads"),
        ({"trials": [{}]}, "is damaged"),
        ({"trials": 3}, "is damaged"),
    ],
)
def test_a_journal_of_others_is_refused(tmp_path, change, told):
    sweep = read_text(tmp_path)
    path = create_sweep(tmp_path / "sweep", sweep).folder / "sweep.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=told):
        load_sweep(path.parent, sweep)


def test_the_table_lines_up_with_the_best_first(tmp_path):
    state = play(read_text(tmp_path), tmp_path)
    head, *rows = format_table(state)
    names = "trial state top-1 95% interval lr momentum weight-decay epochs time"
    assert " ".join(head.split()) == names
    states = [row.split()[1] for row in rows]
    assert states == ["done"] * 9 + ["pruned"] * 2 + ["failed"]
    scores = [float(row.split()[2].rstrip("%")) for row in rows[:9]]
    assert scores == sorted(scores, reverse=True)
    ends = {row.index("%") for row in rows[:-1]}
    assert len(ends) == 1, "the scores end in one column"
    assert rows[-1].endswith("38s  diverged: step 5: loss nan")


def test_of_losses_the_lowest_is_best(tmp_path):
    state = play(read_text(tmp_path, WIDE + "goal: loss\n"), tmp_path)
    done = [trial.score for trial in state.trials if trial.state == "done"]
    assert state.best is not None and state.best.score == min(done)
    assert "95% interval" not in format_table(state)[0]


def test_the_csv_and_the_json_hold_every_trial(tmp_path):
    state = play(read_text(tmp_path), tmp_path).write()
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    facts = json.loads((tmp_path / "sweep.json").read_text())
    assert len(rows) == len(facts["trials"]) == 12
    best = state.best
    assert best is not None and facts["best"] == best.number == int(rows[0]["trial"])
    assert float(rows[0]["top1"]) == best.score == facts["trials"][best.number]["score"]
    assert float(rows[0]["top1_low"]) < best.score < float(rows[0]["top1_high"])
    assert float(rows[0]["lr"]) == best.values["lr"]
    assert rows[-1]["state"] == "failed" and rows[-1]["reason"] == "diverged: step 5: loss nan"
    assert facts["finished"] and facts["command"] == (
        f"phalanx train demo --epochs 4 --lr {best.values['lr']!r} "
        f"--momentum {best.values['momentum']!r} --weight-decay {best.values['weight-decay']}"
    )


def test_a_dry_run_tells_the_space(tmp_path):
    told = "\n".join(describe_sweep(read_text(tmp_path)))
    for words in ("demo", "epochs 4", "0.02 to 0.6  log scale", "0.8 to 0.95  step 0.05", "12"):
        assert words in told
