"""Promise 4 on ranks: every image counts once, and answers do not depend on who gives them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ranked_scores import score_model, score_on_ranks
from ranked_sessions import launcher_variables

from phalanx.cli.main import main
from phalanx.engine.evaluate import Score
from small_photos import write_photos
from small_runs import run_phalanx, small_run, start_phalanx

SIZES = ("37", "250", "1499")  # of batches; 1,500 images are a multiple of one of them
CONFIG, NETWORK, LEFT = 2, 8, 130


@cache
def score_alone(size: str) -> Score:
    return score_model({"valid-batch-size": size, "image-size": "16"})


def test_answers_and_counts_of_two_ranks_are_those_of_one(tmp_path):
    check_answers(2, SIZES[:1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_answers_and_counts_of_any_ranks_are_those_of_one(tmp_path, ranks):
    check_answers(ranks, SIZES, tmp_path)


def check_answers(ranks: int, sizes: tuple[str, ...], folder: Path) -> None:
    cases = [{"valid-batch-size": size, "image-size": "16"} for size in sizes]
    staged = {"pipeline-splits": "layer2/0", "pipeline-validation-model": "true"}
    if ranks % 2 == 0:
        cases, sizes = [*cases, *(case | staged for case in cases)], sizes * 2
    for size, found in zip(sizes, score_on_ranks(cases, ranks, folder), strict=True):
        alone = score_alone(size)
        assert found.indices.tolist() == list(range(1500))
        assert np.array_equal(found.labels, alone.labels)
        assert np.array_equal(found.ranked, alone.ranked)
        assert (found.scored, found.hits, found.top5) == (1500, alone.hits, alone.top5)
        assert abs(found.loss - alone.loss) < 1e-6


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Fifteen validation images, of which each of two ranks has a bad one if batches are of two."""
    folder = write_photos(tmp_path_factory.mktemp("photos"), {"train": 4, "val": 5}, size=(24, 20))
    for name in ("cat/cat 002.jpg", "fish/fish 003.jpg"):
        (folder / "val" / name).write_bytes(b"no image")
    return folder


def test_validate_starts_ranks_and_names_bad_images_once(photos, capsys):
    words = ["validate", "resnet8", "--data-dir", str(photos), "--image-size", "16"]
    words += ["--valid-batch-size", "2", "--workers", "0", "--device", "cpu"]
    assert main(words) == 0
    alone = capsys.readouterr()
    found = run_phalanx(*words, "--devices", "2")
    assert (found.returncode, found.stderr) == (0, alone.err)
    for name in ("cat 002.jpg", "fish 003.jpg"):
        assert found.stderr.count(name) == 1
    assert "of 13 images" in found.stdout
    assert re.sub("[^ ]+ images/s", "", found.stdout) == re.sub("[^ ]+ images/s", "", alone.out)


# --- the same in training ---


@pytest.mark.slow
def test_scores_in_training_are_those_of_the_folded_run(digits, tmp_path):
    options = {"replicas": 2, "batch_size": 8, "determinism": "strict", "valid_batch_size": 7}
    for devices in (1, 2):
        run = run_phalanx(*small_run(digits, tmp_path / f"{devices}", devices=devices, **options))
        assert run.returncode == 0, run.stderr
    for name in ("validation.csv", "predictions.csv"):
        one, two = ((tmp_path / run / name).read_bytes() for run in ("1", "2"))
        assert one == two


@pytest.mark.slow
def test_ranks_score_all_checkpoints_one_after_the_other(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run, ema_decay=0.5, valid_batch_size=7)) == 0
    capsys.readouterr()
    assert main(["validate", str(run), "--all", "--json"]) == 0
    alone = read_rows(capsys.readouterr().out)
    found = run_phalanx("validate", run, "--all", "--json", "--devices", 3)
    assert (found.returncode, found.stderr) == (0, "")
    assert read_rows(found.stdout) == alone and len(alone) == 4


def read_rows(lines: str) -> list[dict]:
    rows = [json.loads(line) for line in lines.splitlines()]
    assert all(row.pop("images_per_second") > 0 for row in rows)
    return rows


# --- ranks of a launcher ---


def launch(*ranks_words: list[str]) -> list[tuple[int, str, str]]:
    """Exit code and output of each rank of a world where every one has its own words."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "phalanx", "validate", "resnet8", *words],
            env=launcher_variables(rank, len(ranks_words), port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, words in enumerate(ranks_words)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *said[rank]) for rank, process in enumerate(processes)]


SMALL = ["--data", "generated", "--image-size", "16", "--device", "cpu", "--json"]


@pytest.mark.slow
def test_a_launchers_ranks_score_together_and_one_speaks(capsys):
    assert main(["validate", "resnet8", *SMALL]) == 0
    alone = capsys.readouterr()
    first, second = launch(SMALL, SMALL)
    assert (first[0], read_rows(first[1]), first[2]) == (0, read_rows(alone.out), BEGUN)
    assert second == (0, "", "")


@pytest.mark.slow
def test_ranks_with_other_weights_are_refused():
    first, second = launch(SMALL, [*SMALL, "--seed", "7"])
    told = r"phalanx validate: rank 1 on \S+ has different options and weights from rank 0 on \S+; "
    assert first[:2] == second[:2] == (NETWORK, "")
    said = (first[2] + second[2]).removeprefix(BEGUN)
    assert re.fullmatch(told + "all ranks must have the same\n", said)


@pytest.mark.slow
def test_a_mistake_is_told_by_the_first_rank_of_a_launcher():
    wrong = ["--data", "generated", "--valid-batch-size", "many", "--rank-timeout", "5"]
    first, second = launch(wrong, wrong)
    assert first[0] == CONFIG and "--valid-batch-size" in first[2]
    assert second[0] == NETWORK and "rank 0 cannot be reached" in second[2]


# --- what may happen to ranks ---

ENDLESS = ("validate", "resnet8", "--data", "generated", "--image-size", "16", "--device", "cpu")
ENDLESS += ("--repeat", "10000", "--devices", "2")
BEGUN = "resnet8 on generated, with random weights, so the score is chance\n"


@pytest.fixture
def endless() -> Iterator[subprocess.Popen[str]]:
    """Two ranks that score again and again, and have begun."""
    process = start_phalanx(*ENDLESS)
    try:
        assert process.stderr.readline() == BEGUN
        yield process
    finally:
        process.kill()


def list_children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks_with_one_line(endless, number):
    time.sleep(1)
    ranks = list_children(endless.pid)
    endless.send_signal(number)
    out, err = endless.communicate(timeout=60)
    assert (endless.returncode, out, err) == (
        LEFT, "", "phalanx validate: stopped; nothing was changed\n",
    )  # fmt: skip
    assert len(ranks) == 2 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_score(endless, rank):
    os.kill(list_children(endless.pid)[rank], signal.SIGKILL)
    out, err = endless.communicate(timeout=60)
    told = f"phalanx validate: rank {rank} was killed by SIGKILL; run the same command again\n"
    assert (endless.returncode, out, err) == (NETWORK, "", told)


@pytest.mark.slow
def test_what_fails_on_a_rank_is_told_once():
    found = run_phalanx("validate", "resnet8", "--devices", 2, "--device", "cuda")
    assert found.returncode == CONFIG and found.stdout == ""
    told = (
        r"phalanx validate: rank [01] of 2 on \S+ \(traceback in \S+\): --device: torch finds no "
    )
    assert re.fullmatch(told + "CUDA device here; use --device cpu\n", found.stderr)
