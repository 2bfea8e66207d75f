"""Several threads score, or compile kernels, in one process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from phalanx.catalog.models import MODELS
from phalanx.inference.folded_model import FoldedModel
from phalanx.inference.gpu_layers import choose_gpu_layers
from phalanx.kernels.choices import KernelChoices, Launch
from phalanx.models.build import build_model, initialise_weights


class Kernel:
    """Counts its launches and compilations."""

    __name__ = "kernel"
    launched = compiled = 0

    def __getitem__(self, grid):
        def launch():
            self.launched += 1

        return launch

    def warmup(self, grid):
        self.compiled += 1


class LaunchBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, launch):
        ctx.launch = launch
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.launch()
        return gradient, None


def elsewhere(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.fixture
def made():
    """Choices, a kernel, and what launches it and what launches it in a backward pass."""
    choices, kernel = KernelChoices(), Kernel()

    def launch():
        choices.launch_fastest([Launch(kernel, (1,), (), {})])

    def pass_back():
        with torch.enable_grad():
            LaunchBackward.apply(torch.ones(1, requires_grad=True), launch).backward()

    return choices, kernel, launch, pass_back


def test_while_one_thread_compiles_others_launch(made):
    choices, kernel, launch, _ = made
    assert choices.compile_all(lambda: elsewhere(launch)) == 0 and kernel.launched == 1
    assert choices.compile_all(launch) == 1 and (kernel.launched, kernel.compiled) == (1, 1)
    launch()
    assert kernel.launched == 2


def test_a_backward_pass_is_compiled_in_whatever_thread_it_runs(made):
    choices, kernel, _, pass_back = made
    assert choices.compile_all(lambda: elsewhere(pass_back)) == 1 and kernel.launched == 0
    with torch.inference_mode():  # scoring has no backward pass: this is of some training
        assert choices.compile_all(lambda: elsewhere(pass_back)) == 0 and kernel.launched == 1


def test_one_compiles_after_the_other(made):
    choices, kernel, launch, _ = made
    begun, may_end = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert may_end.wait(5)
        launch()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(choices.compile_all, slow)
        assert begun.wait(5)
        second = pool.submit(choices.compile_all, launch)
        time.sleep(0.05)
        may_end.set()
        assert (first.result(), second.result(), kernel.launched) == (1, 1, 0)


def test_threads_score_one_at_a_time(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = build_model(MODELS["resnet8"], num_classes=10)
    initialise_weights(model, 0, zero_residual=False)
    folded, inside, most = FoldedModel(model, choose_gpu_layers(torch.float32)), [], []
    batches = [torch.randn(1, 3, 16, 16) for _ in range(6)]
    alone, run = [folded(batch) for batch in batches], folded._run

    def watch(images):
        inside.append(images)
        most.append(len(inside))
        time.sleep(0.01)
        logits = run(images)
        inside.pop()
        return logits

    monkeypatch.setattr(folded, "_run", watch)
    with ThreadPoolExecutor(3) as pool:
        together = [*pool.map(folded, batches)]
    assert max(most) == 1
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
