"""A run folder with realistic numbers, made by the functions that make real ones."""

import math
from pathlib import Path

import numpy as np

from phalanx.report.folder import RunFolder, create_run
from phalanx.report.predictions import (
    Prediction,
    find_worst_mistakes,
    write_predictions,
    write_worst_mistakes,
)
from phalanx.report.records import LogRow, Records, ScoreRow, StepRow
from phalanx.report.scores import wilson_interval
from phalanx.report.summary import BestScore, Summary, write_summary

CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag"]
CONFIG = """\
model: resnet20
data: embedded
batch-size: 64
epochs: 5
learning-rate: {lr}
weight-decay: 5e-5
precision: 32.32
seed: 0
splits: [layer1/0, layer2/0]
label-smoothing: 0.0
compile: off
"""
IMAGES, BATCH, STEPS_PER_EPOCH, EPOCHS = 8_000, 64, 125, 5


def make_facts(classes=CLASSES, **changes):
    return {
        "name": "demo-2026-03-01",
        "command": "phalanx train demo --learning-rate 0.1",
        "origins": {"learning-rate": "flag", "model": "preset demo", "seed": "default"},
        "chosen": {"device": "cpu", "precision": "32.32", "threads": 2},
        "plan": {"steps": 625, "global_batch": 64, "replicas": {"asked": 2, "folded": 2}},
        "environment": {
            "phalanx": "0.1.0",
            "torch": "2.13.0",
            "python": "3.11.7",
            "commit": "1a2b",
        },
        "classes": classes,
        "data": {"train": "5f0c", "valid": "91aa"},
        "parent": None,
        **changes,
    }


def step_row(step, seed=0):
    noise = np.random.default_rng([seed, step]).normal()
    fade = math.exp(-step / 220)
    return StepRow(
        step=step,
        epoch=step / STEPS_PER_EPOCH,
        lr=0.05 * (1 + math.cos(math.pi * step / 625)),
        loss=0.35 + 1.95 * fade + 0.09 * noise,
        grad_norm=1.0 + fade,
        top1=min(1.0, max(0.0, 0.9 - 0.8 * fade + 0.04 * noise)),
    )


def log_row(step, seed=0, span=25):
    rows = [step_row(s, seed) for s in range(step - span + 1, step + 1)]
    return LogRow(
        step=step,
        epoch=step / STEPS_PER_EPOCH,
        lr=rows[-1].lr,
        loss=sum(row.loss for row in rows) / span,
        grad_norm=rows[-1].grad_norm,
        top1=sum(row.top1 for row in rows) / span,
        images_per_second=2300 + 40 * math.sin(step),
        data_wait=0.012 + 0.004 * math.cos(step),
    )


def score_row(step, images=1_500):
    hits = round(images * (0.86 - 0.5 * math.exp(-step / 150)))
    return ScoreRow(
        step=step,
        epoch=step / STEPS_PER_EPOCH,
        scored=images,
        top1=hits / images,
        top5=0.99,
        loss=0.4 + math.exp(-step / 150),
        interval95=wilson_interval(hits, images),
    )


def write_history(folder: Path, last_step: int, *, first_step=0, seed=0):
    """What a training loop would record between two steps."""
    records = Records(folder)
    for step in range(first_step + 1, last_step + 1):
        records.add_steps([step_row(step, seed)])
        if step % 25 == 0:
            records.add_log(log_row(step, seed))
        if step % STEPS_PER_EPOCH == 0:
            records.add_score(score_row(step))
    records.flush(sync=True)


def make_predictions(images=1_500, classes=9, seed=0, accuracy=0.86):
    random = np.random.default_rng(seed)
    rows = []
    for index in range(images):
        label = int(random.integers(classes))
        others = [int(k) for k in random.permutation(classes) if k != label]
        ranked = [label, *others] if random.random() < accuracy else [others[0], label, *others[1:]]
        confidence = 1 - 0.6 * float(random.random())
        rows.append(
            Prediction(
                index=index,
                id=f"val/{index:05d}.png",
                label=label,
                top=tuple(ranked[:5]),
                confidence=confidence,
            )
        )
    return rows


def make_pictures(n, size=28):
    y, x = np.mgrid[0:size, 0:size]
    waves = [np.sin((x * (k + 1) + y * (k % 5 + 1)) / 6) * 110 + 128 for k in range(n)]
    grey = np.stack(waves).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=3)


def make_summary(**changes):
    score = score_row(625)
    values = {
        "steps": 625,
        "epochs": 5.0,
        "images": 40_000,
        "scored": score.scored,
        "top1": score.top1,
        "top5": score.top5,
        "interval95": score.interval95,
        "images_per_second": 2_310.5,
        "data_wait": 0.012,
        "weights_sha256": "ab" * 32,
        "best": BestScore(step=625, top1=score.top1),
        "checkpoint": "checkpoints/step-00000625",
        "bad_images": (),
        "finished": True,
    }
    return Summary(**{**values, **changes})


def make_run(path: Path, *, seed=0, lr="0.1", classes=CLASSES, accuracy=0.86, **facts) -> RunFolder:
    """A finished run."""
    run = create_run(
        path, config_text=CONFIG.format(lr=lr), facts=make_facts(classes=classes, **facts)
    )
    write_history(path, STEPS_PER_EPOCH * EPOCHS, seed=seed)
    rows = make_predictions(classes=len(classes), seed=seed, accuracy=accuracy)
    write_predictions(path, rows, classes=classes)
    worst = [rows[at].index for at in find_worst_mistakes(rows)]
    write_worst_mistakes(path, worst, pixels=make_pictures(len(worst)), step=625)
    write_summary(path, make_summary())
    (path / "checkpoints" / "step-00000625").mkdir(parents=True)
    return run
