"""A finished run for tests that only read."""

import pytest

from synthetic_run import make_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished run that tests only read."""
    return make_run(tmp_path_factory.mktemp("runs") / "demo")
