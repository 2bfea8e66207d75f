"""Which of several implementations is used, and that it is remembered."""

import json

import pytest
import torch

from phalanx.fused.tuning import ChoiceStore
from phalanx.kernels.choices import CHOICES, KernelChoices, _time_on_device, make_tiles
from phalanx.kernels.fused import find_fused, find_memory_error

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IMPLEMENTATIONS = {"first": lambda: 1, "second": lambda: 2}


def test_a_kernel_that_is_misspelt_is_not_taken_for_a_missing_triton():
    for name in ("phalanx.kernels.no_file.kernel", "phalanx.kernels.gpu.no_function"):
        with pytest.raises((ImportError, AttributeError), match=r"no_file|no_function"):
            find_fused(name)
    assert find_fused("no_such_package.kernel") is None


def test_tiles_are_named_row_by_row():
    assert make_tiles("BM BC", (32, 64, 4, 3)) == [
        {"BM": 32, "BC": 64, "num_warps": 4, "num_stages": 3}
    ]


def test_without_a_measurement_the_first_way_is_taken_and_not_remembered():
    choices = KernelChoices()
    choices.measures = False
    choices.chosen_names = {"work": "second"}  # what another machine measured
    assert choices.run_fastest("work", IMPLEMENTATIONS) == 1
    assert choices.chosen_names == {"work": "second"}


def test_what_is_known_is_taken_again_unless_it_is_gone():
    choices = KernelChoices()
    choices.chosen_names = {"work": "second", "other": "third"}
    assert choices.run_fastest("work", IMPLEMENTATIONS) == 2
    if not torch.cuda.is_available():
        assert choices.run_fastest("other", IMPLEMENTATIONS) == 1


class Kernel:
    """Notes the tiles it is launched with; the device has memory for a few sizes of them."""

    __name__ = "kernel"

    def __init__(self, *fitting):
        self.fitting, self.launched = fitting, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, BM, num_warps, num_stages):
        if BM not in self.fitting:
            raise find_memory_error()(BM, max(self.fitting), "shared memory")
        self.launched.append(BM)


@pytest.mark.parametrize(
    "known", [{}, {"kernel [] None": "kernel BM=128 num_warps=4 num_stages=3"}]
)
def test_a_tile_that_the_device_has_no_memory_for_gives_way_to_the_next(known, monkeypatch):
    monkeypatch.setattr("phalanx.kernels.choices._can_measure", lambda: False)  # it is no kernel
    choices, kernel = KernelChoices(), Kernel(64, 32)
    choices.chosen_names = known  # as it was measured on a larger GPU
    tiles = make_tiles("BM", (256, 4, 3), (128, 4, 3), (64, 4, 3), (32, 4, 3))
    assert choices.run(kernel, lambda tile: (1,), (), tiles)["BM"] == 64
    assert kernel.launched == [64]
    with pytest.raises(find_memory_error()):
        choices.run(Kernel(16), lambda tile: (1,), (), tiles)


@CUDA
@pytest.mark.gpu
def test_the_faster_way_is_found_and_one_that_fails_is_left_out():
    large, small = torch.zeros(2**26, device="cuda"), torch.zeros(2**10, device="cuda")

    def fail():
        raise RuntimeError("out of shared memory")

    choices = KernelChoices()
    implementations = {"fails": fail, "slow": lambda: large.add_(1), "fast": lambda: small.add_(1)}
    choices.run_fastest("work", implementations)
    assert choices.chosen_names == {"work": "fast"}
    assert set(choices.timings["work"]) == {"slow", "fast"}
    with pytest.raises(RuntimeError, match="shared memory"):
        choices.run_fastest("none", {"fails": fail, "fails too": fail})


def test_measurements_have_a_stream_of_the_device_that_is_used(monkeypatch):
    opened = []

    def open_stream(device=None):
        opened.append(device)
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(torch.cuda, "Stream", open_stream)
    for device in (8, 9):  # as where one run follows another, on another GPU
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        with pytest.raises(RuntimeError, match="no GPU"):
            _time_on_device(lambda: None)
    assert opened == [8, 9]


def test_a_run_remembers_its_choices_and_others_find_them_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(CHOICES, "chosen_names", {"work": "second"})
    run, cache = tmp_path / "run", tmp_path / "cache"
    run.mkdir()
    ChoiceStore(run, cache).save(lambda own: [own], writes=True)
    assert json.loads((run / "kernels.json").read_text()) == {"work": "second"}
    monkeypatch.setattr(CHOICES, "chosen_names", {})
    (cache / "broken.json").write_text("{")
    ChoiceStore(None, cache).load()
    assert CHOICES.chosen_names == {"work": "second"}
    (run / "kernels.json").write_text('{"work": "first"}')
    ChoiceStore(run, cache).load()
    assert CHOICES.chosen_names == {"work": "first"}, "the run's own choices win"
