"""Which part of a step each piece of work belongs to, from hand-made events as a GPU gives them."""

import pytest

from phalanx.profile.attribution import Label, attribute_events, list_pass_order
from phalanx.profile.step_table import build_step_table

HOST, AUTOGRAD, GPU = 10, 11, 7


def timed(name: str, start: float, took: float, *, cat: str, tid: int = HOST, **args) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": took, "tid": tid, "args": args}


def mark(name: str, start: float, took: float) -> dict:
    return timed(name, start, took, cat="user_annotation")


def launch(at: float, number: int, tid: int = HOST, name: str = "cudaLaunchKernel") -> dict:
    return timed(name, at, 1, cat="cuda_runtime", tid=tid, correlation=number)


def kernel(name: str, start: float, took: float, number: int) -> dict:
    return timed(name, start, took, cat="kernel", tid=GPU, correlation=number)


def forward_op(number: int, at: float) -> dict:
    return timed("aten::op", at, 2, cat="cpu_op", **{"Sequence number": number})


def node(number: int | None, at: float, took: float) -> dict:
    name = "autograd::engine::evaluate_function: OpBackward"
    args = {} if number is None else {"Sequence number": number}
    return timed(name, at, took, cat="cpu_op", tid=AUTOGRAD, **args)


def make_plain_step() -> list[dict]:
    """Two units forward on one thread, and back on another, with an update after them."""
    return [
        mark("data", 0, 10),
        mark("step", 10, 190),
        mark("forward", 20, 40),
        mark("stem forward", 22, 10),
        forward_op(5, 23),
        launch(24, 1),
        mark("head forward", 40, 10),
        forward_op(6, 41),
        launch(42, 2),
        mark("loss", 62, 8),
        forward_op(7, 63),
        launch(64, 3),
        mark("backward", 70, 60),
        node(7, 72, 5),
        launch(73, 4, AUTOGRAD),
        node(6, 80, 10),
        launch(81, 5, AUTOGRAD),
        node(5, 95, 10),
        launch(96, 6, AUTOGRAD),
        node(None, 106, 5),  # stores the gradient
        launch(107, 7, AUTOGRAD),
        mark("update", 130, 20),
        launch(132, 8),
        kernel("conv", 30, 20, 1),
        kernel("linear", 50, 5, 2),
        kernel("softmax", 66, 2, 3),
        kernel("softmax_back", 75, 2, 4),
        kernel("linear_back", 82, 8, 5),
        kernel("conv_back", 98, 30, 6),
        kernel("add", 128, 1, 7),
        kernel("sgd", 140, 4, 8),
    ]


def make_replayed_step(names: list[str]) -> list[dict]:
    """The same from a graph: every kernel has the number of the only launch."""
    return [
        mark("data", 0, 10),
        mark("step", 10, 190),
        mark("replay", 20, 4),
        launch(21, 1, name="cudaGraphLaunch"),
        mark("update", 26, 10),
        launch(27, 2),
        *(kernel(name, 40 + 10 * place, 8, 1) for place, name in enumerate(names)),
        kernel("sgd", 180, 4, 2),
    ]


def read_labels(events: list[dict], **more) -> dict[str, Label]:
    return {
        work.name: work.label for work in attribute_events(events, ["stem", "head"], **more).device
    }


def test_a_kernel_belongs_to_the_unit_whose_line_launched_it():
    assert read_labels(make_plain_step()) == {
        "conv": ("stem", "forward"),
        "linear": ("head", "forward"),
        "softmax": ("loss", "forward"),
        "softmax_back": ("loss", "backward"),
        "linear_back": ("head", "backward"),
        "conv_back": ("stem", "backward"),
        "add": ("stem", "backward"),
        "sgd": ("update", ""),
    }


def test_replayed_kernels_have_the_units_of_the_pass_before_their_capture():
    order = list_pass_order(attribute_events(make_plain_step(), ["stem", "head"]))
    names = [name for name, _ in order]
    assert names[0] == "conv"
    assert "sgd" not in names
    found = attribute_events(make_replayed_step(names), ["stem", "head"], order)
    assert found.matched == 1
    labels = {work.name: work.label for work in found.device}
    assert labels["conv_back"] == ("stem", "backward")
    assert labels["sgd"] == ("update", "")
    # one more kernel, such as where gradients are added to others, goes with the one before it
    names.insert(names.index("linear_back") + 1, "accumulate")
    found = attribute_events(make_replayed_step(names), ["stem", "head"], order)
    assert {work.name: work.label for work in found.device}["accumulate"] == ("head", "backward")
    assert found.matched == pytest.approx(7 / 8)


def test_a_replay_of_something_else_has_no_units():
    order = list_pass_order(attribute_events(make_plain_step(), ["stem", "head"]))
    found = attribute_events(make_replayed_step(["a", "b", "conv", "c"]), ["stem", "head"], order)
    assert {work.label.part for work in found.device} == {"replay", "update"}
    table = build_step_table(found, ["stem", "head"], step=11, images=4, title="t")
    assert "graph, units unknown" in [part.part for part in table.parts]
    assert "25% of them were found" in table.notes[0]


def test_with_a_gpu_its_time_counts_and_the_rest_is_idle():
    found = attribute_events(make_plain_step(), ["stem", "head"])
    table = build_step_table(found, ["stem", "head"], step=11, images=4, title="t")
    times = {part.part: round(part.ms * 1000) for part in table.parts}
    assert times == {
        "waiting for data": 10,
        "stem": 51,
        "head": 13,
        "loss": 4,
        "update": 4,
        "device idle": 200 - 10 - 72,
    }
    assert [row.name for row in table.kernels][:2] == ["conv_back", "conv"]
    assert sum(row.share for row in table.kernels) == pytest.approx(1)


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no step"):
        attribute_events([mark("forward", 0, 1)], ["stem"])


def test_only_the_last_plain_pass_tells_the_order():
    first = [mark("forward", 12, 3), launch(13, 20), kernel("tuning", 16, 1, 20)]
    order = list_pass_order(attribute_events([*first, *make_plain_step()], ["stem", "head"]))
    assert "tuning" not in [name for name, _ in order]
    assert len(order) == 7


def test_what_a_node_calls_is_part_of_it_and_exchanges_are_known_by_their_kernels():
    inner = [node(7, 83, 4), launch(84, 20, AUTOGRAD), kernel("recomputed", 112, 3, 20)]
    sent = [launch(97, 21, AUTOGRAD), kernel("ncclDevKernel_AllReduce_Sum_f32", 150, 9, 21)]
    labels = read_labels([*make_plain_step(), *inner, *sent])
    assert labels["recomputed"] == ("head", "backward")
    assert labels["ncclDevKernel_AllReduce_Sum_f32"] == ("sum of gradients", "")


def test_a_transfer_between_stages_is_no_sum_of_gradients():
    sent = [
        mark("between stages", 52, 6),
        launch(53, 20),
        kernel("ncclDevKernel_SendRecv", 56, 9, 20),
    ]
    labels = read_labels([*make_plain_step(), *sent])
    assert labels["ncclDevKernel_SendRecv"] == ("between stages", "")


@pytest.mark.parametrize(("device", "is_noted"), [("cuda", True), ("cpu", False)])
def test_a_gpu_whose_kernels_are_not_recorded_is_noted(device, is_noted):
    events = [event for event in make_plain_step() if event["cat"] != "kernel"]
    found = attribute_events(events, ["stem", "head"])
    table = build_step_table(found, ["stem", "head"], step=11, images=4, title="t", device=device)
    note = "note: the driver gave no kernels: times are those of the host, which only launches them"
    assert (note in table.list_lines()) == is_noted
