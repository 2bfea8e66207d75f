"""What `phalanx plan` says is what the run does."""

import json
import re

import pytest

from phalanx.assemble.blackbox import loss_scale_at
from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.session import Session
from phalanx.cli.main import main
from phalanx.config.read import read_settings

pytestmark = pytest.mark.usefixtures("empty_folder")

QUICK = ("--no-memory", "--device", "cpu")
FLOAT16 = ("--precision", "16.16", "--half-type", "float16", "--auto-loss-scaling")


@pytest.fixture
def told(capsys):
    """The rows of a plan of the demo by their names."""

    def read(*words: str) -> dict[str, str]:
        assert main(["plan", "demo", *QUICK, *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:14].strip(): line[14:] for line in lines}

    return read


@pytest.fixture
def as_json(capsys):
    """The JSON of a plan of the demo."""

    def read(*words: str) -> dict:
        assert main(["plan", "demo", *QUICK, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return read


@pytest.mark.parametrize(("words", "first"), [((), 65536), (("--loss-scaling", "128"), 128)])
def test_an_automatic_loss_scale_is_the_one_the_run_begins_with(told, as_json, words, first):
    rows = told(*FLOAT16, *words, "--at", "0")
    assert rows["after step"].endswith(f"loss scale automatic, from {first}")
    assert rows["update"].endswith(f"loss scale automatic, from {first}")
    found = as_json(*FLOAT16, *words, "--at", "0,9")
    for point in found["at"]:
        assert (point["loss_scale"], point["automatic"]) == (first, True)
    plan = found["plan"]
    assert (plan["loss_scale"], plan["loss_scale_automatic"]) == (first, True)
    flags = dict(zip(words[::2], words[1::2], strict=True))
    flags = {name.removeprefix("--"): value for name, value in flags.items()}
    flags |= {"precision": "16.16", "half-type": "float16", "auto-loss-scaling": "true"}
    settings = read_settings("demo", {**flags, "device": "cpu"})
    begun = plan_run(settings)[0]
    state = Session(settings.config, begun).state
    assert state.scaler is not None and state.scaler.scale == first
    assert loss_scale_at(1, begun, state.scaler) == first, "and a replay of its first step has it"


def test_a_loss_scale_that_is_planned_is_not_called_automatic(told, as_json):
    assert told("--loss-scaling", "8", "--at", "0")["after step"].endswith("loss scale 8")
    found = as_json("--at", "0")
    assert found["at"][0]["automatic"] is found["plan"]["loss_scale_automatic"] is False


def test_a_step_beyond_the_end_is_noted(told, as_json):
    end = "the run ends after 1,000 steps"
    assert told("--at", "1001")["after step"].endswith(f", loss scale 1; {end}")
    assert told("--at", "1000")["after step"].endswith(", loss scale 1")
    assert as_json("--at", "9,1001")["notes"][-1] == f"--at 1001: {end}"


def test_scores_after_training_are_counted_with_the_checkpoints(told, as_json):
    rows = told("--validation-mode", "after", "--ckpts-per-epoch", "1/2", "--keep", "3")
    assert rows["evaluations"] == "4, when training is over, batches of 250"
    expected = "4, all kept until they are scored, then the newest 3 and the best"
    assert rows["checkpoints"] == expected
    plan = as_json("--validation-mode", "after", "--ckpts-per-epoch", "1/2")["plan"]
    assert plan["evaluate_points"] == plan["save_points"] == 4


def test_there_is_no_best_checkpoint_where_nothing_is_scored(told, as_json):
    assert told()["checkpoints"] == "8, the newest 2 and the best kept"
    for words in (("--validation", "false"), ("--validation-mode", "none")):
        rows = told(*words)
        assert rows["evaluations"] == "0"
        assert rows["checkpoints"] == "8, the newest 2 kept"
        assert as_json(*words)["plan"]["evaluate_points"] == 0
    assert told("--keep", "9")["checkpoints"] == "8, all kept"
    assert told("--ckpts-per-epoch", "0")["checkpoints"] == "0"


def test_notes_are_in_the_json(told, as_json):
    words = ("--trust-decay", "0.1")
    assert as_json()["notes"] == []
    (note,) = as_json(*words)["notes"]
    assert note.startswith("--trust-decay has no effect") and told(*words)["note"] == note


def test_one_is_not_counted_as_many(told):
    assert told("--epochs", "1")["length"] == "125 steps = 1 epoch of 125 steps"
    rows = told("--steps", "1", "--batch-size", "8000", "--warmup-epoch", "1st")
    assert rows["length"] == "1 step = 1 epoch of 1 step"
    assert rows["learning rate"].endswith("warm-up 1 step")
    assert told("--epochs", "2.5")["length"].startswith("312 steps = 2.496 epochs of")


def test_the_demo_may_be_as_short_as_one_likes(told, as_json):
    assert as_json()["plan"]["warmup_steps"] == 10, "the same steps as ever"
    for steps, warmup in {"1": "0 steps", "5": "1 step", "9": "1 step"}.items():
        assert told("--steps", steps)["learning rate"].endswith(f"warm-up {warmup}")


SIZE = re.compile(r"(?:^|, |; |: )(less |peak |[a-z ]*?)([\d.]+) (B|[KMG]iB)")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.mark.parametrize("words", [(), ("--batch-size", "2"), ("--ema-decay", "0.9")])
def test_the_parts_of_the_memory_add_up(capsys, words):
    assert main(["plan", "demo", "--device", "cpu", *words]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    found = [(name, float(size) * UNITS[unit]) for name, size, unit in SIZE.findall(row[14:])]
    (first, peak), *parts = found
    assert first == "peak " and len(parts) >= 5
    total = sum(-size if name == "less " else size for name, size in parts)
    assert total == pytest.approx(peak, rel=0.03), row  # rounded


@pytest.mark.parametrize(("threads", "row"), [(1, "cpu, 32.32, 1 thread"), (3, "3 threads")])
def test_a_plan_says_how_many_threads_a_process_has(told, as_json, threads, row):
    words = ("--threads", str(threads), "--precision", "32.32")
    assert told(*words)["device"].endswith(row)
    assert as_json(*words)["plan"]["threads"] == threads
