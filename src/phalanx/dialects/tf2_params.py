"""The parameters that the TensorFlow 2 program takes in braces: optimizer, rates, norms."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import yaml

from phalanx.dialects.numbers import (
    COUNT,
    EXPONENT,
    NOT_NEGATIVE,
    NUMBER,
    POSITIVE,
    NumberKind,
)
from phalanx.dialects.table import Effect, OldValues
from phalanx.dialects.tf2_values import count_all_updates, count_batch, count_updates, port_length
from phalanx.errors import ConfigError, suggest

_REQUIRED = {  # parameters of each optimizer
    "sgd": ("momentum",),
    "lars": ("momentum", "weight_decay", "eeta", "epsilon"),
    "rmsprop": ("momentum", "base_decay_exponent", "epsilon"),
}
_SMALLEST_RATE = 1e-18  # below it there is no rate to take shares of
_KERAS_MOMENTUM, _KERAS_EPSILON = 0.99, "1e-7"
_SCHEDULE_KEYS = {  # parameters of each schedule; the first ones have to be given
    "const": ("initial_learning_rate",),
    "cosine": ("initial_learning_rate", "epochs_to_total_decay"),
    "polynomial": (
        "initial_learning_rate",
        "epochs_to_total_decay",
        "end_learning_rate_ratio",
        "power",
    ),
    "stepped": ("boundaries", "values"),
}
_WARMUP_KEYS = ("warmup_mode", "warmup_epochs")
_NORM_KEYS = ("name", "momentum", "num_groups", "channels_per_group")
_NORMS = ("batch_norm", "custom_batch_norm", "group_norm")


# --- parameters in braces ---


def _read_params(values: OldValues, name: str) -> dict[str, Any]:
    """The parameters of an option such as --optimizer-params '{momentum: 0.9}'."""
    text = values.text(name)
    try:
        found = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        found = None
    if isinstance(found, dict):
        return {str(key): value for key, value in found.items()}
    raise ConfigError(
        f"--{name}: expected parameters in braces, such as '{{momentum: 0.9}}', got {text!r}"
    )


def _check_params(name: str, found: Mapping[str, Any], keys: Sequence[str], owner: str) -> None:
    """Refuse parameters that are missing, and those that nothing uses."""
    missing = [key for key in keys if key not in found]
    if missing:
        raise ConfigError(
            f"--{name}: {owner} needs {', '.join(missing)}, too; write them all: "
            f"'{{{', '.join(f'{key}: ...' for key in keys)}}}'"
        )
    for key in found:
        if key not in keys:
            raise ConfigError(f"--{name}: {owner} has no parameter {key}; {suggest(key, keys)}")


def _to_number(name: str, key: str, value: Any, kind: NumberKind = NUMBER) -> Fraction:
    """A number among parameters, exactly; YAML takes 1e-5 for text."""
    problem = kind.find_problem(str(value))
    if problem:
        raise ConfigError(f"--{name}: {key}: {problem}")
    return Fraction(str(value))


def _spell(number: Fraction | float) -> str:
    return repr(float(number)).removesuffix(".0")


# --- the optimizer ---


def port_optimizer_params(text: str, values: OldValues) -> Effect:
    """What the optimizer is told."""
    name, rule = "optimizer-params", values.text("optimizer").lower()
    found = _read_params(values, name)
    _check_params(name, found, _REQUIRED[rule], f"--optimizer {rule}")
    kinds = {"base_decay_exponent": EXPONENT}
    numbers = {k: _to_number(name, k, v, kinds.get(k, NUMBER)) for k, v in found.items()}
    flags = {"momentum": _spell(numbers["momentum"])}
    if rule == "sgd":
        flags["optimizer"] = "momentum" if numbers["momentum"] else "sgd"
        return Effect(flags=flags)
    flags["optimizer-eps"] = _spell(numbers["epsilon"]) if numbers["epsilon"] else _KERAS_EPSILON
    if rule == "lars":
        flags["trust-coefficient"] = _spell(numbers["eeta"])
        flags["trust-decay"] = _spell(numbers["weight_decay"])
        return Effect(flags=flags, why="" if numbers["epsilon"] else "an epsilon of 0 was Keras's")
    exponent = float(numbers["base_decay_exponent"])
    flags["rmsprop-decay"] = _spell(max(0.0, 1 - 2**exponent * count_batch(values)))
    flags["rmsprop-start"] = "0"
    why = f"1 - 2^{exponent:g} x {count_batch(values):,} images; the mean square began at 0"
    return Effect(flags=flags, why=why)


def port_optimizer(text: str, values: OldValues) -> Effect:
    """The update rule; SGD with a momentum has another name here."""
    rule = text.lower()
    if rule == "sgd":
        momentum = _read_params(values, "optimizer-params").get("momentum", 0)
        has_momentum = _to_number("optimizer-params", "momentum", momentum) > 0
        return Effect(flags={"optimizer": "momentum" if has_momentum else "sgd"})
    return Effect(flags={"optimizer": {"rmsprop": "rmsprop_tf"}.get(rule, rule)})


def port_loss_scaling(text: str, values: OldValues) -> Effect:
    """A scale of 0 was none."""
    if float(text):
        return Effect(flags={"loss-scaling": text}, kind="kept")
    return Effect(flags={"loss-scaling": "1"}, why="0 was none")


# --- the learning rate ---


def _count_warmup(values: OldValues) -> tuple[Fraction, int]:
    """The warm-up in epochs and in updates."""
    name, found = "lr-warmup-params", _read_params(values, "lr-warmup-params")
    if not found:
        return Fraction(0), 0
    _check_params(name, found, _WARMUP_KEYS, "a warm-up")
    epochs = _to_number(name, "warmup_epochs", found["warmup_epochs"], NOT_NEGATIVE)
    return epochs, int(epochs * count_updates(values))


def _find_reached(values: OldValues) -> Fraction:
    """The share of the rate that a warm-up reaches that is longer than the run."""
    warmup, total = _count_warmup(values)[1], count_all_updates(values)
    return Fraction(total + 1, warmup + 1) if warmup > total else Fraction(1)


def port_warmup(text: str, values: OldValues) -> Effect:
    """How the rate begins."""
    epochs, warmup = _count_warmup(values)
    if not warmup:
        return Effect(flags={"warmup-epoch": "0ep"})
    mode = str(_read_params(values, "lr-warmup-params")["warmup_mode"]).lower()
    if mode not in ("shift", "mask"):
        raise ConfigError(f"--lr-warmup-params: warmup_mode is shift or mask, not {mode}")
    total, why = count_all_updates(values), ""
    length = port_length(values, epochs)
    if warmup >= total:
        length = f"{total}st"
        why = f"{warmup:,} steps, and the run has {total:,}" if warmup > total else ""
    return Effect(flags={"warmup-epoch": length, "warmup-mode": mode}, why=why)


def port_schedule(text: str, values: OldValues) -> Effect:
    """The rates of the schedule."""
    name, shape = "lr-schedule-params", values.text("lr-schedule").lower()
    found = _read_params(values, name)
    # what other schedules need may stand there, too: a config's is replaced as a whole
    known = {key: value for key, value in found.items() if key in _SCHEDULE_KEYS[shape]}
    unknown = [key for key in found if not any(key in keys for keys in _SCHEDULE_KEYS.values())]
    _check_params(
        name, known | dict.fromkeys(unknown), _SCHEDULE_KEYS[shape], f"--lr-schedule {shape}"
    )
    if shape == "stepped":
        return _port_steps(known, values)
    initial = _to_number(name, "initial_learning_rate", known["initial_learning_rate"])
    reached, batch = _find_reached(values), count_batch(values)
    why = f"{float(initial):g} x {batch:,} images = {float(initial * batch):g}"
    if reached < 1:
        why += f", of which the run reaches {float(reached):.4g}"
    flags = {"lr-per-image": _spell(initial * reached), "lr": ""}
    if shape != "const":
        key = "epochs_to_total_decay"
        epochs = _to_number(name, key, known[key], POSITIVE)
        flags["lr-decay-length"] = port_length(values, epochs)
    if shape == "polynomial":
        ratio = _to_number(name, "end_learning_rate_ratio", known["end_learning_rate_ratio"])
        flags["lr-end-ratio"] = _spell(ratio)
        flags["lr-power"] = _spell(_to_number(name, "power", known["power"]))
    return Effect(flags=flags, why=why)


def _port_steps(found: Mapping[str, Any], values: OldValues) -> Effect:
    """A rate that falls at given epochs, one step after each; the rates count as they are."""
    name = "lr-schedule-params"
    lists = [found[key] if isinstance(found[key], list) else [] for key in ("boundaries", "values")]
    epochs = [_to_number(name, "boundaries", one, NOT_NEGATIVE) for one in lists[0]]
    rates = [_to_number(name, "values", one, NOT_NEGATIVE) for one in lists[1]]
    if not epochs or len(rates) != len(epochs) + 1 or rates[0] < _SMALLEST_RATE:
        raise ConfigError(
            f"--{name}: boundaries and values are lists, and there is one value more, as in "
            "'{boundaries: [30, 60], values: [0.1, 0.01, 0.001]}'"
        )
    drops = [f"{int(one * count_updates(values)) + 1}st" for one in epochs]
    return Effect(
        flags={
            "lr": _spell(rates[0] * _find_reached(values)),
            "lr-per-image": "",
            "lr-epoch-decay": ",".join(drops),
            "lr-decay": ",".join(_spell(rate / rates[0]) for rate in rates),
        },
        why="the rates as they are, without the batch",
    )


# --- norms ---


def port_norm(text: str, values: OldValues) -> Effect:
    """Which norm the model has."""
    found = _read_params(values, "norm-layer")
    for key in found:
        if key not in _NORM_KEYS:
            raise ConfigError(f"--norm-layer: has no parameter {key}; {suggest(key, _NORM_KEYS)}")
    kind = str(found.get("name", ""))
    if kind not in _NORMS:
        raise ConfigError(f"--norm-layer: name {kind!r}: {suggest(kind, _NORMS)}")
    if kind == "group_norm":
        return _port_groups(found)
    momentum = _to_number("norm-layer", "momentum", found.get("momentum", _KERAS_MOMENTUM))
    why = f"1 - {float(momentum):g}" + ", Keras's own" * ("momentum" not in found)
    return Effect(flags={"norm-type": "batch", "batchnorm-momentum": _spell(1 - momentum)}, why=why)


def _port_groups(found: Mapping[str, Any]) -> Effect:
    """The groups of a group norm, or the channels of one."""
    both = [key for key in ("num_groups", "channels_per_group") if key in found]
    if len(both) != 1:
        raise ConfigError(
            "--norm-layer: a group norm has either num_groups or channels_per_group; give one"
        )
    if both == ["num_groups"]:
        groups = str(_to_number("norm-layer", "num_groups", found["num_groups"], COUNT))
        return Effect(flags={"norm-type": "group", "norm-num-groups": groups})
    why = "channels_per_group: every layer has as many groups here, 32; so the network differs"
    return Effect(flags={"norm-type": "group"}, why=why, warnings=(why,))


def has_batch_norm(values: OldValues) -> bool:
    """Whether the norm is one over the batch."""
    return _read_params(values, "norm-layer").get("name") != "group_norm"
