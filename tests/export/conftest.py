"""A run that was trained for a few steps, and its exports, made once for all tests."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

import phalanx
from phalanx.export import drafts
from phalanx.export.onnx_file import build_onnx


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
def timm() -> ModuleType:
    """timm, where it can be imported beside the torch that is here."""
    try:
        return import_module("timm")
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"timm cannot be imported beside this torch: {error}")


@pytest.fixture(scope="session")
def built() -> list[Any]:
    """The ONNX model that `exported` was written from: to build one takes a second."""
    return []


@pytest.fixture(scope="session")
def exported(run, built):
    """The run as an ONNX file at its usual place."""

    def build_and_keep(*args: Any) -> Any:
        built.append(build_onnx(*args))
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "build_onnx", build_and_keep)
        return phalanx.export(run)


@pytest.fixture
def built_model(exported, built, monkeypatch):
    """A copy of the run's ONNX model, which the next export takes for its own."""
    copy = onnx.ModelProto()
    copy.CopyFrom(built[0])
    monkeypatch.setattr(drafts, "build_onnx", lambda *_: copy)
    return copy
