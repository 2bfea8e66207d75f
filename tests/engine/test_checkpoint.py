"""A checkpoint is whole or absent, and says what is wrong with it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from phalanx.catalog.models import MODELS
from phalanx.cli.main import main
from phalanx.engine.checkpoint import CheckpointSaver, load_checkpoint, take_snapshot
from phalanx.engine.checkpoint_store import (
    FORMAT,
    WEIGHTS,
    choose_best_step,
    find_newest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_facts,
    read_files,
    remove_leftovers,
    write_checkpoint,
)
from phalanx.engine.consensus import Consensus
from phalanx.engine.state import TrainState, hash_weights
from phalanx.errors import CheckpointError, DiskError, DivergedError
from phalanx.models.build import build_model, initialise_weights
from phalanx.optim.build import OptimSettings, build_optimizer
from phalanx.optim.update import update_weights
from small_runs import read_result, run_phalanx, small_run

FILES = {"facts.json": b"{}", "weights.safetensors": b"w" * 100}


def small_state(seed: int = 0) -> TrainState:
    model = build_model(MODELS["resnet8"], num_classes=10)
    initialise_weights(model, seed, zero_residual=False)
    model = model.to(memory_format=torch.channels_last)
    return TrainState(model, build_optimizer(model, OptimSettings(momentum=0.9, weight_decay=1e-3)))


def train_a_little(state: TrainState, steps: int) -> None:
    generator = torch.Generator().manual_seed(state.step)
    for _ in range(steps):
        images = torch.randn(4, 3, 12, 12, generator=generator)
        state.model(images).square().mean().backward()
        update_weights(state.optimizer, 0.1)
        state.step += 1
        generator.manual_seed(state.step)


def test_a_restored_state_trains_on_bit_for_bit(tmp_path):
    straight = small_state()
    train_a_little(straight, 3)
    straight.scores[3] = 0.5
    saver = CheckpointSaver(
        tmp_path, keep=2, run_facts={"run": "x", "norm_layout": "contiguous"}, consensus=Consensus()
    )
    saver.save(straight)
    saver.wait()
    train_a_little(straight, 3)
    other = small_state(seed=9)
    load_checkpoint(other, find_newest_checkpoint(tmp_path))
    assert (other.step, other.scores) == (3, {3: 0.5})
    train_a_little(other, 3)
    assert hash_weights(straight.model.state_dict()) == hash_weights(other.model.state_dict())
    for weight, twin in zip(straight.model.parameters(), other.model.parameters(), strict=True):
        left = straight.optimizer.state[weight]["momentum_buffer"]
        right = other.optimizer.state[twin]["momentum_buffer"]
        assert torch.equal(left, right)
        assert left.stride() == right.stride()  # fused updates walk both as flat memory


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, number, monkeypatch):
    monkeypatch.setattr("phalanx.engine.checkpoint._PIECE", 100)  # the number is in the second
    state = small_state()
    saver = CheckpointSaver(
        tmp_path, keep=2, run_facts={"run": "x", "norm_layout": "contiguous"}, consensus=Consensus()
    )
    saver.save(state)
    with torch.no_grad():
        state.model.fc.weight[3, 2] = number
    state.step = 7
    saver.save(state)
    with pytest.raises(DivergedError, match=r"step 7: fc.weight is no longer finite and was"):
        saver.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000000"]


def test_a_snapshot_is_not_touched_by_training():
    state = small_state()
    train_a_little(state, 1)
    snapshot = take_snapshot(state)
    before = hash_weights(snapshot.tensors[WEIGHTS])
    train_a_little(state, 1)
    assert hash_weights(snapshot.tensors[WEIGHTS]) == before
    assert hash_weights(state.model.state_dict()) != before


def test_the_hash_sees_name_dtype_shape_and_bytes():
    base = {"a": torch.zeros(2, 3)}
    others = [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.ones(2, 3)},
    ]
    assert len({hash_weights(tensors) for tensors in [base, *others]}) == 5
    assert hash_weights({"x": base["a"], "a": base["a"]}) == hash_weights(
        {"a": base["a"], "x": base["a"]}
    )


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 7):
        write_checkpoint(tmp_path, step, FILES)
    prune_checkpoints(tmp_path, keep=2, scores={1: 0.1, 2: 0.9, 3: 0.9, 6: 0.2})
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "5", "6"]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    assert choose_best_step(tmp_path, {5: 0.5}) == 5


@pytest.mark.parametrize("name", ["facts.json", "weights.safetensors"])
def test_truncated_tampered_and_missing_files_are_named(tmp_path, name):
    checkpoint = write_checkpoint(tmp_path, 1, {name: b"x" * 100, "other": b"y"})
    (checkpoint / name).write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match=f"{name}: 99 bytes where the manifest says 100"):
        read_files(checkpoint)
    (checkpoint / name).write_bytes(b"x" * 99 + b"z")
    with pytest.raises(CheckpointError, match=f"{name}: its contents were changed"):
        read_files(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: No such file"):
        read_files(checkpoint)


def test_a_newer_format_and_a_stranger_are_refused(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1, FILES)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format": FORMAT + 1}))
    with pytest.raises(CheckpointError, match="newer than this Phalanx reads"):
        read_files(checkpoint)
    (checkpoint / "manifest.json").write_text("not json")
    with pytest.raises(CheckpointError, match="damaged, or not written by Phalanx"):
        read_files(checkpoint)
    with pytest.raises(CheckpointError, match="not a Phalanx checkpoint"):
        read_files(tmp_path)


def test_a_checkpoint_that_its_run_deletes_in_the_meantime_is_told_as_such(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1, FILES)
    checkpoint.rename(tmp_path / ".gone-step-00000001")
    with pytest.raises(CheckpointError, match="was deleted in the meantime; a run that is still"):
        read_files(checkpoint)


def test_a_killed_write_leaves_nothing_that_counts(tmp_path):
    write_checkpoint(tmp_path, 1, FILES)
    for leftover in (".part-step-00000002", ".gone-step-00000000"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "weights.safetensors").write_bytes(b"half")
    (tmp_path / ".part-best").symlink_to("step-00000001")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from phalanx.engine.checkpoint_store import write_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
write_checkpoint(Path(sys.argv[1]), 2, {"weights.safetensors": b"w" * 20000})
"""


def test_a_write_that_fails_leaves_the_older_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 1, FILES)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "DiskError" in done.stderr and "step-00000002" in done.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert read_files(tmp_path / "step-00000001") == FILES


def test_a_write_that_does_not_read_back_is_loud(tmp_path, monkeypatch):

    def bad_disk(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        content = b"".join(pieces)
        path.write_bytes(content[:-1] + b"?" if path.name.startswith("weights") else content)

    write_checkpoint(tmp_path, 1, FILES)
    monkeypatch.setattr("phalanx.engine.checkpoint_store.write_synced", bad_disk)
    with pytest.raises(DiskError, match="does not read back"):
        write_checkpoint(tmp_path, 2, FILES)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_a_failed_background_save_is_raised_at_the_next_call(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    saver = CheckpointSaver(
        blocked, keep=1, run_facts={"norm_layout": "contiguous"}, consensus=Consensus()
    )
    saver.save(small_state())
    with pytest.raises(DiskError, match="--run-dir"):
        saver.wait()
    saver.wait()  # told once


def test_a_save_that_finds_no_thread_says_so_once(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    saver = CheckpointSaver(
        tmp_path, keep=1, run_facts={"norm_layout": "contiguous"}, consensus=Consensus()
    )
    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        saver.save(small_state())
    saver.wait()  # which has nothing to wait for


@pytest.fixture(scope="module")
def tiny_disk(tmp_path_factory):
    """A file system of 1.5 MB, where a second checkpoint does not fit."""
    place = tmp_path_factory.mktemp("tiny")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_space_left_is_told_and_the_older_checkpoint_survives(tiny_disk, digits):
    run = tiny_disk / "run"
    done = run_phalanx(*small_run(digits, run, epochs=20, keep=30))
    assert done.returncode == DiskError.exit_code, (done.stdout, done.stderr)
    assert "no space left" in done.stderr and "Traceback" not in done.stderr
    kept = list_checkpoints(run / "checkpoints")
    assert kept
    for checkpoint in kept:
        read_files(checkpoint)


def test_a_folder_that_cannot_be_written_is_told(digits):
    done = run_phalanx(*small_run(digits, Path("/proc/phalanx-run")))
    assert done.returncode == DiskError.exit_code
    assert "/proc/phalanx-run" in done.stderr and "Traceback" not in done.stderr


def test_resume_names_a_damaged_checkpoint_and_the_way_around(digits, tmp_path, capsys):
    run = tmp_path / "run"
    main(small_run(digits, run))
    weights = (run / "summary.json").read_text()
    newest = find_newest_checkpoint(run / "checkpoints")
    (newest / "weights.safetensors").write_bytes(b"torn")
    (run / "summary.json").unlink()
    assert main(["train", "--resume", str(run)]) == CheckpointError.exit_code
    message = capsys.readouterr().err
    assert "weights.safetensors" in message and f"Remove {newest}" in message
    shutil.rmtree(newest)
    assert main(["train", "--resume", str(run)]) == 0
    same = read_result(run)["weights_sha256"]
    assert same == json.loads(weights)["weights_sha256"]


def test_no_checkpoints_when_none_are_asked_for(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run, ckpts_per_epoch=0)) == 0
    assert not list_checkpoints(run / "checkpoints")
    assert read_result(run)["checkpoint"] is None
    assert main(["validate", str(run)]) == CheckpointError.exit_code
    assert "has no checkpoint" in capsys.readouterr().err


def test_keep_and_best(digits, tmp_path):
    run = tmp_path / "run"
    assert main(small_run(digits, run, epochs=6, ckpts_per_epoch=1, keep=1)) == 0
    summary = read_result(run)
    kept = {path.name for path in list_checkpoints(run / "checkpoints")}
    best = f"step-{summary['best']['step']:08d}"
    assert kept == {"step-00000036", best}
    assert os.readlink(run / "checkpoints" / "best") == best
    rows = (run / "validation.csv").read_text().splitlines()[1:]
    assert summary["best"]["top1"] == max(float(row.split(",")[3]) for row in rows)


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": 1, "files": {"facts.json": {"sha256": "0"}}},
        {"format": 1, "files": {}},
        {"format": 1, "files": []},
        {"format": "one", "files": {}},
        [],
    ],
)
def test_a_manifest_that_was_edited_is_refused(tmp_path, manifest):
    checkpoint = write_checkpoint(tmp_path, 1, FILES)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        read_facts(checkpoint)
