"""The two decays, told apart, and what they spare."""

import pytest
import torch

from phalanx.optim.build import OptimSettings, build_optimizer, split_by_decay
from phalanx.optim.named_state import name_optimizer_state
from phalanx.optim.update import collect_gradients, update_weights
from small_steps import RULES, Toy, give_gradients, settings_of, toy, trained

NONE = {"weight_decay": 0.0, "l2": 0.0, "trust_decay": 0.0}
HEAVY = {"weight_decay": 2.0, "l2": 3.0, "trust_decay": 4.0}


def state_of(rule, **decays):
    model, optimizer = trained(rule, 5, **{**NONE, **decays})
    kept = {k: v for k, v in name_optimizer_state(model, optimizer).items() if v.dim()}
    return kept, dict(model.named_parameters())


def test_norms_and_biases_do_not_decay():
    model = Toy()
    decayed, spared = split_by_decay(model)
    assert [id(w) for w in decayed] == [id(model.conv.weight), id(model.fc.weight)]
    assert len(spared) == 6


@pytest.mark.parametrize("word", ["weight_decay", "l2"])
def test_plain_descent_cannot_tell_the_decays_apart(word):
    model, _ = trained("sgd", 5, momentum=0.0, **{**NONE, word: 0.1})
    other, _ = trained("sgd", 5, momentum=0.0, **{**NONE, "weight_decay": 0.1})
    bare, _ = trained("sgd", 5, momentum=0.0, **NONE)
    torch.testing.assert_close(model.fc.weight, other.fc.weight, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(model.fc.weight, bare.fc.weight, rtol=1e-3)


@pytest.mark.parametrize("word", ["weight_decay", "l2"])
def test_a_tenth_of_decay_takes_a_tenth_of_a_weight_at_rest(word):
    model = toy()
    settings = OptimSettings(momentum=0.0, **{**NONE, word: 0.1})
    with torch.no_grad():
        model.fc.weight.fill_(1.0)
    model.fc.weight.grad = torch.zeros_like(model.fc.weight)
    update_weights(build_optimizer(model, settings), 1.0)
    assert torch.allclose(model.fc.weight, torch.tensor(0.9))


# lars is left out of the next test: its velocity holds a ratio that looks at the weight itself
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "lars"])
def test_what_a_rule_remembers_never_sees_the_decay(rule):
    plain, plain_weights = state_of(rule)
    decayed, weights = state_of(rule, weight_decay=0.5)
    assert plain and all(torch.equal(decayed[key], value) for key, value in plain.items())
    assert not torch.allclose(weights["fc.weight"], plain_weights["fc.weight"], rtol=1e-2)


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_remembers_always_sees_l2(rule):
    plain, _ = state_of(rule)
    regularised, _ = state_of(rule, l2=0.5)
    for key, value in plain.items():
        seen = not torch.allclose(regularised[key], value, rtol=1e-3)
        assert seen == key.startswith(("conv.weight", "fc.weight")), key


@pytest.mark.parametrize("rule", RULES)
def test_norms_and_biases_are_spared_every_decay(rule):
    model = toy()
    optimizer = build_optimizer(model, settings_of(rule, **HEAVY))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(3):
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        update_weights(optimizer, 0.1)
    for name, weight in model.named_parameters():
        spared = name not in ("conv.weight", "fc.weight")
        assert torch.equal(weight, before[name]) == spared, name


@pytest.mark.parametrize("rule", RULES)
def test_a_weight_without_a_gradient_stays_as_it_is(rule):
    model = toy()
    optimizer = build_optimizer(model, settings_of(rule, **HEAVY))
    before = model.conv.weight.detach().clone()
    give_gradients(model, 0)
    model.conv.weight.grad = None
    assert len(collect_gradients(optimizer)) == len(list(model.parameters())) - 1
    update_weights(optimizer, 0.1)
    assert torch.equal(model.conv.weight, before)
    assert collect_gradients(optimizer) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_model_without_norms_and_biases_is_updated_too(rule):
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = build_optimizer(model, settings_of(rule))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    update_weights(optimizer, 0.1)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("rule", RULES)
def test_biases_of_norms_may_have_a_rate_of_their_own(rule):
    plain, slow, fast = (
        trained(rule, 1, norm_bias_lr_scale=scale, **NONE)[0] for scale in (1.0, 0.25, 4.0)
    )
    before = dict(toy().named_parameters())
    scaled = ("norm.bias", "group.bias")
    for (name, one), quarter, four in zip(
        plain.named_parameters(), slow.parameters(), fast.parameters(), strict=True
    ):
        step = one.detach() - before[name].detach()
        factors = (0.25, 4.0) if name in scaled else (1.0, 1.0)
        for moved, factor in zip((quarter, four), factors, strict=True):
            expected = before[name].detach() + factor * step
            torch.testing.assert_close(moved.detach(), expected, rtol=1e-4, atol=1e-6)


def test_a_rate_of_their_own_needs_norms_with_biases():
    optimizer = build_optimizer(torch.nn.Linear(3, 2), settings_of("sgd", norm_bias_lr_scale=64.0))
    assert len(optimizer.param_groups) == 2
