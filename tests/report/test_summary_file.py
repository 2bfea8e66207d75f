import json

import pytest

from phalanx.errors import CheckpointError
from phalanx.report.summary import read_summary, write_summary
from synthetic_run import make_summary


@pytest.mark.parametrize(
    "changes",
    [{}, {"best": None, "top1": None, "top5": None, "interval95": None, "scored": None}],
)
def test_a_summary_reads_back(tmp_path, changes):
    summary = make_summary(**changes)
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary


def test_scripts_find_the_documented_keys(tmp_path):
    write_summary(tmp_path, make_summary())
    values = json.loads((tmp_path / "summary.json").read_text())
    assert values["best"] == {"step": 625, "top1": 0.852}
    assert values["interval95"] == pytest.approx([0.8331, 0.8691], abs=1e-4)
    assert set(values) >= {"steps", "epochs", "images", "scored", "top1", "top5", "finished"}
    assert set(values) >= {"images_per_second", "data_wait", "weights_sha256", "bad_images"}


def edit(folder, change):
    path = folder / "summary.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda values: values.pop("top1"), "lacks top1"),
        (lambda values: values.update(f1=0.5), "has unknown f1"),
        (lambda values: values["best"].pop("step"), "lacks step"),
        (lambda values: values.update(best=3), "3 is no best"),
    ],
)
def test_other_keys_are_named(tmp_path, change, told):
    write_summary(tmp_path, make_summary())
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=told):
        read_summary(tmp_path)


def test_a_missing_summary_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"summary\.json: cannot be read"):
        read_summary(tmp_path)
