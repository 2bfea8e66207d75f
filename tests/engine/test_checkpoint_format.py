"""What lies in a checkpoint: one layout for any number of replicas, format 1, and what it costs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from phalanx.assemble.fork import prepare_fork
from phalanx.assemble.session import Session
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant
from phalanx.cli.main import main
from phalanx.engine.checkpoint import CheckpointSaver, load_checkpoint
from phalanx.engine.checkpoint_store import (
    REPLICAS,
    list_checkpoints,
    read_files,
    write_checkpoint_as,
)
from phalanx.engine.consensus import Consensus
from phalanx.engine.state import TrainState, hash_weights
from phalanx.engine.tensor_bytes import iterate_safetensors
from phalanx.errors import CheckpointError

FORMAT_1 = Path(__file__).with_name("format_1")  # a run of the release of commit 80d9dec
ONE_REPLICA = {"manifest.json", "facts.json", "weights.safetensors", "optimizer.safetensors"}
STATISTICS, COUNTER = ("running_mean", "running_var"), "num_batches_tracked"
KINDS = "bool uint8 int8 float8_e5m2 float8_e4m3fn int16 uint16 float16 bfloat16 int32 uint32 "
KINDS += "float32 complex64 float64 int64 uint64"


def build_mini(num_classes: int) -> nn.Module:
    """A network with a batch norm whose checkpoint is a few kilobytes."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


# --- files ---


@pytest.mark.parametrize("metadata", [None, {"norm-layout": "contiguous"}])
def test_tensors_are_written_as_the_library_writes_them(metadata):
    tensors = {
        f'{number % 3}/{name} "é\n': torch.arange(1, 7).reshape(2, 3).to(getattr(torch, name))
        for number, name in enumerate(KINDS.split())
    }
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(3), "half": torch.ones(1).half()}
    for some in (tensors, {}):
        assert b"".join(iterate_safetensors(some, metadata)) == save(some, metadata)


def test_a_tensor_need_not_lie_in_order():
    image = torch.randn(2, 3, 4, 5, requires_grad=True).to(memory_format=torch.channels_last)
    expected = save({"image": image.detach().contiguous()})
    assert b"".join(iterate_safetensors({"image": image})) == expected
    for tensor in (image, torch.arange(6)[::2], torch.ones(1).expand(3)):
        assert hash_weights({"a": tensor}) == hash_weights({"a": tensor.contiguous()})


PEAK = """
import re, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from phalanx.engine.checkpoint import CheckpointSaver
from phalanx.engine.consensus import Consensus
from phalanx.engine.state import TrainState

def read_mib(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

model = torch.nn.Linear(1, 1, bias=False)
model.weight = torch.nn.Parameter(torch.ones(48, 1 << 18))  # 48 MiB
momentum = {"momentum_buffer": torch.ones(48, 1 << 18)}
optimizer = SimpleNamespace(state={model.weight: momentum})  # torch.optim takes a second to import
facts = {"norm_layout": "contiguous"}
saver = CheckpointSaver(Path(sys.argv[1]), keep=1, run_facts=facts, consensus=Consensus())
before = read_mib("VmRSS")
saver.save(TrainState(model, optimizer))
saver.wait()
print(read_mib("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_save_needs_the_memory_of_its_snapshot_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True
    )
    assert 96 <= int(done.stdout) < 96 + 36  # another copy of either file has 48


# --- replicas ---


class StandIn:
    """Running statistics of two replicas."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replicas = [self.own(), self.own()]

    def own(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}/{name}": t for i, one in enumerate(self.replicas) for name, t in one.items()}

    def load(self, tensors: Mapping[str, Tensor] | None, *, where: str) -> None:
        for number, replica in enumerate(self.replicas):
            for name, own in self.own().items():
                replica[name] = own if tensors is None else tensors[f"{number}/{name}"].clone()


def build_state(*, replicas: bool) -> TrainState:
    torch.manual_seed(0)
    model = build_mini(10)
    state = TrainState(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    state.replica_statistics = StandIn(model) if replicas else None
    return state


def save_checkpoint(state: TrainState, folder: Path) -> Path:
    facts = {"run": "x", "norm_layout": "contiguous"}
    saver = CheckpointSaver(folder, keep=2, run_facts=facts, consensus=Consensus())
    saver.save(state)
    saver.wait()
    return list_checkpoints(folder)[-1]


def list_names(checkpoint: Path) -> set[str]:
    return {path.name for path in checkpoint.iterdir()}


def test_every_replicas_statistics_come_back(tmp_path):
    state = build_state(replicas=True)
    for number, replica in enumerate(state.replica_statistics.replicas):
        replica["1.running_mean"] += 0.1 * (number + 1)
        replica["1.num_batches_tracked"] += number
    before = {name: tensor.clone() for name, tensor in state.replica_statistics.tensors().items()}
    checkpoint = save_checkpoint(state, tmp_path)
    assert list_names(checkpoint) == {*ONE_REPLICA, "replicas.safetensors"}
    other = build_state(replicas=True)
    load_checkpoint(other, checkpoint)
    after = other.replica_statistics.tensors()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    alone = build_state(replicas=False)
    load_checkpoint(alone, checkpoint)
    assert hash_weights(alone.model.state_dict()) == hash_weights(state.model.state_dict())


def test_replicas_begin_with_the_models_statistics_where_there_are_none(tmp_path):
    state = build_state(replicas=False)
    state.model[1].running_mean += 7
    checkpoint = save_checkpoint(state, tmp_path)
    assert list_names(checkpoint) == ONE_REPLICA
    other = build_state(replicas=True)
    load_checkpoint(other, checkpoint)
    for replica in other.replica_statistics.replicas:
        assert replica["1.running_mean"].tolist() == [7] * 4


@pytest.mark.parametrize(
    "content", [b"no tensors", save({"0/other": torch.ones(1)})], ids=["bytes", "others"]
)
def test_statistics_that_are_none(content, tmp_path):
    checkpoint = save_checkpoint(build_state(replicas=True), tmp_path)
    files = {**read_files(checkpoint), REPLICAS: content}
    write_checkpoint_as(tmp_path, checkpoint.name, files)
    with pytest.raises(CheckpointError, match=r"replicas.safetensors: is damaged, or was not"):
        load_checkpoint(build_state(replicas=True), checkpoint)


# --- format 1 ---


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A run of an earlier release that has stopped after 3 of 6 steps."""
    mini = OwnVariant(image_size=12, classes=10, build=f"{__name__}:build_mini", head="5")
    monkeypatch.setitem(MODELS, "mini", mini)
    return shutil.copytree(FORMAT_1, tmp_path / "run")


def read_manifest(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "manifest.json").read_bytes())


def test_a_run_of_format_1_is_scored_averaged_forked_and_resumed(old, digits, tmp_path, capsys):
    where = ["--data-dir", str(digits)]
    newest = list_checkpoints(old / "checkpoints")[-1]
    assert read_manifest(newest)["format"] == 1
    assert main(["validate", str(old), *where]) == 0
    assert "step-00000003: top-1 10.00%" in capsys.readouterr().out
    assert main(["average", str(old), *where]) == 0
    average = old / "checkpoints" / "average"
    assert read_manifest(average)["format"] == 2
    assert list_names(average) == {*ONE_REPLICA, "average.safetensors"}
    fork = tmp_path / "fork"
    assert main(["train", "--fork", str(newest), "--run-dir", str(fork), "--epochs=2", *where]) == 0
    assert main(["train", "--resume", str(old), *where]) == 0
    assert "resumed at step 3" in capsys.readouterr().out
    for run in (old, fork):
        last = list_checkpoints(run / "checkpoints")[-1]
        assert (read_manifest(last)["format"], read_manifest(newest)["format"]) == (2, 1)


def test_the_state_in_format_1_is_restored_bit_for_bit(old):
    checkpoint = list_checkpoints(old / "checkpoints")[-1]
    state = build_state(replicas=True)
    load_checkpoint(state, checkpoint)
    facts = json.loads((checkpoint / "facts.json").read_bytes())
    assert hash_weights(state.model.state_dict()) == facts["weights_sha256"]
    buffers = {
        f"{name}:momentum_buffer": state.optimizer.state[weight]["momentum_buffer"]
        for name, weight in state.model.named_parameters()
    }
    stored = load_file(checkpoint / "optimizer.safetensors")
    assert hash_weights(buffers) == hash_weights(stored)
    for replica in state.replica_statistics.replicas:
        for name, statistic in state.model.named_buffers():
            assert torch.equal(replica[name], statistic)


def test_replicas_of_a_fork_begin_with_the_statistics_in_format_1(old, digits, tmp_path):
    checkpoint = list_checkpoints(old / "checkpoints")[-1]
    flags = {"replicas": "2", "run-dir": str(tmp_path / "fork"), "data-dir": str(digits)}
    prepared = prepare_fork(checkpoint, {**flags, "epochs": "3"}, line="")
    with Session(prepared.config, prepared.plan, start=prepared.start) as session:
        session.state.load_mean_statistics()
        assert session.state.replica_statistics is not None
        found = session.state.replica_statistics.tensors()
    stored = load_file(checkpoint / "weights.safetensors")
    average = load_file(checkpoint / "average.safetensors")
    assert hash_weights(session.model.state_dict()) == hash_weights(stored)
    assert set(found) == {
        *(f"{replica}/1.{name}" for replica in "01" for name in (*STATISTICS, COUNTER)),
        *(f"average/{replica}/1.{name}" for replica in "01" for name in STATISTICS),
    }
    for name, statistic in found.items():
        *averaged, _, own = name.split("/")
        assert torch.equal(statistic, (average if averaged else stored)[own]), name


def test_an_average_has_no_statistics_of_single_replicas(old, digits):
    newest = list_checkpoints(old / "checkpoints")[-1]
    files = {**read_files(newest), REPLICAS: save({"0/1.running_mean": torch.ones(4)})}
    write_checkpoint_as(newest.parent, newest.name, files)
    assert main(["average", str(old), "--data-dir", str(digits)]) == 0
    average = newest.with_name("average")
    assert list_names(average) == {*ONE_REPLICA, "average.safetensors"}
