"""--validation-device: a device that scores while another one trains."""

import pytest
import torch

from phalanx.assemble import torch_setup
from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.scoring_target import read_checkpoint
from phalanx.assemble.session import Session
from phalanx.assemble.torch_setup import find_scoring_device
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from small_runs import small_run

CONFIG = 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    """A run whose validation device is the one that trains."""
    run = tmp_path_factory.mktemp("device") / "run"
    assert main(small_run(digits, run, epochs=1, validation_device="cpu")) == 0
    return run


def test_the_device_that_trains_changes_nothing(run, digits, tmp_path):
    assert main(small_run(digits, tmp_path / "run", epochs=1)) == 0
    for name in ("validation.csv", "predictions.csv", "metrics.jsonl"):
        assert (run / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert "note: --validation-device cpu has no effect: that is" in (run / "log.txt").read_text()


def test_another_device_gives_the_same_score_at_every_step(digits):
    flags = {"data": "mnist", "data-dir": str(digits), "image-size": "12", "batch-size": "16"}
    settings = read_settings(None, {**flags, "model": "resnet8", "device": "cpu", "steps": "3"})
    plan, _ = plan_run(settings)
    with Session(settings.config, plan) as session:
        for passes in session.feed.batches_from(0):
            session.train_step(passes, 0.1)
            here = session.evaluate(session.feed.validation_batches())
            session.scoring_device = torch.device("cpu", 0)  # for torch, not the same as cpu
            before = session.model.state_dict(keep_vars=True)
            there = session.evaluate(session.valid_feed.validation_batches())
            session.scoring_device = CPU
            assert session.valid_feed is not session.feed
            assert here.losses.tolist() == there.losses.tolist() and here.scored == 40
            after = session.model.state_dict(keep_vars=True)
            assert all(after[name] is tensor for name, tensor in before.items())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gpu", "--validation-device: expected "),
        ("cuda", "--validation-device: torch finds no CUDA device here; use --validation-device"),
        ("cuda:1", "--validation-device: torch finds no CUDA device here; use --validation-device"),
        ("mps", "--validation-device: torch finds no mps device here; use --validation-device cpu"),
    ],
)
def test_a_device_that_is_not_here_is_refused(digits, tmp_path, capsys, monkeypatch, name, told):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(small_run(digits, tmp_path / "run", validation_device=name)) == CONFIG
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cuda:3", ["cuda:3", "cuda:3", "cuda:3"]),
        ("cuda:2,3", ["cuda:2", "cuda:3", "cuda:2"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"]),
        ("cpu", ["cpu", "cpu", "cpu"]),
    ],
)
def test_ranks_take_turns_with_the_devices_that_score(monkeypatch, name, found):
    monkeypatch.setattr(torch_setup, "_open_device", lambda name, flag: torch.device(name))
    config = read_settings("demo", {"validation-device": name}).config
    for rank, expected in enumerate(found):
        own = torch.device("cuda", rank)
        device = find_scoring_device(config, own, local_rank=rank)
        assert str(device) == expected and (device is own) == (str(own) == expected)


def test_a_stored_validation_device_is_not_where_a_checkpoint_is_scored(run):
    settings = read_checkpoint(run, {"device": "cpu"}).settings
    assert settings.origins["validation-device"] == "run"
    assert settings.config.machine.validation_device is None
