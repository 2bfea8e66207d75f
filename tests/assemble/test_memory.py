"""Memory does not grow with the epochs."""

import time
from pathlib import Path

import pytest

from small_runs import make_digits, small_run, start_phalanx


def resident_mib(pid: int) -> float:
    """What the process holds in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def epochs_done(run: Path) -> int:
    try:
        return max(0, len((run / "validation.csv").read_text().splitlines()) - 1)
    except FileNotFoundError:
        return 0


def resident_by_epoch(words: list[str], run: Path) -> dict[int, float]:
    """The resident size right after each epoch's score."""
    process = start_phalanx(*words)
    sizes: dict[int, float] = {}
    while process.poll() is None:
        epoch = epochs_done(run)
        if epoch and epoch not in sizes:
            time.sleep(0.05)  # past the score, into the next epoch
            sizes[epoch] = resident_mib(process.pid) if process.poll() is None else 0.0
        time.sleep(0.005)
    out, err = process.communicate()
    assert process.returncode == 0, (out, err)
    return sizes


@pytest.mark.slow
def test_ten_epochs_of_the_demo_take_what_two_take(tmp_path):
    run = tmp_path / "run"
    sizes = resident_by_epoch(["train", "demo", "--epochs", "11", "--run-dir", str(run)], run)
    growth = sizes[10] / sizes[2] - 1
    print(f"resident after epoch 2: {sizes[2]:.1f} MiB, after epoch 10: {sizes[10]:.1f} MiB")
    assert growth < 0.02, f"{sizes[2]:.0f} MiB after epoch 2, {sizes[10]:.0f} after epoch 10"


def test_a_short_run_does_not_grow_either(tmp_path):
    data = make_digits(tmp_path / "data", train=480, valid=40)
    run = tmp_path / "run"
    sizes = resident_by_epoch(small_run(data, run, epochs=21, ckpts_per_epoch=1), run)
    late, early = max(sizes), sorted(sizes)[len(sizes) // 4]
    assert late - early > 4, "too few epochs were seen"
    assert sizes[late - 1] < 1.1 * sizes[early], sizes
