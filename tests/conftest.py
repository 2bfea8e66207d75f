"""What many tests share: a tiny dataset on disk, and what keeps the suite quick."""

import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

# before torch is imported, and inherited by every process a test starts: two workers of two
# threads each on two cores are ten times slower than with one each
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

from headless_browser import Browser
from phalanx.assemble.torch_setup import disable_amx_on_virtual_machines
from small_runs import make_digits

disable_amx_on_virtual_machines()  # before any test of this process makes a product
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it, and tests send it

# the same examples in every run: a test that fails now and then says nothing of a change
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.load_profile("same")

LONGEST = (  # begun first, so that no worker is left alone with one of them at the end
    "test_the_readme_commands_run",
    "test_a_kill_before_any_write",
    "test_sweep_trials",
    "assemble/test_resume",
    "bench/test_finders",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(word in item.nodeid for word in LONGEST))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 training and 40 validation images of 12x12 in MNIST's format."""
    return make_digits(tmp_path_factory.mktemp("digits"), train=96, valid=40)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser without a window."""
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in a folder without presets or runs, and no data is anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)


@pytest.fixture
def first_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels nothing is measured: to compile every tile would take minutes."""
    choices = import_module("phalanx.kernels.choices").CHOICES
    monkeypatch.setattr(choices, "measures", False)


@pytest.fixture
def untimed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on the CPU is not timed by the clock of a GPU that is there, too."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("phalanx.kernels.choices._can_measure", lambda: False)


@pytest.fixture(autouse=True)
def drawings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have empty drawings, half a second each run, unless a test is about them (`draws`)."""
    if request.node.get_closest_marker("draws") is None:
        for module in ("phalanx.report.plots", "phalanx.sweep.page"):
            monkeypatch.setattr(import_module(module), "draw_svg", draw_nothing)


def draw_nothing(*_: object, label: str, **__: object) -> str:
    """A drawing without anything in it."""
    return f"<svg role='img' aria-label='{label}'></svg>"
