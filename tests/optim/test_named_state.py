"""What an optimizer remembers goes through a checkpoint and back."""

import pytest
import torch
from safetensors.torch import load, save

from phalanx.optim.build import build_optimizer
from phalanx.optim.named_state import name_optimizer_state, restore_optimizer_state
from small_steps import DEVICES, RULES, go, settings_of, toy, trained

SLOTS = {
    "sgd": {"momentum_buffer"},
    "momentum": {"momentum_buffer"},
    "nesterov": {"momentum_buffer"},
    "sgd_combined": {"velocity", "velocity_scale"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "rmsprop": {"step", "square_avg", "momentum_buffer"},
    "rmsprop_tf": {"square_avg", "momentum_buffer"},
    "lars": {"velocity"},
    "lamb": {"step", "exp_avg", "exp_avg_sq"},
}


def through_a_file(tensors):
    """As a checkpoint writes them: on the host, in plain order."""
    return load(save({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}))


@pytest.mark.parametrize("rule", RULES)
def test_state_is_filed_under_the_names_of_the_parameters(rule):
    model, optimizer = trained(rule, 2)
    names = {f"{name}:{slot}" for name, _ in model.named_parameters() for slot in SLOTS[rule]}
    assert set(name_optimizer_state(model, optimizer)) == names


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
def test_a_resume_in_the_middle_gives_the_same_bits(rule, device):
    steps = range(35, 45)  # the velocity's scale changes at 40
    whole, first = trained(rule, 35, device)
    weights = through_a_file(whole.state_dict())
    kept = through_a_file(name_optimizer_state(whole, first))
    resumed = toy(device)
    resumed.load_state_dict(weights)
    # another scale than the saved one: what is saved must count
    second = build_optimizer(resumed, settings_of(rule, velocity_scale=7.0))
    restore_optimizer_state(resumed, second, kept)
    go(whole, first, steps)
    go(resumed, second, steps)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)
    before, after = name_optimizer_state(whole, first), name_optimizer_state(resumed, second)
    assert set(before) == set(after)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
        assert value.dtype == after[name].dtype and value.device == after[name].device, name


@pytest.mark.parametrize("rule", RULES)
def test_restored_slots_have_the_weights_memory_layout(rule):
    model, optimizer = trained(rule, 1)
    other = build_optimizer(model, settings_of(rule))
    kept = through_a_file(name_optimizer_state(model, optimizer))
    restore_optimizer_state(model, other, kept)
    sizes = 0
    for weight in model.parameters():
        for slot, value in other.state[weight].items():
            assert not value.requires_grad
            if value.shape == weight.shape:
                assert value.stride() == weight.stride(), slot
                sizes += 1
    assert sizes >= len(list(model.parameters()))
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_restored_slots_keep_their_dtype():
    model, optimizer = trained("adamw", 1)
    kept = name_optimizer_state(model, optimizer)
    kept["conv.weight:exp_avg"] = kept["conv.weight:exp_avg"].bfloat16()
    restore_optimizer_state(model, optimizer, kept)
    slots = optimizer.state[model.conv.weight]
    assert slots["exp_avg"].dtype == torch.bfloat16
    assert slots["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("rule", ["sgd", "rmsprop", "rmsprop_tf"])
def test_velocities_begin_and_end_with_momentum(rule):
    model, optimizer = trained(rule, 2)
    whole = through_a_file(name_optimizer_state(model, optimizer))
    still = build_optimizer(model, settings_of(rule, momentum=0.0))
    restore_optimizer_state(model, still, whole)
    go(model, still, range(2, 4))
    kept = through_a_file(name_optimizer_state(model, still))
    assert {name.rpartition(":")[2] for name in kept} == SLOTS[rule] - {"momentum_buffer"}
    moving = build_optimizer(model, settings_of(rule))
    restore_optimizer_state(model, moving, kept)
    go(model, moving, range(4, 6))
    assert set(name_optimizer_state(model, moving)) == set(whole)
