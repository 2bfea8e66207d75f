"""What a tracker is told of a run before its first step."""

from phalanx.report.folder import create_run
from phalanx.trackers.tracker import load_state, read_run_facts


def test_hyperparameters_are_what_was_set_and_a_trial_belongs_to_its_sweep(tmp_path):
    origins = {"lr": "flag", "momentum": "preset demo", "run-dir": "flag", "wandb": "flag"}
    text = "lr: 0.1\nmomentum: 0.9\nseed: 1\nrun-dir: here\nwandb: true\n"
    facts = {"origins": origins, "command": "phalanx train --lr 0.1"}
    run = create_run(tmp_path / "rates" / "trial-000", config_text=text, facts=facts)
    alone = read_run_facts(run)
    assert (alone.name, alone.group) == ("trial-000", None)
    assert alone.chosen == {"lr": 0.1, "momentum": 0.9}
    assert alone.describe() == {"run_folder": str(run.path), "command": "phalanx train --lr 0.1"}
    (tmp_path / "rates/sweep.json").write_text("{}")
    assert read_run_facts(run).group == "rates"


def test_a_damaged_state_is_an_empty_one(tmp_path):
    run = create_run(tmp_path / "run", config_text="seed: 1\n", facts={})
    state = load_state(run, "wandb")
    state.last_steps["train"], state.facts["id"] = 7, "abc"
    state.save()
    again = load_state(run, "wandb")
    assert (again.last_steps, again.facts) == ({"train": 7}, {"id": "abc"})
    for damage in ("", "[1]", "null", '{"told": 3}', '{"told": {"train": "x"}}', "{}"):
        state.path.write_text(damage)
        again = load_state(run, "wandb")
        assert (again.last_steps, again.facts) == ({}, {}), damage
