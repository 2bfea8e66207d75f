"""Promise 4: every image is counted once, whatever the batch size."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.cli.main import main
from phalanx.engine.evaluate import ValidBatch, evaluate
from phalanx.engine.step import StepOptions
from phalanx.errors import DataError
from small_runs import read_result, small_run

RULE = StepOptions(label_smoothing=0.0, device_type="cpu", half=None)


class Fixed(torch.nn.Module):
    """A model whose logits are its input."""

    def forward(self, x):
        return x.flatten(1)


def batch(rows, labels, indices):
    logits = torch.tensor(rows, dtype=torch.float32)[:, :, None, None]
    return ValidBatch(logits, torch.tensor(labels), torch.tensor(indices))


def test_padding_and_unreadable_rows_do_not_count():
    good, bad = [0.0, 9.0, 0.0], [9.0, 0.0, 0.0]
    score = evaluate(
        Fixed(),
        [batch([good, bad, good], [1, 1, 1], [0, 1, -1]), batch([good, bad], [1, 1], [3, -1])],
        options=RULE,
    )
    assert (score.scored, score.hits) == (3, 2)
    assert score.top1 == pytest.approx(2 / 3)
    assert score.indices.tolist() == [0, 1, 3]


def test_five_classes_or_fewer_have_no_top5():
    few = evaluate(Fixed(), [batch([[1.0, 0, 0, 0, 0]], [0], [0])], options=RULE)
    many = evaluate(Fixed(), [batch([[5.0, 4, 3, 2, 1, 0]], [4], [0])], options=RULE)
    assert few.top5 is None
    assert (many.top1, many.top5) == (0.0, 1.0)


def test_confidence_and_loss_are_what_they_say():
    score = evaluate(Fixed(), [batch([[np.log(3.0), 0.0]], [1], [0])], options=RULE)
    assert score.confidence[0] == pytest.approx(0.75)
    assert score.loss == pytest.approx(-np.log(0.25), rel=1e-6)


class FirstColumn(torch.nn.Module):
    """A model that only looks at the left edge."""

    def forward(self, x):
        return x[:, :, 0, 0]


def test_an_image_and_its_mirror_image_are_scored_together():
    images = torch.tensor([[[[1.0, 6.0]], [[3.0, 3.5]]]])  # two classes; left edge, right edge
    both = ValidBatch(images, torch.tensor([0]), torch.tensor([0]))
    plain = evaluate(FirstColumn(), [both], options=RULE)
    mirrored = evaluate(FirstColumn(), [both], options=replace(RULE, flip=True))
    assert (plain.top1, mirrored.top1) == (0.0, 1.0)
    mean = torch.tensor([3.5, 3.25]).softmax(0)
    assert mirrored.confidence[0] == pytest.approx(mean[0].item())


def test_nothing_to_score_is_said():
    with pytest.raises(DataError, match="no image to score"):
        evaluate(Fixed(), [], options=RULE)
    with pytest.raises(
        DataError, match="no image of the validation split can be decoded; `phalanx data verify"
    ):
        evaluate(Fixed(), [batch([[1.0, 0.0]], [0], [-1])], options=RULE)


def test_an_interrupted_evaluation_gives_no_score():
    one = batch([[1.0, 0.0]], [0], [0])
    assert evaluate(Fixed(), [one], options=RULE, interrupted=lambda: True) is None


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    run = tmp_path_factory.mktemp("scores") / "run"
    assert main(small_run(digits, run, epochs=10, ckpts_per_epoch=1, keep=4)) == 0
    return run


def scores(capsys, *words):
    capsys.readouterr()
    assert main(["validate", *map(str, words), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row.pop("images_per_second") > 0 for row in rows)
    return rows


def test_a_score_does_not_depend_on_batch_size_or_workers(trained, capsys):
    summary = read_result(trained)
    for size in (1, 7, 16, 39, 40, 41, 1000):
        (row,) = scores(capsys, trained, "--checkpoint=last", "--valid-batch-size", size)
        assert row["scored"] == 40
        assert row["top1"] == summary["top1"], f"batch size {size}"
        assert row["loss"] == pytest.approx(scores_loss(trained), rel=1e-5)
    (row,) = scores(capsys, trained, "--checkpoint=last", "--workers", 2)
    assert (row["scored"], row["top1"]) == (40, summary["top1"])


def scores_loss(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines[-1]["valid"]["loss"]


def test_all_checkpoints_and_one_of_them(trained, capsys):
    every = scores(capsys, trained, "--all")
    assert len(every) == len(list((trained / "checkpoints").glob("step-*")))
    assert every == scores(capsys, trained / "checkpoints", "--all")
    (best,) = scores(capsys, trained / "checkpoints" / "best")
    assert best["top1"] == max(row["top1"] for row in every)
    assert scores(capsys, trained) == [best], "the best one speaks for its run"
    assert main(["validate", str(trained / "checkpoints")]) == 4
    assert "--all" in capsys.readouterr().err


def test_a_fresh_model_says_so(digits, capsys):
    words = ["resnet8", "--data", "mnist", "--data-dir", str(digits)]
    assert main(["validate", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "resnet8 on mnist, with random weights, so the score is chance\n"
    assert json.loads(captured.out)["scored"] == 40


# --- ranks, each with other batches ---


def score_shares(shares):
    """What every rank makes of the answers of all; each gives its own, and waits for the others."""
    answers = []
    for share in shares:
        evaluate(Fixed(), share, options=RULE, gather=lambda mine: answers.append(mine) or [None])
    return [evaluate(Fixed(), [], options=RULE, gather=lambda _: answers) for _ in shares]


def test_shares_of_ranks_make_the_score_of_all():
    good, bad = [0.0, 9.0, 0.0], [9.0, 0.0, 0.0]
    first = batch([good, bad], [1, 1], [0, 1])
    second = batch([bad, good], [1, 1], [2, -1])  # its other image cannot be read
    third = batch([good, good], [1, 1], [4, -1])
    alone = evaluate(Fixed(), [first, second, third], options=RULE)
    for shares in ([[first, third], [second]], [[third], [], [second], [first]]):
        for score in score_shares(shares):
            assert (score.scored, score.hits, score.loss) == (4, 2, alone.loss)
            assert score.indices.tolist() == [0, 1, 2, 4]
            assert np.array_equal(score.ranked, alone.ranked)


def test_a_score_that_one_rank_left_is_none_for_all():
    whole = [batch([[0.0, 9.0]], [1], [0])]
    assert evaluate(Fixed(), whole, options=RULE, gather=lambda mine: [mine, None]) is None


def test_shares_without_any_image_are_refused():
    with pytest.raises(DataError, match="the validation split is empty; check --data-dir"):
        evaluate(Fixed(), [], options=RULE, gather=lambda mine: [mine, mine])
