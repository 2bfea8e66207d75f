"""Every update rule over fifty steps, against formulae in float64 and against torch."""

import warnings

import numpy as np
import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.optim.build import OPTIMIZERS, OptimSettings, build_optimizer, split_by_decay
from phalanx.optim.update import update_weights
from small_steps import (
    CUDA,
    DEVICES,
    RULES,
    give_gradients,
    gradient_at,
    rate_at,
    scale_at,
    settings_of,
    toy,
    trained,
)


def momentum_step(w, g, kept, s):
    kept["v"] = s.momentum * kept.get("v", 0) + g
    return w - s.lr * kept["v"]


def nesterov_step(w, g, kept, s):
    kept["v"] = s.momentum * kept.get("v", 0) + g
    return w - s.lr * (g + s.momentum * kept["v"])


def adam_direction(g, kept, s):
    first, second = s.betas
    kept["t"] = kept.get("t", 0) + 1
    kept["m"] = first * kept.get("m", 0) + (1 - first) * g
    kept["s"] = second * kept.get("s", 0) + (1 - second) * g**2
    mean = kept["m"] / (1 - first ** kept["t"])
    return mean / (np.sqrt(kept["s"] / (1 - second ** kept["t"])) + s.eps)


def adam_step(w, g, kept, s):
    return w - s.lr * adam_direction(g, kept, s)


def rmsprop_step(w, g, kept, s):
    kept["s"] = s.rmsprop_decay * kept.get("s", 0) + (1 - s.rmsprop_decay) * g**2
    kept["b"] = s.momentum * kept.get("b", 0) + g / (np.sqrt(kept["s"]) + s.eps)
    return w - s.lr * kept["b"]


def rmsprop_tf_step(w, g, kept, s):
    before = kept.get("s", s.rmsprop_start)
    kept["s"] = before + (g**2 - before) * (1 - s.rmsprop_decay)
    kept["b"] = s.momentum * kept.get("b", 0) + s.lr * g / np.sqrt(kept["s"] + s.eps)
    return w - kept["b"]


def lars_step(w, g, kept, s):
    ratio = 1.0
    if s.trusts:
        size, slope = np.linalg.norm(w), np.linalg.norm(g)
        ratio = s.trust_coefficient * size / (slope + s.trust_decay * size + s.eps)
        g = g + s.trust_decay * w
    kept["v"] = s.momentum * kept.get("v", 0) + s.lr * ratio * g
    return w - kept["v"]


def lamb_step(w, g, kept, s):
    direction, ratio = adam_direction(g, kept, s), 1.0
    if s.trusts:
        direction = direction + s.trust_decay * w
        ratio = np.linalg.norm(w) / np.linalg.norm(direction)
    return w - s.lr * ratio * direction


FORMULAE = {
    "sgd": momentum_step,
    "momentum": momentum_step,
    "nesterov": nesterov_step,
    "sgd_combined": momentum_step,  # the scale must not show
    "adamw": adam_step,
    "rmsprop": rmsprop_step,
    "rmsprop_tf": rmsprop_tf_step,
    "lars": lars_step,
    "lamb": lamb_step,
}


class Numbers:
    """Settings, learning rate and whether the weight has a trust ratio, for a formula."""

    def __init__(self, settings, lr, trusts):
        self.__dict__.update(vars(settings), lr=lr, trusts=trusts)


def expected(rule, steps, **changes):
    """The weights after some steps, in float64, by the formula with the two decays around it."""
    model, settings = toy(), settings_of(rule, **changes)
    decayed = {id(weight) for weight in split_by_decay(model)[0]}
    weights = {}
    for name, weight in model.named_parameters():
        trusts, kept = id(weight) in decayed, {}
        w = weight.detach().double().numpy().copy()
        for step in range(steps):
            g = gradient_at(step, name, w.shape).astype(np.float64)
            numbers = Numbers(settings, rate_at(step), trusts)
            if trusts:
                g = g + settings.l2 * w
                w = w - numbers.lr * settings.weight_decay * w
            w = FORMULAE[rule](w, g, kept, numbers)
        weights[name] = w
    return weights


def distance(model, weights):
    """The largest difference, over the largest weight."""
    return max(
        np.abs(w.detach().cpu().numpy() - weights[n]).max() / np.abs(weights[n]).max()
        for n, w in model.named_parameters()
    )


def test_the_table_and_the_formulae_have_the_same_rules():
    assert tuple(OPTIMIZERS) == tuple(FORMULAE) == RULES


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
def test_fifty_steps_match_the_formula_in_float64(rule, device, momentum):
    model, _ = trained(rule, 50, device, momentum=momentum)
    assert distance(model, expected(rule, 50, momentum=momentum)) < 2e-6


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_the_first_mean_square_of_rmsprop_tf_is_a_choice(start):
    model, _ = trained("rmsprop_tf", 5, rmsprop_start=start)
    assert distance(model, expected("rmsprop_tf", 5, rmsprop_start=start)) < 2e-6
    assert distance(model, expected("rmsprop_tf", 5, rmsprop_start=1 - start)) > 1e-2


def torch_groups(model, decay):
    decayed, spared = split_by_decay(model)
    return [{"params": decayed, "weight_decay": decay}, {"params": spared, "weight_decay": 0.0}]


def go_by_torch(model, optimizer, steps):
    for step in range(steps):
        give_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        optimizer.step()


TORCH = {  # torch's weight_decay is our weight_decay in its AdamW, and our l2 in the others
    "sgd": (lambda g: torch.optim.SGD(g, momentum=0.9), "l2"),
    "nesterov": (lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True), "l2"),
    "sgd_combined": (lambda g: torch.optim.SGD(g, momentum=0.9), "l2"),
    "adamw": (lambda g: torch.optim.AdamW(g, betas=(0.8, 0.95), eps=1e-3), "weight_decay"),
    "rmsprop": (lambda g: torch.optim.RMSprop(g, alpha=0.95, eps=1e-3, momentum=0.9), "l2"),
}


@pytest.mark.parametrize("rule", TORCH)
def test_fifty_steps_match_torch(rule):
    build, word = TORCH[rule]
    theirs = toy()
    model, _ = trained(rule, 50, **{"weight_decay": 0.0, "l2": 0.0, word: 0.05})
    go_by_torch(theirs, build(torch_groups(theirs, 0.05)), 50)
    weights = {n: w.detach().numpy() for n, w in theirs.named_parameters()}
    assert distance(model, weights) < 2e-6


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_fused_sgd_with_the_decay_before_it_bit_for_bit(momentum):
    model, _ = trained("sgd", 50, momentum=momentum, l2=0.0)
    theirs = toy()
    decayed, spared = split_by_decay(theirs)
    optimizer = torch.optim.SGD([*decayed, *spared], lr=0.0, momentum=momentum, fused=True)
    for step in range(50):
        give_gradients(theirs, step)
        optimizer.param_groups[0]["lr"] = lr = rate_at(step)
        with torch.no_grad():
            torch._foreach_mul_(decayed, 1 - lr * 0.02)
        optimizer.step()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_the_combined_velocity_is_kept_at_the_scale_of_the_moment():
    model, optimizer = trained("sgd_combined", 45)
    plain, reference = trained("sgd", 45)
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        kept, bare = optimizer.state[weight]["velocity"], reference.state[other]["momentum_buffer"]
        torch.testing.assert_close(kept, bare * scale_at(44), rtol=1e-5, atol=1e-3)
        # not a bit off: a velocity would else be brought to its own scale at every step
        assert float(optimizer.state[weight]["velocity_scale"]) == scale_at(44)


@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_a_weight_or_step_of_length_zero_has_a_trust_ratio_of_one(rule):
    model = toy()
    settings = settings_of(rule, weight_decay=0.0, l2=0.0, trust_decay=0.0, eps=0.5)
    optimizer = build_optimizer(model, settings)
    with torch.no_grad():
        model.conv.weight.zero_()
    before = model.fc.weight.detach().clone()
    model.conv.weight.grad = torch.full_like(model.conv.weight, 0.5)
    model.fc.weight.grad = torch.zeros_like(model.fc.weight)
    update_weights(optimizer, 0.1)
    # lars: lr * g; lamb: lr * g / (|g| + eps) on its first step
    expected_move = 0.1 * 0.5 if rule == "lars" else 0.1 * 0.5 / (0.5 + 0.5)
    assert torch.allclose(model.conv.weight, torch.tensor(-expected_move))
    assert torch.equal(model.fc.weight, before)


def test_lars_decays_a_weight_without_slope_at_the_full_rate():
    model = toy()
    settings = settings_of("lars", weight_decay=0.0, l2=0.0, trust_decay=0.5)
    before = model.fc.weight.detach().clone()
    model.fc.weight.grad = torch.zeros_like(model.fc.weight)
    update_weights(build_optimizer(model, settings), 0.1)
    torch.testing.assert_close(model.fc.weight.detach(), before * 0.95)


@pytest.mark.parametrize(("rule", "plain"), [("lars", "momentum"), ("lamb", "adamw")])
def test_norms_and_biases_have_no_trust_ratio(rule, plain):
    model, _ = trained(rule, 1, trust_decay=1.0)
    other, _ = trained(plain, 1)
    for ours, theirs in zip(split_by_decay(model)[1], split_by_decay(other)[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(split_by_decay(model)[0], split_by_decay(other)[0], strict=True):
        assert not torch.allclose(ours, theirs, rtol=1e-2)


def test_a_misspelt_rule_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--optimizer lams: .* did you mean 'lars'"):
        build_optimizer(toy(), OptimSettings(name="lams"))


@pytest.fixture
def waiting_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("rule", RULES)
def test_no_update_waits_for_the_device(rule, device, request):
    model, optimizer = trained(rule, 2, device)
    give_gradients(model, 2)
    request.getfixturevalue("waiting_is_an_error")
    update_weights(optimizer, 0.1)
    with pytest.raises(RuntimeError, match="synchronizing"):
        model.fc.weight.sum().item()
