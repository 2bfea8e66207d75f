from contextlib import suppress

import numpy as np
import pytest

from phalanx.errors import CheckpointError
from phalanx.report.predictions import (
    Prediction,
    confusion_matrix,
    find_worst_mistakes,
    read_predictions,
    read_worst_mistakes,
    write_predictions,
    write_worst_mistakes,
)
from synthetic_run import make_pictures, make_predictions


def prediction(index, label, top, confidence, name="x.png"):
    return Prediction(index=index, id=name, label=label, top=top, confidence=confidence)


def test_predictions_read_back_bit_for_bit(tmp_path):
    rows = [
        *make_predictions(images=50),
        prediction(50, 0, (1, 0), 1 / 3, name='odd, "name"\nwith lines\u00e9.png'),
        prediction(52, 0, (1, 0), 0.5, name="a\rreturn.png"),
        prediction(51, 0, (1, 0), 0.5, name=b"latin-\xe9.png".decode(errors="surrogateescape")),
    ]
    write_predictions(tmp_path, rows, classes="abcdefghi")
    assert read_predictions(tmp_path) == rows


def test_few_classes_leave_cells_empty(tmp_path):
    rows = [prediction(7, 1, (1, 0, 2), 0.5), prediction(8, 0, (2, 0, 1), 0.5)]
    write_predictions(tmp_path, rows, classes=["cat", "dog", "tit, great"])
    header, right, wrong = (tmp_path / "predictions.csv").read_text().splitlines()
    assert header == "index,id,label,top1,top2,top3,top4,top5,confidence,class,predicted"
    assert right == "7,x.png,1,1,0,2,,,0.5,dog,dog"
    assert wrong == '8,x.png,0,2,0,1,,,0.5,cat,"tit, great"'


def test_predictions_of_earlier_releases_have_no_names(tmp_path):
    header = "index,id,label,top1,top2,top3,top4,top5,confidence"
    (tmp_path / "predictions.csv").write_text(f"{header}\n7,x.png,1,1,0,2,,,0.5\n")
    assert read_predictions(tmp_path) == [prediction(7, 1, (1, 0, 2), 0.5)]


def test_without_an_evaluation_there_is_nothing_to_read(tmp_path):
    assert read_predictions(tmp_path) == []
    assert read_worst_mistakes(tmp_path) is None


def test_the_surest_mistakes_come_first_and_hits_never():
    rows = [
        prediction(0, 1, (1,), 0.99),
        prediction(1, 1, (0,), 0.40),
        prediction(2, 1, (0,), 0.90),
        prediction(3, 1, (2,), 0.90),
    ]
    assert find_worst_mistakes(rows) == [2, 3, 1]
    assert find_worst_mistakes(rows, n=1) == [2]


def test_pictures_read_back(tmp_path):
    pixels = make_pictures(3)
    write_worst_mistakes(tmp_path, [9, 4, 7], pixels=pixels, step=125)
    worst = read_worst_mistakes(tmp_path)
    assert worst.step == 125
    assert worst.indices.tolist() == [9, 4, 7]
    assert np.array_equal(worst.pixels, pixels)


def test_pictures_of_another_shape_are_our_own_mistake(tmp_path):
    with pytest.raises(ValueError, match="uint8"):
        write_worst_mistakes(tmp_path, [0], pixels=np.zeros((1, 8, 8), dtype=np.uint8), step=1)
    with pytest.raises(ValueError, match="2 indices for 1"):
        write_worst_mistakes(tmp_path, [0, 1], pixels=make_pictures(1), step=1)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "worst.npz").write_bytes(b"PK not a zip")
    with pytest.raises(CheckpointError, match=r"worst\.npz: is damaged"):
        read_worst_mistakes(tmp_path)
    (tmp_path / "predictions.csv").write_text("index,id\n1,x\n")
    with pytest.raises(CheckpointError, match=r"predictions\.csv: is damaged"):
        read_predictions(tmp_path)


def test_confusion_counts_true_classes_down_and_guesses_across():
    counts = confusion_matrix([0, 0, 2, 2, 2], [0, 1, 2, 0, 0], classes=3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 0], [2, 0, 1]]


def test_thumbnails_with_any_byte_flipped_are_read_or_refused(tmp_path):
    write_worst_mistakes(tmp_path, [9, 4], pixels=make_pictures(2), step=125)
    data = (tmp_path / "worst.npz").read_bytes()
    for place in [*range(0, len(data), 101), *range(len(data) - 200, len(data))]:
        for mask in (1, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= mask
            (tmp_path / "worst.npz").write_bytes(damaged)
            with suppress(CheckpointError):
                read_worst_mistakes(tmp_path)
