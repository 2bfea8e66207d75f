"""Real runs of the command line on a tiny dataset, for tests to start."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def write_idx(path: Path, array: np.ndarray) -> None:
    """An idx file as MNIST's are."""
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def make_digits(folder: Path, *, train: int, valid: int, seed: int = 1) -> Path:
    """Four idx files of noisy 12x12 bars, whose place tells the class: easy to learn."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", train), ("t10k", valid)):
        labels = np.arange(count) % 10
        images = random.integers(0, 90, (count, 12, 12))
        for image, label in zip(images, labels, strict=True):
            image[label + 1] += 150
        write_idx(folder / f"{prefix}-images-idx3-ubyte", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels)
    return folder


def small_run(data_dir: Path, run_dir: Path, **options: object) -> list[str]:
    """The words of a training of a few seconds: 6 steps an epoch, a checkpoint every second one."""
    given = {
        "data": "mnist",
        "data-dir": data_dir,
        "run-dir": run_dir,
        "image-size": 12,
        "batch-size": 16,
        "epochs": 3,
        "ckpts-per-epoch": 3,
        "lr": 0.05,
        "warmup-epoch": "1st",
        "device": "cpu",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    if "steps" in given:
        del given["epochs"]
    return ["train", *(f"--{name}={value}" for name, value in given.items())]


def rewind(run: Path, *, step: int) -> None:
    """Make a finished run one that was killed after the checkpoint of a step."""
    (run / "summary.json").unlink()
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def start_phalanx(*words: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )


def run_phalanx(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line, run to its end."""
    process = start_phalanx(*words, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def interrupt_twice(process: subprocess.Popen[str]) -> None:
    """Send a second SIGINT as soon as the first was answered, and wait for the end."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    try:
        # two signals that arrive during one call of C code would be taken for one
        assert any("SIGINT: finishing" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    finally:
        process.kill()  # a failure must not leave it training beside all other tests
        process.communicate()


def read_result(run: Path) -> dict[str, Any]:
    """The contents of a run's summary.json."""
    return json.loads((run / "summary.json").read_text())
