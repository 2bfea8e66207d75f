"""A tiny model and a server of it, for all tests of the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from small_server import NAME, RunningServer, open_server, write_model


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / f"{NAME}.onnx")


@pytest.fixture(scope="session")
def server(model_file: Path) -> Iterator[RunningServer]:
    with open_server(model_file, "--max-request-mib", "4", "--max-images", "16") as running:
        yield running
