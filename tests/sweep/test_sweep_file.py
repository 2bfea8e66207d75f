"""The file of a sweep: what it means, and every mistake in it by its line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import ConfigError
from phalanx.sweep.check import read_sweep
from phalanx.sweep.schema import KEYS, Choice, Range, count_points, iterate_points
from small_sweeps import WIDE, read_text, write_sweep

pytestmark = pytest.mark.usefixtures("empty_folder")

GOOD = "search:\n  lr: [0.1, 0.2]\ntrials: 2\n"


def refused(folder, text: str) -> list[str]:
    """The problems of a file, without its name."""
    path = write_sweep(folder, text)
    with pytest.raises(ConfigError) as caught:
        read_sweep(path)
    lines = str(caught.value).splitlines()
    told = lines[1:] if lines[0].endswith(" problems:") else lines
    return [line.strip().removeprefix(f"{path}:") for line in told]


def test_a_file_is_read_with_its_defaults(tmp_path):
    sweep = read_text(tmp_path)
    assert sweep.name == "rates" and sweep.preset == "demo" and sweep.options == {"epochs": "4"}
    assert sweep.search == {
        "lr": Range(low=0.02, high=0.6, log=True),
        "momentum": Range(low=0.8, high=0.95, step=0.05),
        "weight-decay": Choice(values=("1e-4", "5e-4", "1e-3")),
    }
    told = (sweep.method, sweep.goal, sweep.prune, sweep.trials, sweep.startup, sweep.seed)
    assert told == ("tpe", "top1", "none", 12, 5, 0)


def test_the_example_in_the_docs_is_sound(tmp_path):
    page = (Path(phalanx.__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    example = re.search(r"^```yaml\n(# rates.yaml.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert example is not None
    sweep = read_text(tmp_path, example[1])
    assert sweep.trials == 12 and list(sweep.search) == ["lr", "weight-decay"]
    keys = set(re.findall(r"^([a-z]+):", example[1], flags=re.MULTILINE))
    assert keys == set(KEYS), "the example has every key"


def test_values_become_what_a_flag_takes(tmp_path):
    options = "options: {batch_size: 0x10, epochs: 4, eight-bit-io: yes, image-size: null}\n"
    sweep = read_text(tmp_path, options + "search: {precision: [16.32, 32.32]}\nmethod: grid\n")
    assert sweep.options == {
        "batch-size": "16",
        "epochs": "4",
        "eight-bit-io": "yes",
        "image-size": "null",
    }
    assert sweep.search == {"precision": Choice(values=("16.32", "32.32"))}


def test_a_grid_has_every_point_once_and_its_numbers_are_round(tmp_path):
    text = "search:\n  lr: {low: 0.1, high: 0.45, step: 0.1}\n  batch-size: {low: 2, high: 4}\n"
    sweep = read_text(tmp_path, text + "method: grid\n")
    points = list(iterate_points(sweep.search))
    assert sweep.trials == len(points) == count_points(sweep.search) == 12
    assert points[:4] == [
        {"lr": 0.1, "batch-size": 2},
        {"lr": 0.1, "batch-size": 3},
        {"lr": 0.1, "batch-size": 4},
        {"lr": 0.2, "batch-size": 2},
    ]
    assert {point["lr"] for point in points} == {0.1, 0.2, 0.3, 0.4}


def test_no_more_trials_than_points(tmp_path):
    assert read_text(tmp_path, GOOD.replace("trials: 2", "trials: 9")).trials == 2
    assert read_text(tmp_path, GOOD.replace("trials: 2", "trials: 1")).trials == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trials: 1\n", " nothing to search; add search: with options and their values"),
        ("search: {}\ntrials: 1\n", "1: search: is empty; name options and their values"),
        ("search: 3\ntrials: 1\n", "1: expected lines of the form `option: value`"),
        (GOOD + "metod: tpe\n", "4: metod: no such key; did you mean 'method'?"),
        (
            GOOD + "epochs: 4\n",
            "4: epochs: is an option of `phalanx train`; it belongs under options: or search:",
        ),
        (GOOD + "method: bayes\n", "4: method: expected grid, random, tpe, got 'bayes'"),
        (GOOD + "goal: [loss]\n", "4: goal: expected top1, top5, loss, got a list or a mapping"),
        (GOOD + "prune: mean\n", "4: prune: expected none, median, halving, got 'mean'"),
        (GOOD + "seed: -1\n", "4: seed: expected a whole number from 0 on, got '-1'"),
        (
            GOOD.replace("trials: 2", "trials: 0"),
            "3: trials: expected a whole number from 1 on, got '0'",
        ),
        (
            "search: {lr: [0.1]}\n",
            " add trials:, the number of runs, or method: grid, which runs every combination",
        ),
        ("search: {lr: {low: 0.1, high: 1}}\n", " add trials:, the number of runs"),
        (GOOD + "preset: dmo\n", "4: preset: dmo: no preset is called that; did you mean 'demo'?"),
        (GOOD + "preset: [demo]\n", "4: preset: expected one preset or file"),
        (GOOD + "options: {lr: 0.3}\n", "2: lr: is already given at "),
        (GOOD + "options: {learning: 3}\n", "4: learning: no such option"),
        (GOOD + "options: {run-dir: here}\n", "4: run-dir: every trial has a folder of its own"),
        (GOOD + "options: {epochs: four}\n", "4: epochs: expected a number, got 'four'"),
        (GOOD + "options: {epochs: -1}\n", "4: epochs: must be at least 0.0001, got -1"),
        (GOOD + "options: {warmup-epoch: 99}\n", "4: warmup-epoch: 99ep is 12375 steps, longer"),
        (
            GOOD + "preset: cifar10-resnet20\noptions: {warmup-epoch: 121}\n",
            "5: warmup-epoch: 121ep is ",
        ),
        (
            GOOD + "preset: synthetic-resnet50\noptions: {warmup-epoch: 9}\n",
            "5: warmup-epoch: 9ep is 900 steps, longer than the run of 100",
        ),
        (GOOD + "options: {logs-per-epoch: 1/3}\n", "4: logs-per-epoch 1/3: cannot log 3 epochs"),
        (GOOD + "options: {validation: false}\n", "4: validation: a sweep compares"),
        (GOOD + "options: {validation-frequency: 0}\n", "4: validation-frequency: a sweep compar"),
        (
            GOOD + "prune: median\noptions: {validation-mode: after}\n",
            "5: validation-mode: prune: median needs scores while a trial trains; use "
            "validation-mode: during, or prune: none",
        ),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_line(tmp_path, text, problem):
    (told,) = refused(tmp_path, text)
    assert told.startswith(problem)


@pytest.mark.parametrize(
    ("dimension", "problem"),
    [
        ("lr: 0.1", "lr: expected a list, or low and high; a single value goes under options:"),
        ("lr: []", "lr: the list is empty; give at least one value"),
        ("lr: [0.1, 1e-1]", "lr: 0.1 is in the list twice; remove one"),
        ("lr: [0.1, fast]", "lr: expected a number, got 'fast'"),
        ("lr: [0.1, -2]", "lr: must be at least 0.0, got -2.0"),
        ("lr: {low: 0.6, high: 0.02}", "lr: low 0.6 must be below high 0.02"),
        ("lr: {low: 0, high: 1, log: true}", "lr: log: expected low above 0, got 0; leave log out"),
        ("lr: {low: 1, high: 2, log: yea}", "lr: log: expected true or false, got 'yea'"),
        ("lr: {low: 1}", "lr: high: expected a number, it is missing"),
        ("lr: {low: 1, high: .inf}", "lr: high: expected a number, got '.inf'"),
        ("lr: {low: 1, high: 2, step: 3}", "lr: step: 3.0 does not fit into the range"),
        ("lr: {low: 1, high: 2, step: -1}", "lr: step: must be above 0, got -1.0"),
        ("lr: {low: 1, high: 2, lg: 3}", "lr: lg: a range has no such key; did you mean 'log'?"),
        ("lr: {low: 1, high: 2, log: true, step: 1}", "lr: log and step do not go together"),
        ("lr: {low: -1, high: 2}", "lr: must be at least 0.0, got -1.0"),
        ("keep: {low: 1.5, high: 2}", "keep: low: expected a whole number, got '1.5'"),
        ("optimizer: {low: 1, high: 2}", "optimizer: takes no range of numbers; give a list"),
        ("preset: {low: 1, high: 2}", "preset: takes no range of numbers; give a list"),
        ("preset: [demo, dmo]", "preset: dmo: no preset is called that; did you mean 'demo'?"),
        ("run-dir: [a, b]", "run-dir: every trial has a folder of its own inside the sweep's"),
        ("optimizer: [sgd, sdg]", "optimizer: no choice is called 'sdg'; did you mean 'sgd'?"),
    ],
)
def test_a_mistake_in_what_is_searched_is_told_with_its_line(tmp_path, dimension, problem):
    (told,) = refused(tmp_path, f"trials: 2\nsearch:\n  {dimension}\n")
    assert told.startswith(f"3: {problem}")


def test_a_grid_wants_points(tmp_path):
    text = "method: grid\nsearch:\n  lr: {low: 0.1, high: 0.2}\n"
    assert refused(tmp_path, text) == ["3: lr: a grid needs points; add step:, or give a list"]


def test_values_that_do_not_go_together_are_found_before_anything_runs(tmp_path):
    text = "search:\n  mixup-alpha: [0, 0.2]\n  batch-size: [8, 1]\nmethod: grid\n"
    (told,) = refused(tmp_path, text)
    assert told.startswith("3: batch-size: mixup takes partners from the same micro-batch")


def test_a_preset_that_finetunes_wants_its_weights(tmp_path):
    [problem] = refused(tmp_path, f"preset: finetune-resnet50\n{GOOD}")
    assert "finetune-resnet50: finetunes weights, and none are named" in problem


def test_a_preset_is_fixed_or_searched(tmp_path):
    text = "preset: demo\nsearch: {preset: [demo, mnist-resnet8]}\nmethod: grid\n"
    assert refused(tmp_path, text) == ["1: preset: is searched too; leave it out here, or there"]


def test_all_problems_are_told_together_in_the_order_of_the_file(tmp_path):
    text = WIDE.replace("epochs: 4", "epochs: few, lrr: 3").replace("high: 0.6", "high: 0.01")
    told = refused(tmp_path, text + "goal: best\n")
    assert [line.partition(":")[0] for line in told] == ["3", "3", "5", "9"]


def test_a_file_that_is_no_yaml_is_refused(tmp_path):
    (told,) = refused(tmp_path, "search: {lr: [0.1\n")
    assert "not valid YAML" in told


def test_mistakes_are_told_without_torch_and_without_optuna(tmp_path):
    path = write_sweep(tmp_path, GOOD + "options: {epochs: -1}\n")
    code = (
        "import sys; from phalanx.cli.main import main; "
        f"assert main(['sweep', {str(path)!r}]) == 2 and main(['sweep', '--help']) == 0; "
        "print([name for name in ('torch', 'optuna', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("[]\n"), done.stderr
