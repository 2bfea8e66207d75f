"""What kernels do after a step's passes is what the optimizers do, without waiting."""

import json
import os
from itertools import pairwise
from weakref import ref

import pytest
import torch

from phalanx.engine.dynamic_loss_scale import (
    GROWTH_INTERVAL,
    REMEMBERED_CHANGES,
    SMALLEST_SCALE,
    DynamicLossScale,
)
from phalanx.engine.fused_update import DeviceLossScale, FusedUpdate, can_fuse_update
from phalanx.engine.state import TrainState
from phalanx.engine.step import MicroBatch, StepOptions, train_step
from phalanx.engine.weight_average import WeightAverage
from phalanx.fused.half_copies import attach_half_copies, find_half_copy
from phalanx.optim.build import build_optimizer
from phalanx.optim.named_state import name_optimizer_state, restore_optimizer_state
from phalanx.optim.offload import OffloadedState
from small_gpu import not_waiting
from small_steps import CUDA, DEVICES, RULES, give_gradients, rate_at, scale_at, settings_of, toy

FUSED_RULES = [rule for rule in RULES if rule not in ("lars", "lamb")]
RATIO = 4.0
# between the two ways at most so many operations round differently, by half a unit each, of
# numbers no larger than the largest of their tensor
ROUNDINGS = 16 * 2.0**-24


def build_state(rule, device, *, fused, scaler=None, clip=(0.0, 0.0), decay=0.0, **changes):
    model = toy(device)
    optimizer = build_optimizer(model, settings_of(rule, **changes))
    state = TrainState(model, optimizer, scaler=scaler)
    if decay:
        state.average = WeightAverage(model, decay=decay)
    if fused:
        if scaler is not None:
            state.scaler = DeviceLossScale(scaler, next(model.parameters()).device)
        state.fused_update = FusedUpdate(
            optimizer,
            clip_norm=clip[0],
            clip_value=clip[1],
            velocity_ratio=RATIO,
            scaler=state.scaler,
            average=state.average,
        )
    return state


def take_steps(state, steps, *, clip=(0.0, 0.0), bad=(), without=()):
    """Steps with gradients drawn from numbers; gives what each returned."""
    combined = "velocity_scale" in state.optimizer.param_groups[0]
    device = next(state.model.parameters()).device
    options = StepOptions(
        label_smoothing=0.0,
        device_type=device.type,
        half=None,
        clip_norm=clip[0],
        clip_value=clip[1],
        velocity_ratio=RATIO if combined else None,
    )
    nothing = MicroBatch(torch.zeros(1, device=device), torch.zeros(1, device=device), 0)
    rows = []
    for step in steps:

        def forward_backward(_, scale, step=step):
            give_gradients(state.model, step)
            for name, weight in state.model.named_parameters():
                weight.grad = None if name in without else weight.grad.mul_(scale)
            if step in bad:
                state.model.fc.weight.grad[0, 0] = float("inf")
            state.model.norm.running_mean.add_(step + 1.0)
            state.model.norm.num_batches_tracked.add_(1)
            return torch.tensor([0.5, 0.25], device=device)

        rows.append(
            train_step(
                state,
                [nothing],
                rate_at(step),
                options=options,
                forward_backward=forward_backward,
                loss_scale=scale_at(step),
            )
        )
    return rows


def tensors_in(state):
    found = {name: tensor.detach() for name, tensor in state.model.state_dict().items()}
    found |= name_optimizer_state(state.model, state.optimizer)
    if state.average is not None:
        found |= {f"average of {name}": t for name, t in state.average.tensors().items()}
    return found


def assert_nearly_equal(state, other):
    one, two = tensors_in(state), tensors_in(other)
    assert set(one) == set(two)
    for name, value in one.items():
        assert value.dtype == two[name].dtype and value.shape == two[name].shape, name
        if value.dtype == torch.float32 and value.dim():
            error = (value - two[name]).abs().max()
            assert error <= ROUNDINGS * max(1.0, float(value.abs().max())), name
        else:
            assert value.cpu() == two[name].cpu(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [(0.0, 0.0), (1.0, 0.3)])
@pytest.mark.parametrize("rule", FUSED_RULES)
def test_weights_state_and_averages_are_those_of_the_optimizers(rule, clip, device):
    ways = []
    for fused in (True, False):
        state = build_state(rule, device, fused=fused, clip=clip, decay=0.9)
        rows = take_steps(state, (18, 19, 20, 21), clip=clip, without=("group.bias",))
        ways.append((state, torch.stack(rows)))
    (one, fused_rows), (two, rows) = ways
    assert torch.allclose(fused_rows, rows, rtol=1e-6) and (rows[:, 1] > 1).all()
    assert_nearly_equal(one, two)
    moved = (one.model.fc.weight - toy(device).fc.weight).abs().max()
    assert moved > 0.01 and torch.equal(one.model.group.bias, toy(device).group.bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", FUSED_RULES)
def test_a_group_of_weights_has_its_own_rate(rule, device):
    one, two, plain = (
        build_state(rule, device, fused=fused, norm_bias_lr_scale=scale)
        for fused, scale in ((True, 4.0), (False, 4.0), (True, 1.0))
    )
    for state in (one, two, plain):
        take_steps(state, range(3))
    assert_nearly_equal(one, two)
    assert (one.model.norm.bias - plain.model.norm.bias).abs().max() > 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["sgd", "rmsprop", "rmsprop_tf"])
def test_without_momentum_there_is_no_velocity(rule, device):
    one, two = (build_state(rule, device, fused=fused, momentum=0.0) for fused in (True, False))
    for state in (one, two):
        take_steps(state, range(3))
    assert_nearly_equal(one, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["adamw", "sgd_combined", "nesterov"])
def test_a_step_that_overflows_is_skipped_as_without_kernels(rule, device):
    ways = []
    for fused in (True, False):
        scaler = DynamicLossScale(scale=256.0, finite_steps=GROWTH_INTERVAL - 2)
        state = build_state(rule, device, fused=fused, scaler=scaler, decay=0.9)
        rows = take_steps(state, range(6), bad=(0, 3))
        ways.append((state, torch.stack(rows)))
    (one, fused_rows), (two, rows) = ways
    assert torch.allclose(fused_rows, rows, rtol=1e-6)
    assert (rows[:, 1] == 0).tolist() == [True, False, False, True, False, False]
    assert one.scaler.read() == two.scaler
    assert one.scaler.to_dict() == two.scaler.to_dict()
    assert one.scaler.history == [(1, 128.0), (4, 64.0)] and one.scaler.skipped == 2
    assert one.scaler.multiplier == one.scaler.scale == 64.0
    assert_nearly_equal(one, two)


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_step_changes_no_bit(device):
    state = build_state("adamw", device, fused=True, scaler=DynamicLossScale(8.0), decay=0.9)
    take_steps(state, range(2))
    before = {name: value.clone() for name, value in tensors_in(state).items()}
    take_steps(state, (2,), bad=(2,))
    seen = ("norm.running_mean", "norm.num_batches_tracked")  # a pass has changed them
    for name, value in tensors_in(state).items():
        assert torch.equal(value, before[name]) == (name not in seen), name
    assert all(weight.grad is None for weight in state.model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_scale_on_the_device_does_what_one_on_the_host_does(device):
    finite = torch.rand(40, generator=torch.manual_seed(0)) > 0.4
    past = [(-n, 8.0) for n in range(REMEMBERED_CHANGES - 5, 0, -1)]
    host = DynamicLossScale(2.0**-10, GROWTH_INTERVAL - 1, 7, past)
    state = build_state("sgd", device, fused=True, scaler=host)
    weight = state.model.fc.weight
    for step, is_finite in enumerate([True, *finite.tolist()]):
        weight.grad = torch.zeros_like(weight) if is_finite else torch.full_like(weight, torch.nan)
        state.fused_update.apply(step, 0.0, 1.0)
        (host.record_finite_step if is_finite else host.record_overflow)(step)
    found = state.scaler.read()
    assert found == host and len(found.history) == REMEMBERED_CHANGES
    assert found.scale == SMALLEST_SCALE and (0, 2.0**-9) in found.history
    steps = [step for step, _ in found.history]
    assert all(one < two for one, two in pairwise(steps))


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_scale_on_the_device_survives_a_save(device):
    state = build_state("sgd", device, fused=True, scaler=DynamicLossScale(2.0**10))
    take_steps(state, range(4), bad=(1, 2))
    values = json.loads(json.dumps(state.to_dict()))
    on_host = DynamicLossScale(256.0, 1, 2, [(2, 512.0), (3, 256.0)])
    assert values["scaler"] == json.loads(json.dumps(on_host.to_dict()))
    other = build_state("sgd", device, fused=True, scaler=DynamicLossScale(4.0))
    where = other.scaler.numbers.data_ptr()
    other.load_dict(values)
    assert other.scaler.read() == state.scaler.read() and other.scaler.multiplier == 256
    assert other.scaler.numbers.data_ptr() == where, "kernels know no other place"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", FUSED_RULES)
def test_offloaded_state_is_updated_to_the_same_bits(rule, device):
    here, elsewhere = (build_state(rule, device, fused=True) for _ in range(2))
    elsewhere.offload = OffloadedState(elsewhere.optimizer)
    for step in range(4):
        for state in (here, elsewhere):
            take_steps(state, (step,))
    elsewhere.offload.synchronize()
    one, two = tensors_in(here), tensors_in(elsewhere)
    assert set(one) == set(two)
    for name, value in one.items():
        assert torch.equal(value.cpu(), two[name].cpu()), name


MOVING = {
    "weights": lambda state: state.model.parameters(),
    "buffers": lambda state: state.model.buffers(),
    "state": lambda state: name_optimizer_state(state.model, state.optimizer).values(),
    "averages": lambda state: state.average.tensors().values(),
    "copies": lambda state: [find_half_copy(state.model.fc.weight)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", MOVING)
def test_tensors_that_lie_elsewhere_are_seen(what, device):
    still, moving = (build_state("adamw", device, fused=True, decay=0.9) for _ in range(2))
    gradients = [torch.full_like(weight, 0.5) for weight in still.model.parameters()]
    left = []  # nobody else gets the memory that they left
    for state in (still, moving):
        attach_half_copies(state.model.modules(), torch.float16)
        weights = list(state.model.parameters())
        for step in range(1, 4):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            state.fused_update.apply(step, 0.1, 1.0)
            state.model.norm.running_mean.add_(step)
            for tensor in MOVING[what](state) if state is moving else ():
                left.append(tensor.detach())
                tensor.data = tensor.detach().clone()
    for name, value in tensors_in(still).items():
        assert torch.equal(value, tensors_in(moving)[name]), name
    weight = moving.model.fc.weight
    assert torch.equal(find_half_copy(weight), weight.half())


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_freed(device):
    state = build_state("sgd", device, fused=True, decay=0.9)
    for step in range(3):
        give_gradients(state.model, step)
        known = [ref(weight.grad) for weight in state.model.parameters()]
        state.fused_update.apply(step, 0.1, 1.0)
        assert known and all(gradient() is None for gradient in known)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_copies_in_16_bits_follow_their_weights(half, device):
    if half == torch.bfloat16 and device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter cuts off bits where a GPU rounds to bfloat16")
    state = build_state("sgd", device, fused=True)
    attach_half_copies(state.model.modules(), half)
    take_steps(state, range(2))
    copies = {name: find_half_copy(w) for name, w in state.model.named_parameters()}
    found = {name for name, copy in copies.items() if copy is not None}
    assert found == {"conv.weight", "fc.weight"}
    for name in found:
        weight = state.model.get_parameter(name)
        assert not torch.equal(weight, toy(device).get_parameter(name))
        assert torch.equal(copies[name], weight.to(half)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", FUSED_RULES)
def test_a_resume_in_the_middle_gives_the_same_bits(rule, device):
    whole = build_state(rule, device, fused=True)
    take_steps(whole, range(38, 40))
    resumed = build_state(rule, device, fused=True)
    resumed.model.load_state_dict(whole.model.state_dict())
    kept = {n: t.cpu() for n, t in name_optimizer_state(whole.model, whole.optimizer).items()}
    restore_optimizer_state(resumed.model, resumed.optimizer, kept)
    for state in (whole, resumed):
        take_steps(state, range(40, 43))  # the velocity's scale changes at 40
    one, two = tensors_in(whole), tensors_in(resumed)
    assert set(one) == set(two)
    for name, value in one.items():
        assert torch.equal(value, two[name]) and value.device == two[name].device, name


def test_what_the_kernels_cannot_do_is_left_to_the_optimizers(monkeypatch):
    monkeypatch.setattr("phalanx.engine.fused_update.find_fused", lambda name: print)
    for rule in RULES:
        model = toy()
        assert not can_fuse_update(model, build_optimizer(model, settings_of(rule))), "on a CPU"


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu_most_optimizers_are_fused(rule, device):
    model = toy(device)
    optimizer = build_optimizer(model, settings_of(rule))
    assert can_fuse_update(model, optimizer) == (rule in FUSED_RULES)
    assert not can_fuse_update(model.half(), optimizer)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("rule", FUSED_RULES)
def test_a_step_with_a_loss_scale_that_adapts_waits_for_nothing(rule, device):
    state = build_state(rule, device, fused=True, scaler=DynamicLossScale(8.0), decay=0.9)
    take_steps(state, range(3))
    weights = list(state.model.parameters())
    gradients = [torch.randn_like(weight) for weight in weights]
    with not_waiting():
        for step in range(3, 6):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            state.fused_update.apply(step, 0.1, 1.0)
    assert state.scaler.read().finite_steps == 6


@pytest.mark.parametrize("device", [CUDA])
def test_a_graph_replays_an_update_with_another_rate_and_scale(device):
    ways = []
    for captured in (True, False):
        state = build_state("adamw", device, fused=True, decay=0.9)
        take_steps(state, range(2))
        updater, weights = state.fused_update, list(state.model.parameters())
        gradients = [torch.ones_like(weight) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        launch = updater.launch
        if captured:
            updater.prepare(3, 0.0, 1.0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                updater.launch()
            launch = graph.replay
        for step in range(3, 6):
            updater.prepare(step, 0.1 * step, 2.0**step)
            launch()
        ways.append(tensors_in(state))
    for name, value in ways[0].items():
        assert torch.equal(value, ways[1][name]), name
