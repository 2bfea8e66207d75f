"""The profiler around a loop of a few steps: what it leaves behind; no fault of it ends a run."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile

from phalanx.engine.train import LoopDependencies
from phalanx.profile import step_profiler
from phalanx.profile.step_profiler import ProfileSpec, StepProfiler
from phalanx.ranges import RANGES
from phalanx.report.terminal import OutputClosed

SET = {"KINETO_LOG_LEVEL", "TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"}


def make_profiler(
    folder: Path, *, print_line: Callable[[str], object] = print, steps: int = 3, **spec: object
) -> StepProfiler:
    given = {"detail": "summary", "images": 4, "first_step": 0, "passes": 1, "title": "t"}
    found = ProfileSpec(folder=folder, total_steps=steps, **{**given, **spec})
    return StepProfiler(found, nn.Linear(2, 2), print_line=print_line)


def train(profiler: StepProfiler, first: int, last: int) -> int:
    """How many steps a loop from one step to another makes."""

    def batches_from(start: int) -> Iterator[list]:
        yield from [[]] * (last - start)

    unused = dict.fromkeys(
        ("evaluate", "save", "stop_requested", "describe_images", "diagnose", "observer")
    )
    deps = profiler.attach(
        LoopDependencies(
            batches_from=batches_from, train_step=lambda passes, lr: torch.ones(2).sum(), **unused
        )
    )
    return sum(int(deps.train_step(passes, 0.1)) // 2 for passes in deps.batches_from(first))


def break_profiler(monkeypatch, method: str) -> list[str]:
    """Let a method of torch's profiler fail as its own checks do; lists the stops."""
    calls: list[str] = []

    class Broken(profile):
        def stop(self) -> None:
            calls.append("stop")
            super().stop()

    def fail(self, *args: object) -> None:
        calls.append(method)
        with suppress(Exception):
            getattr(profile, method)(self, *args)
        raise AssertionError("a fault of its own")

    setattr(Broken, method, fail)
    monkeypatch.setattr(step_profiler, "profile", Broken)
    return calls


@pytest.mark.parametrize("method", ["start", "step", "stop", "export_chrome_trace"])
def test_a_fault_of_torchs_profiler_does_not_end_the_run(tmp_path, monkeypatch, method):
    calls, told = break_profiler(monkeypatch, method), []
    profiler = make_profiler(tmp_path / "profile", print_line=told.append)
    assert train(profiler, 0, 3) == 3
    profiler.close()
    assert told[-1] == "note: profile: a fault of its own; the run continues without it"
    assert not RANGES.are_recorded
    assert calls.count("stop") == (1 if method in ("stop", "export_chrome_trace") else len(told))
    with profile():  # raises where another one was left running
        pass


def test_what_torch_says_of_several_cycles_is_not_shown(tmp_path, monkeypatch):
    class OfTorch211(profile):
        def start(self) -> None:
            warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=2)
            super().start()

    monkeypatch.setattr(step_profiler, "profile", OfTorch211)
    told: list[str] = []
    profiler = make_profiler(tmp_path / "profile", print_line=told.append)
    assert train(profiler, 0, 3) == 3
    profiler.close()
    assert not any(line.startswith("note: profile") for line in told)


def test_a_fault_at_the_end_of_a_run_does_not_say_that_it_goes_on(tmp_path, monkeypatch):
    break_profiler(monkeypatch, "stop")
    told: list[str] = []
    profiler = make_profiler(tmp_path / "profile", print_line=told.append)
    assert train(profiler, 0, 2) == 2  # it has begun to warm up
    profiler.close()
    assert told == ["note: profile: a fault of its own; there is none"]


def test_a_reader_who_left_is_no_fault_of_the_profile(tmp_path):
    told: list[str] = []

    def leave(text: str) -> None:
        told.append(text)
        if len(told) == 1:  # what is written after it goes nowhere, in silence
            raise OutputClosed

    profiler = make_profiler(tmp_path / "profile", print_line=leave)
    with pytest.raises(OutputClosed):
        train(profiler, 0, 3)
    profiler.close()


def test_the_environment_is_as_it_was_when_the_run_is_over(tmp_path, monkeypatch):
    for name in SET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "3")
    profiler = make_profiler(tmp_path / "profile")
    train(profiler, 0, 3)
    assert os.environ["TEARDOWN_CUPTI"] == "0"
    profiler.close()
    assert {name: os.environ[name] for name in SET if name in os.environ} == {
        "KINETO_LOG_LEVEL": "3"
    }


def test_a_second_loop_goes_on_counting_where_it_begins(tmp_path):
    profiler = make_profiler(tmp_path / "profile", steps=20, graph=True)  # 2 is plain, 11 is shown
    train(profiler, 0, 9)
    train(profiler, 9, 12)  # its second step is the one to show
    profiler.close()
    assert (tmp_path / "profile" / "summary.json").is_file()


def test_files_of_more_detail_and_of_ranks_that_are_gone_are_removed(tmp_path):
    folder = tmp_path / "profile"
    for rank in ("rank-1", "rank-2", "rank-10", "rank-mine"):
        (folder / rank).mkdir(parents=True)
        (folder / rank / "summary.txt").write_text("old")
    (folder / "trace.json.gz").write_bytes(b"old")
    profiler = make_profiler(folder, ranks=2)
    train(profiler, 0, 3)
    profiler.close()
    left = {path.name for path in folder.iterdir()}
    assert left == {"rank-1", "rank-mine", "summary.txt", "summary.json", "step.png"}
    assert (folder / "rank-1" / "summary.txt").is_file()
