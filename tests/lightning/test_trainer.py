"""phalanx.lightning.Module and DataModule under a Trainer of somebody's own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

import phalanx.lightning
from phalanx.cli.main import main
from phalanx.errors import CheckpointError, ConfigError
from phalanx.lightning.optimizer import add_decays
from phalanx.lightning.package import import_lightning
from phalanx.lightning.recipe import Recipe
from phalanx.optim.build import OptimSettings, build_optimizer
from small_runs import read_result, small_run

pl = import_lightning()
pytestmark = pytest.mark.filterwarnings("ignore::Warning:(pytorch_)?lightning")
RECIPE = {
    "image_size": 12, "batch_size": 16, "lr": 0.05, "warmup_epoch": "1st", "weight_decay": 1e-3,
    "l2_regularization": 1e-3, "mixup_alpha": 0.2, "label_smoothing": 0.1, "clip_grad_norm": 0.5,
    "valid_batch_size": 16, "norm_bias_lr_scale": 2,
}  # fmt: skip


def build_options(digits: Path) -> dict[str, object]:
    return {"data": "mnist", "data_dir": str(digits), **RECIPE}


def build_pair(digits: Path, **more: object) -> tuple[object, object]:
    options = {**build_options(digits), **more}
    return phalanx.lightning.Module(**options), phalanx.lightning.DataModule(**options)


def build_trainer(**more: object) -> object:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **more})


def train_natively(digits: Path, run: Path, **more: object) -> Path:
    """A run of `phalanx train` with the same recipe, in whole steps as a Trainer has them."""
    assert main(small_run(digits, run, **{**RECIPE, "epoch_tail": "drop", **more})) == 0
    return run


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "weights.safetensors")


class Positions(pl.Callback):
    """Notes the positions of the training images, by epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, list[int]] = {}
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        own = self.epochs.setdefault(trainer.current_epoch, [])
        own += range(batch.first, batch.first + len(batch.labels))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_one_process_trains_and_scores_to_the_bits_of_our_own_loop(digits, tmp_path):
    module, data = build_pair(digits)
    positions = Positions()
    trainer = build_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[positions])
    trainer.fit(module, data)
    run = train_natively(digits, tmp_path / "run", epochs=2, gradient_accumulation=2)
    expected, found = read_weights(run), module.model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    score = read_result(run)
    assert trainer.callback_metrics["val_images"] == score["scored"] == 40
    assert float(trainer.callback_metrics["val_top1"]) == pytest.approx(score["top1"], abs=1e-6)
    assert positions.epochs == {0: [*range(96)], 1: [*range(96, 192)]}
    plan = phalanx.plan(
        **build_options(digits), epochs=2, gradient_accumulation=2, epoch_tail="drop"
    )
    assert positions.rates == [plan.lr(batch // 2) for batch in range(12)]


def test_a_checkpoint_of_lightnings_continues_in_the_middle_of_an_epoch(digits, tmp_path):
    module, data = build_pair(digits, batch_size=20)
    build_trainer(max_epochs=2).fit(module, data)
    whole = module.model.state_dict()

    first, data = build_pair(digits, batch_size=20)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)
    trainer = build_trainer(
        max_epochs=2, enable_checkpointing=True, callbacks=[saving], limit_val_batches=0
    )
    trainer.fit(first, data)
    (checkpoint,) = tmp_path.glob("*step=6.ckpt")

    second, data = build_pair(digits, batch_size=20)
    positions = Positions()
    trainer = build_trainer(max_epochs=2, callbacks=[positions])
    trainer.fit(second, data, ckpt_path=checkpoint)
    assert positions.epochs == {1: [*range(96 + 2 * 20, 96 + 80)]}  # 16 images fill no step
    for name, tensor in whole.items():
        assert torch.equal(second.model.state_dict()[name], tensor), name
    loaded = phalanx.lightning.Module.load_from_checkpoint(checkpoint)
    assert loaded.hparams["label_smoothing"] == 0.1


def test_data_is_decoded_beside_training_where_the_trainer_starts_cuda(digits, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # restored afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    phalanx.lightning.DataModule(**build_options(digits))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_images_and_labels_of_other_data_train_too(digits):
    module, _ = build_pair(digits, dropout_rate=0.5)
    pairs = TensorDataset(torch.randn(24, 3, 12, 12), torch.arange(24) % 10)
    trainer = build_trainer(max_epochs=2)
    trainer.fit(module, DataLoader(pairs, 8), DataLoader(pairs, 5))
    assert trainer.callback_metrics["val_images"] == 24


def test_training_starts_from_the_weights_that_are_named(digits, tmp_path):
    module, _ = build_pair(digits, seed=7)
    file = tmp_path / "first.safetensors"
    save_file({name: t.contiguous() for name, t in module.model.state_dict().items()}, file)
    started, _ = build_pair(digits, init_weights=file)
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(started.model.state_dict()[name], tensor), name
    trainer = build_trainer()
    trainer.strategy.connect(started)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"first\.safetensors: no such file"):
        phalanx.lightning.Module(**build_options(digits), init_weights=str(file))
    # a checkpoint has weights of its own
    loaded = phalanx.lightning.Module.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert loaded.hparams == started.hparams


class Failing(pl.Callback):
    """Ends the training in its second batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
def test_data_is_closed_after_a_failure_and_serves_the_next_trainer(digits, error):
    module, data = build_pair(digits)
    with pytest.raises((type(error), SystemExit)):
        build_trainer(max_epochs=1, callbacks=[Failing(error)]).fit(module, data)
    assert data._feed is None
    positions = Positions()
    trainer = build_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[positions])
    trainer.fit(module, data)
    assert positions.epochs == {0: [*range(64)]}  # a step of 4 batches; 32 images fill none


def test_data_that_is_still_open_is_opened_anew(digits):
    _, data = build_pair(digits)
    for accumulation, batches in ((1, 6), (4, 4)):
        data.trainer = build_trainer(max_epochs=1, accumulate_grad_batches=accumulation)
        data.setup("fit")
        assert len(data.train_dataloader()) == batches
    data.teardown("fit")


@pytest.mark.parametrize("epoch", [0, 1])
def test_accumulation_that_changes_is_refused(digits, epoch):
    scheduler = pl.callbacks.GradientAccumulationScheduler({epoch: 2})
    module, data = build_pair(digits)
    words = r"accumulates 2 batches .* with 1: .* Trainer\(accumulate_grad_batches=2\)"
    with pytest.raises(ConfigError, match=words):
        build_trainer(max_epochs=2, callbacks=[scheduler]).fit(module, data)


def write_preset(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(f"extends: mnist-resnet8\n{text}\n")
    return str(path)


def test_a_preset_that_averages_checkpoints_is_refused(digits, tmp_path):
    preset = write_preset(tmp_path, "weight-avg-strategy: mean")
    words = "weight-avg-strategy mean, which this preset has, .* the callback WeightAveraging"
    with pytest.raises(ConfigError, match=words):
        phalanx.lightning.Module(preset, **build_options(digits))


def test_weights_in_16_bits_are_not_dropped_silently(digits, tmp_path):
    preset = write_preset(tmp_path, 'precision: "16.16"')
    with pytest.warns(
        UserWarning, match=r"precision 16\.16, which this preset has.*32 bits"
    ) as told:
        module = phalanx.lightning.Module(preset, **build_options(digits))
    assert told[0].filename == __file__
    assert module.model.state_dict()["fc.weight"].dtype == torch.float32


@pytest.mark.parametrize("stages", ["pipeline-splits: layer2/0", "shards: 2", "shards: 1"])
def test_a_preset_with_stages_trains_as_a_whole(digits, tmp_path, stages):
    preset = write_preset(tmp_path, f"pipeline: true\n{stages}")
    assert Recipe(preset, build_options(digits)).plan.pipeline is None


@pytest.mark.parametrize(
    ("launched", "given", "workers"), [(False, "", 4), (True, "", 4), (False, "workers: 6", 6)]
)
def test_each_process_has_its_share_of_the_workers(tmp_path, monkeypatch, launched, given, workers):
    monkeypatch.setattr(sys.modules["phalanx.plan.world"], "count_cores", lambda: 16)
    if launched:
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}
        for name, value in {**world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1234}.items():
            monkeypatch.setenv(name, str(value))
    options = {"data": "generated", "image_size": 12, "batch_size": 2, "iterations": 1}
    recipe = Recipe(write_preset(tmp_path, given), options)
    trainer = SimpleNamespace(
        world_size=4, num_nodes=1, global_rank=0, accumulate_grad_batches=1, max_steps=4
    )
    assert recipe.fit_to_trainer(trainer).plan.workers == workers


def test_model_and_data_must_have_the_same_options(digits):
    module, _ = build_pair(digits)
    _, data = build_pair(digits, batch_size=4)
    with pytest.raises(ConfigError, match="batch-size: the Module has 16, the DataModule 4; give"):
        build_trainer(max_epochs=1).fit(module, data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 2}, r"epochs: under a Trainer of your own, use Trainer\(max_epochs"),
        ({"replicas": 2, "precision": "16.32"}, "2 problems:\n.*devices=.*\n.*precision="),
        ({"ema_decay": 0.9}, "ema-decay: .*use the callback EMAWeightAveraging"),
        ({"pipeline": True}, "pipeline: has no effect under a Trainer of your own; leave it out"),
        (
            {"epoch_tail": "carry"},
            "of your own, leave it out; a Trainer's epoch has whole steps, as with drop",
        ),
        ({"weight_avg_strategy": "mean"}, "of your own, use the callback WeightAveraging"),
        ({"data_dir": b"digits"}, "data_dir: expected text, not bytes"),
        (
            {"model": "airbench94", "image_size": 32},
            "airbench94: its first layer is made from training images",
        ),
        ({"labelsmoothing": 0.1}, "label-smoothing"),
    ],
)
def test_what_the_trainer_decides_is_refused(digits, options, words):
    with pytest.raises(ConfigError, match=words):
        phalanx.lightning.Module(**{**build_options(digits), **options})


def test_a_schedule_needs_an_end(digits):
    module, data = build_pair(digits)
    with pytest.raises(ConfigError, match="the schedule of the learning rate needs an end"):
        build_trainer(max_epochs=-1).fit(module, data)


def test_a_step_that_a_loss_scale_skips_decays_nothing():
    model = torch.nn.Linear(2, 2)
    settings = OptimSettings(momentum=0.0, weight_decay=0.5)
    optimizer = add_decays(build_optimizer(model, settings))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for factor in (float("inf"), 1.0):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = before if factor != 1.0 else before * (1 - 0.1 * 0.5) - 0.1
        torch.testing.assert_close(model.weight.detach(), moved)


def test_the_package_that_is_imported_already_is_taken(monkeypatch):
    other = ModuleType("lightning.pytorch")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", other)
    assert import_lightning() is other


DDP = r"""
import json, sys
import torch
import pytorch_lightning as pl
import phalanx.lightning

class Images(pl.Callback):
    def __init__(self):
        self.positions, self.indices = [], []
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.positions += range(batch.first, batch.first + len(batch.labels))
    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.indices += batch.indices.tolist()

if __name__ == "__main__":
    options, folder = json.loads(sys.argv[1]), sys.argv[2]
    module = phalanx.lightning.Module(**options)
    data = phalanx.lightning.DataModule(**options)
    images = Images()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[images],
    )
    trainer.fit(module, data)
    found = {"positions": images.positions, "indices": images.indices,
             "val_images": float(trainer.callback_metrics["val_images"])}
    with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
        json.dump(found, file)
    torch.save(module.model.state_dict(), f"{folder}/{trainer.global_rank}.pt")
"""


@pytest.mark.slow
def test_two_processes_of_ddp_share_every_image_and_train_as_two_replicas(digits, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DDP)
    options = {**build_options(digits), "clip_grad_norm": 0.0}
    done = subprocess.run(
        [sys.executable, script, json.dumps(options), tmp_path],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(found[0]["positions"] + found[1]["positions"]) == [*range(96)]
    scored = [index for index in found[0]["indices"] + found[1]["indices"] if index >= 0]
    assert sorted(scored) == [*range(40)]
    assert len(found[0]["indices"]) == len(found[1]["indices"])  # padded: 3 batches for two
    assert [one["val_images"] for one in found] == [40.0, 40.0]
    weights = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    run = train_natively(digits, tmp_path / "run", epochs=1, replicas=2, clip_grad_norm=0)
    for name, tensor in read_weights(run).items():
        if "running" in name or "num_batches" in name:
            continue  # a replica of ours keeps its own, DDP those of its first process
        assert torch.equal(weights[0][name], weights[1][name]), name
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-4, atol=1e-5)
