"""Which values trials get: repeatable, never twice the same, and wiser with every trial."""

import subprocess
import sys

import pytest

from phalanx.sweep.proposals import TrialPruner, propose_values
from phalanx.sweep.schema import iterate_points
from phalanx.sweep.state import Trial, TrialScore
from small_sweeps import WIDE, play, read_text, top1_of, write_sweep

LISTS = """\
search:
  lr: [0.1, 0.2, 0.3]
  momentum: [0.8, 0.9]
  batch-size: {low: 16, high: 18}
"""


def values_of(state) -> list[dict]:
    return [trial.values for trial in state.trials]


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_the_same_seed_proposes_the_same_and_another_seed_something_else(tmp_path, method):
    text = f"{WIDE}method: {method}\n"
    first = values_of(play(read_text(tmp_path, text), tmp_path))
    assert first == values_of(play(read_text(tmp_path, text), tmp_path))
    other = values_of(play(read_text(tmp_path, text + "seed: 1\n"), tmp_path))
    assert not [values for values in other if values in first]


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_values_stay_inside_and_differ(tmp_path, method):
    sweep = read_text(tmp_path, WIDE.replace("trials: 12", f"trials: 60\nmethod: {method}"))
    drawn = values_of(play(sweep, tmp_path))
    assert all(0.02 <= values["lr"] <= 0.6 for values in drawn)
    assert {values["momentum"] for values in drawn} == {0.8, 0.85, 0.9, 0.95}
    assert {values["weight-decay"] for values in drawn} == {"1e-4", "5e-4", "1e-3"}
    assert len({values["lr"] for values in drawn}) == 60
    assert sum(values["lr"] < 0.11 for values in drawn) >= 15, "half of the factors lie below"
    assert all(len(f"{values['lr']!r}") <= 9 for values in drawn), "few digits to read"


@pytest.mark.parametrize("method", ["grid", "random", "tpe"])
def test_where_points_can_be_counted_each_is_proposed_once(tmp_path, method):
    sweep = read_text(tmp_path, f"{LISTS}method: {method}\ntrials: 100\n")
    drawn = values_of(play(sweep, tmp_path))
    points = list(iterate_points(sweep.search))
    assert sweep.trials == len(points) == 18
    assert sorted(drawn, key=str) == sorted(points, key=str)
    assert (drawn == points) == (method == "grid"), "a grid goes in the order of the file"


def test_tpe_learns_from_scores(tmp_path):
    def mean_score(method: str) -> float:
        sweep = read_text(tmp_path, WIDE.replace("trials: 12", f"trials: 40\nmethod: {method}"))
        late = play(sweep, tmp_path).trials[20:]
        return sum(top1_of(trial) for trial in late) / len(late)

    assert mean_score("tpe") > mean_score("random") + 0.02


def test_tpe_keeps_away_from_where_trials_diverge(tmp_path):
    text = WIDE.replace("trials: 12", "trials: 40")
    sweep = read_text(tmp_path, text)

    def ended(values: dict, number: int) -> Trial:
        bad = values["lr"] > 0.1
        changes = {"state": "failed", "exit_code": 5} if bad else {"state": "done"}
        points = () if bad else (TrialScore(step=1, epoch=1.0, score=0.5),)
        return Trial(number=number, values=values, points=points, **changes)

    trials: list[Trial] = []
    for number in range(40):
        trials.append(ended(propose_values(sweep, trials), number))
    assert sum(trial.state == "failed" for trial in trials[20:]) <= 4


def judged(text: str, folder, scores: list[float]) -> list[bool]:
    """What is said of a new trial after each of its scores."""
    sweep = read_text(folder, text)
    before = play(sweep, folder, count=4).trials  # done, each at 4 validations
    judge = TrialPruner(sweep, before, values=propose_values(sweep, before))
    return [judge.should_prune(score) for score in scores]


@pytest.mark.parametrize("prune", ["median", "halving"])
def test_a_pruner_stops_what_is_worse_and_keeps_what_is_better(tmp_path, prune):
    text = f"{WIDE}prune: {prune}\nstartup: 3\n"
    assert judged(text, tmp_path, [0.01])[0] == (prune == "median")
    assert judged(text, tmp_path, [0.99, 0.99, 0.99]) == [False] * 3
    assert judged(f"{WIDE}prune: none\n", tmp_path, [0.01, 0.01]) == [False] * 2


def test_no_trial_is_pruned_before_the_grace_is_over(tmp_path):
    text = f"{WIDE}prune: median\nstartup: 3\ngrace: 3\n"
    assert judged(text, tmp_path, [0.01, 0.01, 0.01]) == [False, False, True]


def test_the_median_waits_for_the_first_trials(tmp_path):
    assert judged(f"{WIDE}prune: median\nstartup: 5\n", tmp_path, [0.01]) == [False]


def test_halving_remembers_who_reached_a_rung(tmp_path):
    sweep = read_text(tmp_path, f"{WIDE}prune: halving\n")
    trials: list[Trial] = []
    for number, score in enumerate([0.5, 0.6, 0.4]):
        values = propose_values(sweep, trials)
        judge = TrialPruner(sweep, trials, values=values)
        hopeless = judge.should_prune(score)
        assert hopeless == (score == 0.4)
        state = "pruned" if hopeless else "done"
        points = (TrialScore(step=1, epoch=1.0, score=score),)
        ended = Trial(number=number, values=values, state=state, points=points, rungs=judge.rungs)
        assert ended.rungs == {"completed_rung_0": score}
        trials.append(ended)


def test_without_optuna_the_way_to_get_it_is_told(tmp_path):
    path = write_sweep(tmp_path)
    code = (
        "import sys; sys.modules['optuna'] = None; from phalanx.cli.main import main; "
        f"sys.exit(main(['sweep', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    told = "phalanx sweep: phalanx sweep needs optuna: pip install 'phalanx[sweep]'\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert not (tmp_path / "sweeps").exists()
