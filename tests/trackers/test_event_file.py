"""TensorBoard's event files, written by us and read by its own package."""

import math

import pytest
from shown_numbers import read_tensorboard

from phalanx.trackers.event_file import (
    EventFile,
    build_hyperparameter_start,
    build_scalar_summary,
    build_text_summary,
)

pytest.importorskip("tensorboard")


def write(folder, steps):
    events = EventFile(folder / "tensorboard")
    newest = dict(events.newest)
    for step in steps:
        events.add_summary(build_scalar_summary({"train/loss": 1 / step}), step=step)
    events.close()
    return newest


def test_a_file_torn_at_any_byte_goes_on_with_whole_events(tmp_path):
    assert write(tmp_path, [1, 2]) == {}
    (file,) = tmp_path.glob("tensorboard/*")
    kept = file.stat().st_size
    assert write(tmp_path, [3]) == {"train/loss": 2}
    whole = file.read_bytes()
    for end in range(kept, len(whole)):
        file.write_bytes(whole[:end])
        assert write(tmp_path, [4, 5]) == {"train/loss": 2}
        assert [step for step, _ in read_tensorboard(tmp_path)["train/loss"]] == [1, 2, 4, 5]


def test_numbers_keep_their_sign_size_and_kind(tmp_path):
    values = {"a": -2.5, "b": math.inf, "c": 1e300, "d": 3, "e": math.nan, "ü/1": 0.1}
    events = EventFile(tmp_path / "tensorboard")
    events.add_summary(build_scalar_summary(values), step=2**40)
    events.close()
    shown = {name: points for name, points in read_tensorboard(tmp_path).items()}
    assert {step for points in shown.values() for step, _ in points} == {2**40}
    given = {name: points[0][1] for name, points in shown.items()}
    assert math.isnan(given.pop("e"))
    assert given == {"a": -2.5, "b": math.inf, "c": math.inf, "d": 3, "ü/1": pytest.approx(0.1)}


def test_texts_and_hyperparameters_reach_their_pages(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventFile(tmp_path)
    events.add_summary(
        build_text_summary("options", "| a | b\udcff |")
    )  # of a path that is no UTF-8
    chosen = {"lr": 0.1, "epochs": 2, "nesterov": True, "model": "resnet8", "mixup": None}
    events.add_summary(build_hyperparameter_start(chosen, group="run", begin=12.5))
    events.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tensors("options")[0].tensor_proto.string_val == [b"| a | b? |"]
    assert read.summary_metadata["options"].plugin_data.plugin_name == "text"
    content = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    assert (start.group_name, start.start_time_secs) == ("run", 12.5)
    values = {name: value for name, value in start.hparams.items()}
    assert values["lr"].number_value == 0.1 and values["epochs"].number_value == 2
    assert values["nesterov"].bool_value is True and values["model"].string_value == "resnet8"
    assert values["mixup"].string_value == "none"
