"""What many tests share: a tiny dataset on disk."""

from pathlib import Path

import pytest

from phalanx.assemble.torch_setup import avoid_missing_instructions
from small_runs import make_digits

avoid_missing_instructions()  # before any test of this process makes a product


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 training and 40 validation images of 12x12 in MNIST's format."""
    return make_digits(tmp_path_factory.mktemp("digits"), train=96, valid=40)
