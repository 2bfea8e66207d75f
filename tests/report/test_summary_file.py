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
        (lambda values: values.update(best=3), "best cannot be 3"),
        (lambda values: values.update(top1="high"), "top1 cannot be 'high'"),
        (lambda values: values.update(interval95=[0.1]), "interval95.1 cannot be"),
    ],
)
def test_other_keys_are_named(tmp_path, change, told):
    write_summary(tmp_path, make_summary())
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=told):
        read_summary(tmp_path)


def test_the_names_of_earlier_versions_are_read(tmp_path):
    numerics = {"updates_lost": 0.5, "gradients_zero": 0.0, "gradients_not_finite": 0}
    numerics |= {"skipped_steps": 0, "loss_scales": [[0, 1024.0]], "way_lost": 0.25}
    rates = {"verdict": "it keeps up", "come": 2700.0, "eaten": 27.0, "stages": {"read": 9000.0}}
    write_summary(tmp_path, make_summary())
    edit(tmp_path, lambda values: values.update(numerics=numerics, input=rates))
    summary = read_summary(tmp_path)
    assert summary.numerics.lost_to_rounding == 0.25
    assert summary.input.images_per_second_available == 2700.0
    assert summary.input.images_per_second_needed == 27.0
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary
    assert not {"way_lost", "come", "eaten"} & {
        *json.loads((tmp_path / "summary.json").read_text())["numerics"],
        *json.loads((tmp_path / "summary.json").read_text())["input"],
    }


def test_a_missing_summary_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"summary\.json: cannot be read"):
        read_summary(tmp_path)
