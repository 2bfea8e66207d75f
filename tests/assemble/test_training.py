"""What a run does and writes, from the outside."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import phalanx
from phalanx.cli.main import main
from phalanx.engine.state import TrainState
from phalanx.engine.step import MicroBatch
from phalanx.errors import DataError, DivergedError
from phalanx.optim.build import OptimSettings, build_optimizer
from small_runs import make_digits, read_result, run_phalanx, small_run
from small_states import take_step

PLAIN = OptimSettings(momentum=0.0)


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main(small_run(digits, run, epochs=8)) == 0
    return run


def test_the_run_folder_has_everything(trained):
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "training.csv",
        "validation.csv",
        "predictions.csv",
        "log.txt",
        "summary.json",
        "report.html",
    ):
        assert (trained / name).stat().st_size > 0, name


def test_the_summary_counts_right(trained):
    summary = read_result(trained)
    assert summary["steps"] == 48 and summary["epochs"] == 8.0
    assert summary["images"] == 48 * 16 and summary["scored"] == 40
    assert 0 <= summary["interval95"][0] <= summary["top1"] <= summary["interval95"][1] <= 1
    assert 0 <= summary["data_wait"] <= 1 and summary["images_per_second"] > 0
    assert len(summary["weights_sha256"]) == 64
    checkpoint = json.loads((trained / summary["checkpoint"] / "facts.json").read_text())
    assert checkpoint["weights_sha256"] == summary["weights_sha256"]
    assert checkpoint["classes"] == list("0123456789")
    assert checkpoint["config"]["batch-size"] == 16
    assert checkpoint["data"]["train"]["images"] == 96


def test_predictions_name_their_classes(trained):
    with (trained / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    classes = json.loads((trained / "run.json").read_text())["classes"]
    assert len(rows) == 40
    for row in rows:
        assert row["class"] == classes[int(row["label"])]
        assert row["predicted"] == classes[int(row["top1"])]


def test_predictions_agree_with_the_score(trained):
    with (trained / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40 and len({row["id"] for row in rows}) == 40
    hits = sum(row["label"] == row["top1"] for row in rows)
    assert hits / 40 == read_result(trained)["top1"]


def test_it_learns(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "valid" not in line]
    first, last = (np.mean([s["loss"] for s in part]) for part in (steps[:6], steps[-6:]))
    assert last < first - 0.15


def test_training_rows_are_means_since_the_last(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "valid" not in line}
    with (trained / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    before = 0
    for row in rows:
        step = int(row["step"])
        mean = sum(losses[k] for k in range(before + 1, step + 1)) / (step - before)
        assert float(row["loss"]) == pytest.approx(mean, rel=1e-12)
        before = step
    assert before == 48


def test_the_report_remakes_itself_without_the_data(tmp_path):
    data = make_digits(tmp_path / "data", train=96, valid=40)
    run = tmp_path / "run"
    main(small_run(data, run))
    for file in data.iterdir():
        file.unlink()
    (run / "report.html").unlink()
    assert phalanx.report(run) == run / "report.html"
    page = (run / "report.html").read_text()
    assert "Most confident mistakes" in page and "Confusion" in page


def test_two_equal_runs_and_two_that_part(digits, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(small_run(digits, tmp_path / name, seed=seed))
    assert phalanx.compare(tmp_path / "a", tmp_path / "b")["divergence"] is None
    other = phalanx.compare(tmp_path / "a", tmp_path / "c")
    assert other["divergence"]["step"] == 1
    assert {row["name"] for row in other["options"]} == {"seed", "run-dir"}
    assert other["paired"]["n"] == 40


def test_workers_change_nothing(digits, tmp_path):
    for workers in (0, 2):
        main(small_run(digits, tmp_path / f"w{workers}", workers=workers))
    left, right = (tmp_path / f"w{workers}" for workers in (0, 2))
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert read_result(left)["weights_sha256"] == read_result(right)["weights_sha256"]


def test_accumulated_gradients_equal_the_full_batch():
    def gradients(sizes):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)).double()
        state = TrainState(
            model, build_optimizer(model, OptimSettings(momentum=0.0, weight_decay=0.0))
        )
        before = [w.detach().clone() for w in model.parameters()]
        images = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(1)).double()
        labels = torch.arange(12) % 3
        passes = [
            MicroBatch(i, label, 0)
            for i, label in zip(images.split(sizes), labels.split(sizes), strict=True)
        ]
        numbers = take_step(state, passes, label_smoothing=0.1)
        return [b - w for b, w in zip(before, model.parameters(), strict=True)], numbers

    whole, loss = gradients([12])
    for sizes in ([4, 4, 4], [5, 5, 2], [1] * 12):
        parts, other = gradients(sizes)
        for a, b in zip(whole, parts, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)
        assert torch.allclose(loss, other, rtol=1e-6)


def test_label_smoothing_is_the_seeds_formula():
    logits = torch.tensor([[2.0, 0.5, -1.0]])
    log_p = logits.log_softmax(1)[0]
    expected = 0.9 * -log_p[0] + 0.1 * -log_p.mean()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3))
    state = TrainState(model, build_optimizer(model, PLAIN))
    batch = MicroBatch(logits[:, :, None, None], torch.tensor([0]), 0)
    loss = take_step(state, [batch], 0.0, label_smoothing=0.1)[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_loss_that_is_no_number_stops_before_it_is_saved(digits, tmp_path, capsys):
    run = tmp_path / "run"
    code = main(small_run(digits, run, lr=1e30, epochs=20, ckpts_per_epoch=6))
    message = capsys.readouterr().err
    assert code == DivergedError.exit_code
    assert "train-images-idx3-ubyte[" in message and "--lr" in message
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bad = next(line["step"] for line in lines if "nan" in line.values() or "inf" in line.values())
    assert f"step {bad}:" in message and "start again, or fork the last checkpoint, with" in message
    for checkpoint in (run / "checkpoints").glob("step-*"):
        assert int(checkpoint.name[5:]) < bad


def test_a_divergence_without_a_checkpoint_offers_no_fork(digits, tmp_path, capsys):
    words = small_run(digits, tmp_path / "run", lr=1e30, ckpts_per_epoch=0)
    assert main(words) == DivergedError.exit_code
    message = capsys.readouterr().err
    assert message.endswith("start again with a lower --lr or a longer --warmup-epoch\n")


def make_folder(root: Path, classes: int, per_class: int) -> Path:
    random = np.random.default_rng(0)
    for split, count in (("train", per_class), ("val", 2)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (40, 48, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
    return root


def folder_run(data: Path, run: Path, *more: str) -> list[str]:
    return [
        *("train", "folder-resnet18", "--model", "resnet8", "--data-dir", str(data)),
        *("--run-dir", str(run), "--image-size", "32", "--batch-size", "8", "--steps", "3"),
        *("--warmup-epoch", "0", "--workers", "1", *more),
    ]


def test_few_classes_train_normally_with_top5_null(tmp_path):
    data = make_folder(tmp_path / "data", classes=3, per_class=8)
    assert main(folder_run(data, tmp_path / "run")) == 0
    assert read_result(tmp_path / "run")["top5"] is None
    assert "top5" in read_result(tmp_path / "run")


def test_unreadable_images_are_named_counted_and_limited(tmp_path, capsys):
    data = make_folder(tmp_path / "data", classes=2, per_class=12)
    (data / "train" / "class0" / "3.jpg").write_bytes(b"not an image")
    (data / "val" / "class1" / "0.jpg").write_bytes(b"")
    assert main(folder_run(data, tmp_path / "run")) == 0
    summary = read_result(tmp_path / "run")
    assert summary["scored"] == 3
    assert len(summary["bad_images"]) == 2
    named = " ".join(summary["bad_images"])
    assert "train/class0/3.jpg" in named and "val/class1/0.jpg" in named
    log, page = (tmp_path / "run" / name for name in ("log.txt", "report.html"))
    assert "train/class0/3.jpg" in log.read_text() and "train/class0/3.jpg" in page.read_text()
    capsys.readouterr()
    assert main(folder_run(data, tmp_path / "strict", "--max-bad", "0")) == DataError.exit_code
    message = capsys.readouterr().err
    assert "train/class0/3.jpg" in message and "--max-bad" in message


def test_images_smaller_than_the_crop_are_enlarged_and_named(tmp_path, capsys):
    data = make_folder(tmp_path / "data", classes=2, per_class=8)
    Image.new("RGB", (9, 7), (200, 10, 10)).save(data / "train" / "class0" / "0.jpg")
    assert main(folder_run(data, tmp_path / "run")) == 0
    assert "train/class0/0.jpg: 9x7 is enlarged" in (tmp_path / "run" / "log.txt").read_text()


def test_many_small_images_are_one_line_with_a_count(tmp_path, capsys):
    data = make_folder(tmp_path / "data", classes=2, per_class=8)
    for path in data.rglob("*.jpg"):
        Image.new("RGB", (9, 7), (200, 10, 10)).save(path)
    assert main(folder_run(data, tmp_path / "run")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "enlarged" in line]
    first = r"warning: (train|val)/class\d/\d\.jpg: 9x7 is enlarged for 32x32, and so are \d+ more "
    assert len(lines) == 2, lines
    assert re.fullmatch(rf"{first}training images so far", lines[0])
    assert re.fullmatch(rf"{first}validation images", lines[1])


def test_predict_names_five_classes_and_what_it_cannot_read(trained, tmp_path, capsys):
    Image.new("L", (12, 12), 40).save(tmp_path / "a.png")
    (tmp_path / "b.jpg").write_bytes(b"junk")
    capsys.readouterr()
    assert main(["predict", str(trained), str(tmp_path), "--csv"]) == DataError.exit_code
    captured = capsys.readouterr()
    header, row, bad = csv.reader(captured.out.splitlines())
    assert header[:3] == ["image", "class1", "probability1"] and len(header) == len(row) == 12
    assert header[-3:] == ["class5", "probability5", "problem"]
    assert row[0].endswith("a.png") and not row[-1]
    assert sum(float(cell) for cell in row[2:11:2]) <= 1.0001
    assert bad[0].endswith("b.jpg") and bad[1:-1] == [""] * 10
    assert f"b.jpg: {bad[-1]}\n" in captured.err


def test_validate_on_another_folder_of_the_same_classes(tmp_path, capsys):
    data = make_folder(tmp_path / "data", classes=3, per_class=6)
    main(folder_run(data, tmp_path / "run"))
    other = tmp_path / "other"
    (data / "train").rename(other)  # class folders and nothing around them
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "run"), "--data-dir", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scored"] == 18
    (other / "class1").rename(other / "unheard-of")
    assert main(["validate", str(tmp_path / "run"), "--data-dir", str(other)]) == 3
    assert "unheard-of" in capsys.readouterr().err


def test_load_gives_the_trained_module(trained):
    model = phalanx.load(trained)
    assert not model.module.training
    with torch.inference_mode():
        assert model.module(torch.zeros(1, 3, 12, 12)).shape == (1, 10)


def test_generated_and_synthetic_data_train(tmp_path):
    for data in ("generated", "synthetic"):
        words = ["train", "--data", data, "--model", "resnet8", "--image-size", "16"]
        words += ["--batch-size", "4", "--steps", "3", "--iterations", "3", "--workers", "0"]
        done = run_phalanx(*words, "--run-dir", tmp_path / data)
        assert done.returncode == 0, done.stderr
        assert read_result(tmp_path / data)["images"] == 12
