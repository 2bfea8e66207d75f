"""Weights and state of 16 bits: what every rule makes of them, what is lost, what is resumed."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from phalanx.optim.build import OptimSettings, build_optimizer
from phalanx.optim.half_weights import HALF_TYPES, HalfWeights
from phalanx.optim.named_state import name_optimizer_state, restore_optimizer_state
from phalanx.optim.update import collect_gradients, set_velocity_scale, update_weights
from phalanx.plan.draws import GOLDEN, splitmix64, stream_key
from small_rounding import round_to
from small_steps import DEVICES, RULES, give_gradients, rate_at, scale_at, settings_of, toy, trained

BF16, FP16 = torch.bfloat16, torch.float16
TYPES = list(HALF_TYPES.values())


def halved(dtype, device="cpu"):
    return toy(device).to(dtype)


def half_of(model, optimizer, stochastic=True, seed=0):
    return HalfWeights(model, optimizer, seed=seed, stochastic=stochastic, saturate=False)


def go_half(model, optimizer, steps, **how):
    """As small_steps.go, in 16 bits; what was counted at each step."""
    half, counts = half_of(model, optimizer, **how), []
    for step in steps:
        give_gradients(model, step)
        set_velocity_scale(optimizer, scale_at(step))
        with half.in_float32(step) as counted:
            update_weights(optimizer, rate_at(step))
        counts.append(counted)
    return counts


def trained_half(rule, steps, dtype, device="cpu", **changes):
    model = halved(dtype, device)
    optimizer = build_optimizer(model, settings_of(rule, **changes))
    go_half(model, optimizer, range(steps))
    return model, optimizer


def bits_of(tensors):
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def equal(one, two):
    return set(one) == set(two) and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_where_it_goes_in_float32(rule, dtype, device):
    exact, _ = trained(rule, 50, device, velocity_scale=1.0)
    short, _ = trained_half(rule, 50, dtype, device, velocity_scale=1.0)
    begun = dict(toy(device).named_parameters())
    for (name, one), two in zip(exact.named_parameters(), short.parameters(), strict=True):
        moved = (one - begun[name]).norm()
        astray = 50**0.5 * torch.finfo(dtype).eps / 2 * one.norm()  # by fifty roundings at most
        assert (two.float() - one).norm() < 0.05 * moved + astray, name


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule", RULES)
def test_weights_and_state_have_16_bits_from_the_first_step_on(rule, dtype):
    model = halved(dtype)
    optimizer = build_optimizer(model, settings_of(rule))
    parameters = list(model.parameters())
    places = [weight.data_ptr() for weight in parameters]
    for steps in (range(1), range(1, 2)):
        go_half(model, optimizer, steps)
        assert [id(weight) for weight in model.parameters()] == [id(one) for one in parameters]
        assert [weight.data_ptr() for weight in parameters] == places
        held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        assert held == {id(one) for one in parameters} == {id(one) for one in optimizer.state}
        for weight in parameters:
            assert weight.dtype == dtype and weight.requires_grad and weight.grad is None
            for name, value in optimizer.state[weight].items():
                if value.dim():
                    assert value.dtype == dtype and value.stride() == weight.stride(), name
                else:  # counts of steps and scales are not to be rounded
                    assert value.dtype in (torch.float32, torch.float64), name


def test_rounded_state_stays_in_its_memory():
    model, optimizer = trained_half("momentum", 1, BF16)
    places = {
        name: slot.data_ptr() for name, slot in name_optimizer_state(model, optimizer).items()
    }
    go_half(model, optimizer, range(1, 3))
    after = {name: slot.data_ptr() for name, slot in name_optimizer_state(model, optimizer).items()}
    assert len(places) == 8 and after == places


def test_a_rule_works_on_float32_and_in_the_weights_layout():
    model = halved(BF16)
    optimizer = build_optimizer(model, settings_of("adamw"))
    go_half(model, optimizer, range(1))
    give_gradients(model, 1)
    with half_of(model, optimizer).in_float32(1):
        own = [weight for group in optimizer.param_groups for weight in group["params"]]
        tensors = [*own, *collect_gradients(optimizer)]
        tensors += [value for slots in optimizer.state.values() for value in slots.values()]
        assert len(tensors) == 8 * 5 and {tensor.dtype for tensor in tensors} == {torch.float32}
        assert own[0].shape == model.conv.weight.shape
        for tensor in (own[0], own[0].grad, optimizer.state[own[0]]["exp_avg"]):
            assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_update_is_the_rules_own_then_rounded_with_the_weights_key(dtype, stochastic):
    model, seed, step = halved(dtype), 5, 11
    settings = settings_of("sgd")
    exact = toy()
    exact.load_state_dict(model.state_dict())
    give_gradients(model, 0)
    for one, two in zip(exact.parameters(), model.parameters(), strict=True):
        one.grad = two.grad.float()
    optimizer, reference = build_optimizer(model, settings), build_optimizer(exact, settings)
    with half_of(model, optimizer, stochastic, seed).in_float32(step):
        update_weights(optimizer, 0.1)
    update_weights(reference, 0.1)
    given = {**dict(model.named_parameters()), **name_optimizer_state(model, optimizer)}
    keys = set()
    for name, value in {
        **dict(exact.named_parameters()),
        **name_optimizer_state(exact, reference),
    }.items():
        base = np.array([stream_key(seed, f"rounding {name}", 0)])
        keys.add(key := int(splitmix64(base + GOLDEN + np.uint64(step))[0]))
        rounded = round_to(value.detach(), dtype, key=key, saturate=False, stochastic=stochastic)
        assert torch.equal(given[name], rounded), name
    assert len(keys) == 16


def test_weights_of_32_bits_are_let_be():
    model, exact = toy(), toy()
    model.conv.to(FP16)
    optimizer, reference = (build_optimizer(one, settings_of("adamw")) for one in (model, exact))
    for step in range(3):
        for one in (model, exact):
            give_gradients(one, step)
        with half_of(model, optimizer).in_float32(step) as counts:
            update_weights(optimizer, 0.1)
        update_weights(reference, 0.1)
    assert counts[4] == 4 * 3 * 3 * 3 + 4
    assert model.conv.weight.dtype == FP16 and torch.equal(model.fc.weight, exact.fc.weight)
    assert optimizer.state[model.fc.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model.conv.weight]["exp_avg"].dtype == FP16


def test_the_count_of_steps_of_a_single_number_is_not_rounded():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0, dtype=BF16))
    optimizer = build_optimizer(model, settings_of("adamw"))
    half = half_of(model, optimizer)
    for step in range(300):
        model.scale.grad = torch.ones_like(model.scale)
        with half.in_float32(step):
            update_weights(optimizer, 0.001)
    assert optimizer.state[model.scale]["step"].item() == 300.0
    assert model.scale.dtype == BF16 and 0.5 < model.scale.item() < 0.9


class Row(nn.Module):
    """Many equal weights: what happens to one happens to all, up to chance."""

    def __init__(self, start, dtype, count=20000):
        super().__init__()
        self.fc = nn.Linear(count, 1, bias=False)
        nn.init.constant_(self.fc.weight, start)
        self.to(dtype)


def descend(dtype, slope, stochastic, steps=50):
    """The weights after steps of 1 along a slope, from 1."""
    model = Row(1.0, dtype)
    optimizer = build_optimizer(model, OptimSettings(momentum=0.0))
    half = half_of(model, optimizer, stochastic)
    for step in range(steps):
        model.fc.weight.grad = torch.full_like(model.fc.weight, slope)
        with half.in_float32(step) as counts:
            update_weights(optimizer, 1.0)
    return model.fc.weight.detach().float(), counts.tolist()


@pytest.mark.parametrize("dtype", TYPES)
def test_tiny_updates_move_weights_in_the_mean_by_chance_alone(dtype):
    slope = 2.0**-16  # an eighth of half a step of float16 below 1, a 64th of one of bfloat16
    goal = 1 - 50 * slope
    stuck, counts = descend(dtype, slope, stochastic=False)
    assert (stuck == 1.0).all() and counts == [20000, 20000, 0, 0, 20000, 20000 * slope, 0]
    moved, counts = descend(dtype, slope, stochastic=True)
    error = moved.std() / len(moved.flatten()) ** 0.5
    assert abs(moved.mean() - goal) < 4 * error < (1 - goal) / 10
    assert 0.5 * 20000 < counts[0] < counts[1] == counts[4] == 20000
    assert counts[6] == pytest.approx(counts[5], rel=0.25)  # of 20,000 at least 78 moved


def test_gradients_that_are_gone_or_not_finite_are_counted_as_they_came():
    model = Row(1.0, FP16, count=10)
    optimizer = build_optimizer(model, OptimSettings(momentum=0.0))
    slopes = torch.ones(1, 10, dtype=FP16)
    slopes[0, :3], slopes[0, 3], slopes[0, 4] = 0.0, float("inf"), float("nan")
    model.fc.weight.grad = slopes
    with half_of(model, optimizer).in_float32(0) as counts:
        for gradient in collect_gradients(optimizer):
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        update_weights(optimizer, 1.0)
    assert counts.tolist() == [0, 5, 3, 2, 10, 5, 5]
    assert model.fc.weight.flatten().tolist() == [1.0] * 5 + [0.0] * 5


def test_a_gradient_is_unscaled_in_float32():
    model = Row(0.0, FP16, count=10)
    optimizer = build_optimizer(model, OptimSettings(momentum=0.0))
    model.fc.weight.grad = torch.full((1, 10), 2.0**-20, dtype=FP16)
    with half_of(model, optimizer).in_float32(0):
        torch._foreach_mul_(collect_gradients(optimizer), 2.0**-10)
        update_weights(optimizer, 2.0**20)
    assert (model.fc.weight == -(2.0**-10)).all()


def test_without_an_update_everything_keeps_its_bits():
    model, optimizer = trained_half("adamw", 3, BF16)
    before = bits_of({**model.state_dict(), **name_optimizer_state(model, optimizer)})
    give_gradients(model, 3)
    with half_of(model, optimizer).in_float32(3) as counts:
        optimizer.zero_grad(set_to_none=True)
    assert equal(before, bits_of({**model.state_dict(), **name_optimizer_state(model, optimizer)}))
    assert counts[:2].tolist() == [0, 0] and collect_gradients(optimizer) == []
    with half_of(model, optimizer).in_float32(4) as counts:
        update_weights(optimizer, 0.1)
    assert not counts.any()


def test_a_failure_within_leaves_weights_and_optimizer_as_they_were():
    model, optimizer = trained_half("momentum", 3, BF16)
    before = bits_of({**model.state_dict(), **name_optimizer_state(model, optimizer)})
    give_gradients(model, 3)
    with pytest.raises(KeyboardInterrupt), half_of(model, optimizer).in_float32(3):
        update_weights(optimizer, 0.1)
        raise KeyboardInterrupt
    assert equal(before, bits_of({**model.state_dict(), **name_optimizer_state(model, optimizer)}))


def test_a_backward_pass_after_an_update_gives_16_bits_again():
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(BF16)
    optimizer = build_optimizer(model, settings_of("sgd"))
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.dtype))
    for step in range(3):
        model(torch.ones(3, 4, dtype=BF16)).sum().backward()
        with half_of(model, optimizer).in_float32(step):
            update_weights(optimizer, 0.1)
    assert seen == [BF16] * 3


def through_a_file(tensors):
    return load(save({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_resume_in_the_middle_gives_the_same_bits(rule, dtype, device):
    steps = range(35, 45)
    whole, first = trained_half(rule, 35, dtype, device)
    weights = through_a_file(whole.state_dict())
    kept = through_a_file(name_optimizer_state(whole, first))
    resumed = halved(dtype, device)
    resumed.load_state_dict(weights)
    second = build_optimizer(resumed, settings_of(rule, velocity_scale=7.0))
    restore_optimizer_state(resumed, second, kept)
    counts = go_half(whole, first, steps), go_half(resumed, second, steps)
    assert torch.equal(torch.stack(counts[0]), torch.stack(counts[1]))
    assert equal(
        bits_of({**whole.state_dict(), **name_optimizer_state(whole, first)}),
        bits_of({**resumed.state_dict(), **name_optimizer_state(resumed, second)}),
    )


def test_a_run_repeats_and_another_seed_gives_another():
    runs = []
    for seed in (0, 0, 1):
        model = halved(BF16)
        go_half(model, build_optimizer(model, settings_of("sgd")), range(3), seed=seed)
        runs.append(bits_of(model.state_dict()))
    assert equal(runs[0], runs[1]) and not equal(runs[0], runs[2])
