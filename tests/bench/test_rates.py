"""`phalanx bench train` and `bench infer`: real steps and forwards of tiny models."""

import json
from importlib.metadata import version

import numpy as np
import pytest
import torch

from phalanx.assemble.session import Session
from phalanx.bench.result import BenchResult
from phalanx.cli.main import main
from phalanx.errors import DataError
from small_layouts import write_classes
from small_runs import small_run, start_phalanx

CONFIG, DATA, UNTRUSTED = 2, 3, 7
QUICK = ("--seconds=0.1", "--warmup=0.02", "--blocks=3")


@pytest.fixture
def tiny(digits, tmp_path, monkeypatch) -> list[str]:
    """A model and data of a few milliseconds a step, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    given = {"data": "mnist", "data-dir": digits, "model": "resnet8", "image-size": 12}
    given |= {"batch-size": 16, "device": "cpu", "workers": 0}
    return [f"--{name}={value}" for name, value in given.items()]


def measure(capsys, *words: str) -> list[dict]:
    """What a benchmark prints; its exit code says whether all is to be believed."""
    code = main(["bench", *words, "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == (0 if all(row["trusted"] for row in rows) else UNTRUSTED)
    return rows


def refuse(capsys, *words: str) -> str:
    assert main(["bench", *words]) == CONFIG
    return capsys.readouterr().err


def test_a_measurement_that_fails_takes_nothing_from_those_before_it(tiny, capsys, monkeypatch):
    from phalanx.bench import inference

    real, sizes = inference.measure_inference, []

    def fail_second(open_session, job):
        sizes.append(job)
        if len(sizes) > 1:
            raise DataError("the disk is gone")
        return real(open_session, job)

    monkeypatch.setattr(inference, "measure_inference", fail_second)
    assert main(["bench", "infer", *tiny[2:], *QUICK, "--batch-size=2,4", "--json"]) == DATA
    told = capsys.readouterr()
    (row,) = map(json.loads, told.out.splitlines())
    assert row["batch"]["micro"] == 2 and "the disk is gone" in told.err


def test_training_is_measured_by_its_own_step_and_moves_no_weight(
    tiny, tmp_path, capsys, monkeypatch
):
    real_step, before, seen = Session.train_step, {}, []

    def spy(session, passes, lr, **more):
        if not before:
            before.update({n: w.detach().clone() for n, w in session.model.named_parameters()})
        found = real_step(session, passes, lr, **more)
        seen.append((session, sum(len(one.labels) for one in passes)))
        return found

    monkeypatch.setattr(Session, "train_step", spy)
    (row,) = measure(capsys, "train", *tiny, *QUICK, "--replicas=2", "--gradient-accumulation=2")
    assert row["batch"] == {"global": 64, "micro": 16} and row["devices"] == 1
    assert row["data"] == "real" and row["kind"] == "train" and row["n"] == 3
    assert {images for _, images in seen} == {64}, "both replicas, folded, with both their passes"
    assert seen[0][0].state.step == len(seen) >= 6 and min(row["rates"]) > 0
    assert before and all(
        torch.equal(before[name], weight) for name, weight in seen[0][0].model.named_parameters()
    )
    assert row["setup_s"] > 0 and row["warmup_s"] > 0 and row["first_rate"] > 0
    assert row["environment"]["torch"] == version("torch") and row["environment"]["date"]
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_three_kinds_of_data_are_measured_side_by_side(tiny, capsys, monkeypatch):
    monkeypatch.setattr(BenchResult, "problems", [])  # believed, however busy we are
    words = ["train", *tiny, *QUICK, "--inputs", "synthetic,generated,real"]
    rows = measure(capsys, *words)
    assert [row["data"] for row in rows] == ["synthetic", "generated", "real"]
    assert rows[0]["limit"] == "model" and {row["limit"] for row in rows} <= {"model", "data"}


def test_a_run_that_ends_in_its_warm_up_is_not_believed(tiny, capsys):
    assert main(["bench", "train", *tiny, "--steps=3"]) == UNTRUSTED
    told = capsys.readouterr()
    assert "unreliable: nothing was measured: the warm-up outlasted" in told.err
    assert "images/s" in told.out


def test_inference_is_measured_in_batches_of_each_size(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = measure(
        capsys,
        *("infer", "resnet8", "--generated-data", "--workers=0", "--batch-size", "1,8"),
        *(*QUICK, "--image-size=12"),
    )
    assert [row["batch"]["micro"] for row in rows] == [1, 8]
    for row in rows:
        assert row["kind"] == "infer" and row["data"] == "generated" and row["n"] == 3
        assert row["latency_ms"]["p50"] > 0 and row["latency_ms"]["n"] > 0
    one = rows[0]["latency_ms"]
    if one["n"] >= 100:
        assert one["p50"] <= one["p95"] <= one["p99"]
    assert not list(tmp_path.iterdir())


def test_a_trained_run_is_measured_on_its_images_and_on_noise(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run, steps=2)) == 0
    capsys.readouterr()
    rows = measure(capsys, "infer", str(run), *QUICK, "--inputs=real,generated")
    assert [row["data"] for row in rows] == ["real", "generated"]
    assert main(["bench", "infer", str(run), "--model=resnet20"]) == CONFIG


def test_a_run_is_measured_on_as_many_images_as_there_are(tmp_path, capsys):
    data, run = write_classes(tmp_path / "data", 4), tmp_path / "run"
    words = [f"--data-dir={data}", "--model=resnet8", "--image-size=12", "--batch-size=4"]
    words += ["--steps=2", "--warmup-epoch=0", "--device=cpu", "--workers=0"]
    assert main(["train", *words, "--validation-mode=none", f"--run-dir={run}"]) == 0
    capsys.readouterr()
    other = f"--data-dir={write_classes(tmp_path / 'other', 3)}"
    for folder in ([], [other]):
        rows = measure(capsys, "infer", str(run), *folder, *QUICK, "--batch-size=2")
        assert rows[0]["data"] == "real" and rows[0]["images_per_second"] > 0


@pytest.mark.parametrize("way", ["train --data=generated", "infer --synthetic-data"])
def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(way, capsys, monkeypatch):
    free = "phalanx.bench.memory_fit.read_free_memory"
    monkeypatch.setattr(free, lambda: 2**30)
    held = np.ones(2**27)  # a GiB of this process, which is not free any more
    kind, *data = way.split()
    words = [kind, *data, "--model=resnet8", "--image-size=64", "--device=cpu", *QUICK]
    told = refuse(capsys, *words, "--batch-size=65536")
    assert "--batch-size 65,536" in told and "needs about" in told
    fits = int(told.rsplit("--batch-size ", 1)[1])
    assert 16 < fits < 65536 and held.nbytes == 2**30
    monkeypatch.setattr(free, lambda: 2**20)
    assert "not even that of one image fits" in refuse(capsys, *words, "--batch-size=65536")


@pytest.mark.parametrize("kind", ["train", "infer"])
def test_a_device_that_runs_out_of_memory_is_tried_with_smaller_batches(kind, capsys, monkeypatch):
    tried = []

    def run_out(*_):
        tried.append(kind)
        raise torch.OutOfMemoryError("CUDA out of memory")

    module = {"train": "training", "infer": "inference"}[kind]
    monkeypatch.setattr(f"phalanx.bench.{module}._measure", run_out)
    words = ["--synthetic-data", "--model=resnet8", "--image-size=12", "--device=cpu"]
    if kind == "train":
        assert "and neither does the smallest" in refuse(capsys, kind, *words, "--batch-size=1")
        tried.clear()
    told = refuse(capsys, kind, *words, "--batch-size=12")
    assert tried == [kind] and "--batch-size 12: does not fit into the memory of cpu" in told
    assert told.endswith("the largest that does, of those tried: --batch-size 12\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--device=cuda"], "torch finds no CUDA device here; use --device cpu"),
        (["train", "imagenet-resnet50"], "or measure without it: --synthetic-data"),
        (["train", "--inputs=synthetik"], "there is no 'synthetik'; did you mean 'synthetic'?"),
        (["train", "--inputs=real,real"], "names real twice"),
        (["train", "--data=synthetic", "--inputs=real"], "the data is synthetic, which is not"),
        (["train", "--inputs=real", "--synthetic-data"], "give one of them"),
        (["infer", "resnet8", "--synthetic-data", "--generated-data"], "exclude each other"),
        (["infer", "resnet8", "--batch-size=4,x"], "expected whole numbers above 0 such as 1,4,16"),
        (["infer", "resnet8", "--batch-size=4,4"], "names a size twice"),
        (["infer"], "see phalanx bench infer --help"),
        (["train", "--engine=lightning"], "measures our own loop; `phalanx bench engines`"),
        (["train", "--seconds=0"], "--seconds: expected a number up to 3,600"),
        (["train", "--blocks=2"], "--blocks: expected a whole number from 3"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, told, capsys):
    if "--device=cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert told in refuse(capsys, *words)


@pytest.mark.parametrize("size", ["0", "x", "65537", "1,65537", "9" * 5000])
def test_a_wrong_batch_size_is_one_mistake(size, capsys):
    said = refuse(capsys, "infer", "resnet8", "--synthetic-data", "--batch-size", size)
    assert "--batch-size: expected whole numbers above 0" in said and "each up to 65,536" in said
    assert "problems" not in said and "valid-batch-size" not in said


@pytest.mark.slow
def test_ranks_measure_together_and_agree(tiny, tmp_path):
    words = ["train", *tiny, *QUICK, "--replicas=4", "--devices=2", "--json"]
    ranks = start_phalanx("bench", *words, cwd=tmp_path)
    out, err = ranks.communicate(timeout=120)
    (row,) = map(json.loads, out.splitlines())
    assert ranks.returncode == (0 if row["trusted"] else UNTRUSTED), err
    assert row["devices"] == 2 and row["batch"] == {"global": 64, "micro": 16}
    assert row["per_device"] == pytest.approx(row["images_per_second"] / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "staged", [[], ["--pipeline-splits=layer2.0", "--pipeline-validation-model"]]
)
def test_ranks_share_inference(staged, tmp_path):
    words = ["infer", "resnet8", "--synthetic-data", "--image-size=12", "--batch-size=8", *QUICK]
    ranks = start_phalanx("bench", *words, "--devices=2", *staged, "--json", cwd=tmp_path)
    out, err = ranks.communicate(timeout=120)
    (row,) = map(json.loads, out.splitlines())
    assert ranks.returncode == (0 if row["trusted"] else UNTRUSTED), err
    assert row["devices"] == 2 and row["batch"]["global"] == (8 if staged else 16)
    assert (row["latency_ms"] is None) == bool(staged)
