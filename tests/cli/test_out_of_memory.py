"""Memory that runs out is told as such, with what needs less of it; it is no bug."""

import errno
import subprocess
import sys

import pytest
import torch

from phalanx.cli.main import main
from phalanx.errors import is_out_of_memory
from small_runs import small_run

OUT_OF_MEMORY = 6
ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.21 GiB is free. Process 7 has 77.88 GiB memory in use."
)
TO_TRAIN = (
    "try a smaller --batch-size with a larger --gradient-accumulation, --enable-recompute, a "
    "smaller --valid-batch-size, --gpu-decode false, or fewer --workers; `phalanx find batch-size` "
    "finds what fits\n"
)
LIMITED = """
import resource, sys, torch
from phalanx.cli import command
from phalanx.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
command.parse_args = lambda *_: torch.empty(2**36, dtype=torch.uint8)
sys.exit(main(["train", "demo"]))
"""


def test_an_allocation_that_the_system_refuses_is_code_6(tmp_path):
    words = [sys.executable, "-c", LIMITED]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == OUT_OF_MEMORY
    assert done.stderr == (
        f"phalanx train: out of memory: 64.0 GiB more could not be allocated; {TO_TRAIN}"
    )


def run_out(*_, **__):
    raise torch.OutOfMemoryError(ON_A_GPU)


def test_a_gpu_without_memory_is_code_6_and_its_run_may_be_started_again(
    digits, tmp_path, monkeypatch, capsys
):
    words = small_run(digits, tmp_path / "run", steps=1, workers=0)
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.assemble.session.Session.train_step", run_out)
        assert main(words) == OUT_OF_MEMORY
    assert capsys.readouterr().err == (
        f"phalanx train: out of memory on GPU 0: 2.00 GiB more could not be allocated; {TO_TRAIN}"
    )
    assert main(words) == 0


ADVICE = {
    "validate demo": "try a smaller --valid-batch-size",
    "serve x.onnx": "try a smaller --max-batch",
    "data verify x": "try fewer --workers",
    "request x.png": "end other programs, or use a machine with more",  # it has no batches
}


@pytest.mark.parametrize("line", ADVICE)
def test_the_advice_is_one_that_the_command_can_take(line, monkeypatch, capsys):
    monkeypatch.setattr("phalanx.cli.command.parse_args", run_out)
    assert main(line.split()) == OUT_OF_MEMORY
    assert capsys.readouterr().err.endswith(f"could not be allocated; {ADVICE[line]}\n")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_how_memory_that_runs_out_is_recognised(error, is_memory):
    assert is_out_of_memory(error) is is_memory
