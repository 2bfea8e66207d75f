"""A run that was trained for a few steps, and its exports, made once for all tests."""

from pathlib import Path

import pytest

import phalanx


@pytest.fixture(scope="session")
def run(digits, tmp_path_factory) -> Path:
    """resnet8 after six steps, with averaged weights, in a folder whose name is no address."""
    folder = tmp_path_factory.mktemp("runs") / "bars & digits"
    phalanx.train(
        data="mnist",
        data_dir=digits,
        run_dir=folder,
        model="resnet8",
        image_size=12,
        batch_size=16,
        steps=12,
        lr=0.05,
        ema_decay=0.8,
        device="cpu",
    )
    return folder


@pytest.fixture(scope="session")
def exported(run):
    """The run as an ONNX file at its usual place."""
    return phalanx.export(run)
