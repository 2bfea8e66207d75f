"""What an entry of an older application's configs.yml comes to, worked out from its own rules.

The facts are those about the five applications, by section: options and defaults in 1.1 (PyTorch
Lightning, here pl), 1.2 (TensorFlow 2) and 1.3 (TensorFlow 1); networks in 2; images in 4.2. Keys
that have no counterpart are named with the reason, so that none is passed over.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

Entry = Mapping[str, Any]
Options = dict[str, Any]

IMAGES = {"imagenet": 1_281_167, "cifar10": 50_000}
_MAX_DEVICE_ITERATIONS = 65_536

# What the files leave open, or contradict
DECIDED: dict[str, Options] = {
    "pl/efficientnet-b0-16ipu-mk2": {"replicas": 4},  # its README: four stages, four replicas
    "pl/efficientnet-b0-16ipu-mk1": {"replicas": 4},  # its name: 16 devices, in four stages
    "pl/resnet50-16ipu-mk2-recompute": {  # its name; of SDK 2.0, which did
        "enable_recompute": True,
        "recompute_checkpoints": ["conv", "norm"],
    },
    "tf1/mk1_resnet50_16ipus": {"eight_bit_io": True},  # the same command in its README
    "tf2/resnet50_infer_base": {"dataset": "imagenet"},  # as all that are built on it
    "tf2/imagenet_config": {"model": "cifar_resnet8"},  # for the toy model, which is not here
    "tf2/cifar10_config": {"model": "cifar_resnet8"},
}


def read_old_configs() -> dict[str, Entry]:
    """The entries, by application and name."""
    text = Path(__file__).with_name("old_configs.yaml").read_text(encoding="utf-8")
    return {
        f"{application}/{name}": {**entry, **DECIDED.get(f"{application}/{name}", {})}
        for application, entries in yaml.safe_load(text).items()
        for name, entry in entries.items()
    }


class Keys:
    """The keys of an entry, each of which is to be asked for."""

    def __init__(self, entry: Entry) -> None:
        self._entry, self.left = entry, set(entry)

    def __contains__(self, key: str) -> bool:
        return key in self._entry

    def take(self, key: str, default: Any = None) -> Any:
        """The value, or the application's default."""
        self.left.discard(key)
        return self._entry.get(key, default)


NOTHING = {  # keys without a counterpart
    "data_dir": "the path of a machine that is not here",
    "dataset-path": "the same",
    "internal_exchange_optimisation_target": "memory of the exchange between tiles",
    "internal-exchange-optimization-target": "the same",
    "available_memory_proportion": "memory of one convolution on a tile",
    "available-memory-proportion": "the same",
    "enable_conv_dithering": "where tiles begin",
    "gather_conv_output": "layout on tiles",
    "gather-conv-output": "the same",
    "min-remote-tensor-size": "what goes to memory off the chip",
    "max_reduce_many_buffer_size": "buffers on the chip",
    "max-reduce-many-buffer-size": "the same",
    "pipeline_num_parallel": "threads that decode: one worker per core here",
    "standard_imagenet": "one way to read the same files",
    "fused_preprocessing": "normalises and pads to four channels: the fourth is zero",
    "fused-preprocessing": "the same",
    "mlperf_logging": "a log in another form",
    "cutmix_version": "1 is the only one there is here, as --cutmix-lambda",
    "pipeline": "the splits say so",
    "device_iterations": "1 is the application's default, and ours is left",
    "device_iteration": "the same, as a prefix",
}


def expect(name: str, entry: Entry) -> Options:
    """Our options, those that differ from our defaults at least, that an entry stands for."""
    keys = Keys(entry)
    found = _RULES[name.split("/", maxsplit=1)[0]](keys)
    if "_infer_" in name:
        found["valid-batch-size"] = found["batch-size"]  # the application's default, and the point
    assert not keys.left - set(NOTHING), f"{name}: nobody asked for {keys.left - set(NOTHING)}"
    return found


# --- TensorFlow 1 ---

_TF1_DATA = {"imagenet": "imagenet", "cifar-10": "cifar10"}
_TF1_MODELS = {
    "resnet": "resnet{}",
    "resnext": "resnext{}_32x4d",
    "efficientnet": "efficientnet_b{}",
}
_TF1_BATCH = {"resnet": 4, "resnext": 1, "efficientnet": 4}  # of ImageNet
_TF1_RATES = {  # powers of two, of ImageNet
    "resnet": {"SGD": -8, "momentum": -11},
    "resnext": {"SGD": -8, "momentum": -11},
    "efficientnet": {"SGD": -7, "momentum": -10, "RMSprop": -14},
}


def _expect_tf1(keys: Keys) -> Options:
    family, data = keys.take("model"), _TF1_DATA[keys.take("dataset")]
    photographs, efficient = data == "imagenet", family == "efficientnet"
    batch = keys.take("batch_size", keys.take("micro_batch_size"))
    batch = batch or (_TF1_BATCH[family] if photographs else 32)
    accumulation = keys.take("gradient_accumulation_count", 1)
    replicas = keys.take("replicas", 1)
    epochs = keys.take("epochs", 350 if efficient else 100)
    images = batch * accumulation * replicas
    precision = keys.take("precision", "16.16")
    smoothing = keys.take("label_smoothing", 0.1 if efficient else 0.0)
    norm = "batch" if keys.take("batch_norm", not photographs) else "group"
    keys.take("stable_norm") if norm == "group" else None
    mean = "mean-std" if keys.take("normalise_input", False) else "mean"
    found = {
        "data": data,
        "model": _TF1_MODELS[family].format(keys.take("model_size")),
        "padding": "same",
        "zero-init-residual": photographs and not efficient,
        "crop-scale": "0.05,1" if photographs else None,
        "use-bbox-info": photographs,
        "normalization": mean if photographs else "per-image",
        "norm-type": norm,
        "norm-num-groups": keys.take("groups", 32) if norm == "group" else 32,
        "norm-eps": 1e-3 if efficient else 1e-5,
        "epochs": epochs,
        "batch-size": batch,
        "gradient-accumulation": accumulation,
        "replicas": replicas,
        "bn-span": keys.take("BN_span", 1),
        "label-smoothing": smoothing,
        "smoothing-over": "others" if smoothing else "all",
        "loss-scaling": keys.take("loss_scaling", 128),
        "precision": precision,
        "half-type": "float16",
        "enable-stochastic-rounding": precision == "16.16",
        "half-partials": keys.take("enable_half_partials", False),
        "enable-recompute": keys.take("enable_recomputation", False),
        "offload-optimizer": not keys.take("disable_variable_offloading", True),
        "weight-decay": 0,
        "logs-per-epoch": str(keys.take("logs_per_epoch", 16)),
        "validation-mode": "after" if keys.take("validation", True) else "none",
        "eight-bit-io": keys.take("eight_bit_io"),
    }
    if norm == "batch":
        found["batchnorm-momentum"] = round(1 - keys.take("BN_decay", 0.97), 9)
        found["disable-stable-batchnorm"] = not keys.take("stable_norm", False)
    found |= _tf1_update(keys, family, photographs, images)
    found |= _tf1_schedule(keys, photographs, images, (epochs, IMAGES[data]))
    found |= _tf1_saves(keys) | _tf1_stages(keys)
    if efficient:
        found["efficientnet-group-dim"] = keys.take("group_dim", 1)
        found["efficientnet-expand-ratio"] = keys.take("expand_ratio", 6)
        found["mixup-alpha"] = keys.take("mixup_alpha", 0)
        found["cutmix-lambda"] = keys.take("cutmix_lambda", 1)
    return found


def _tf1_update(keys: Keys, family: str, photographs: bool, images: int) -> Options:
    name = keys.take("optimiser", "SGD")
    decay = (1e-5 if family == "efficientnet" else 1e-4) if photographs else 1e-6
    momentum = keys.take("momentum", 0.9)
    found: Options = {
        "optimizer": {"RMSprop": "rmsprop_tf"}.get(name, name.lower()),
        "momentum": 0 if name == "SGD" else momentum,
        "l2-regularization": keys.take("weight_decay", 0 if name == "LARS" else decay),
    }
    if "abs_learning_rate" in keys:
        found["lr"] = keys.take("abs_learning_rate")
    else:
        power = _TF1_RATES[family].get(name) if photographs else -6
        found["base-learning-rate"] = keys.take("base_learning_rate", power)
    if name == "RMSprop":
        found |= {"rmsprop-decay": 1 - 2**-14 * images, "optimizer-eps": 1e-3, "rmsprop-start": 1}
    if name == "LARS":
        own = 1e-5 if family == "efficientnet" else 1e-4
        found |= {"trust-coefficient": 0.001, "optimizer-eps": 0}
        found["trust-decay"] = keys.take("lars_weight_decay", own)
    return found


def _tf1_schedule(keys: Keys, photographs: bool, batch: int, length: tuple[int, int]) -> Options:
    epochs, images = length
    total = images * epochs // batch
    found: Options = {"warmup-epoch": f"{total * keys.take('warmup_epochs', 5) // epochs}st"}
    match keys.take("lr_schedule", "stepped"):
        case "stepped":
            drops = "0.3,0.6,0.8,0.9" if photographs else "0.5,0.75"
            return {**found, "lr-schedule": "step", "lr-drop-after": drops, "lr-decay": "0.1"}
        case "cosine":
            return {**found, "lr-schedule": "cosine"}
        case "exponential":
            drops = {"lr-decay": "0.97", "lr-scheduler-freq": f"146/{epochs}"}
            return {**found, "lr-schedule": "exponential", **drops}
    if "abs_end_learning_rate" in keys:
        end = keys.take("abs_end_learning_rate") / keys.take("abs_learning_rate")
    else:
        end = 1e-5
    found |= {"lr-schedule": "polynomial", "lr-power": 2, "warmup-mode": "ramp-shift"}
    return {**found, "lr-end-ratio": end}


def _tf1_saves(keys: Keys) -> Options:
    every = keys.take("epochs_per_ckpt")
    found: Options = {
        "ckpts-per-epoch": f"1/{every}" if every else str(keys.take("ckpts_per_epoch", 1)),
        "first-ckpt-epoch": keys.take("ckpt_epochs_offset", 0),
    }
    if "weight_avg_exp" in keys:
        (decay,) = keys.take("weight_avg_exp")
        found |= _average_all(decay)
    if "max_cross_replica_buffer_size" in keys:
        found["bucket-mib"] = keys.take("max_cross_replica_buffer_size") / 2**20
    if "batches_per_step" in keys:
        found["device-iterations"] = min(keys.take("batches_per_step"), _MAX_DEVICE_ITERATIONS)
    return found


def _average_all(decay: float) -> Options:
    return {
        "weight-avg-strategy": "exponential",
        "weight-avg-exp-decay": decay,
        "weight-avg-n": -1,
    }


def _tf1_stages(keys: Keys) -> Options:
    splits, shards = keys.take("pipeline_splits"), keys.take("shards", 1)
    schedule = keys.take("pipeline_schedule", "Grouped")
    if not splits:  # the entry that others are built on
        return {"shards": shards, "pipeline": True} if shards > 1 else {}
    assert shards in (1, len(splits) + 1)
    return {
        "pipeline-splits": ",".join(splits),
        "shards": 1 if shards == 1 else None,
        "pipeline-schedule": schedule,
    }


# --- TensorFlow 2 ---


def _expect_tf2(keys: Keys) -> Options:
    name = keys.take("model-name", "toy_model")
    name = keys.take("model", name)  # a prefix of the same option, given after it
    data = keys.take("dataset", "cifar10")
    whole, photographs = name == "resnet50", data == "imagenet"
    batch, replicas = keys.take("micro-batch-size", 1), keys.take("num-replicas", 1)
    images = keys.take("global-batch-size")
    accumulation = keys.take("gradient-accumulation-count", 1)
    if images:
        accumulation = round(images / (batch * replicas))
    precision = str(keys.take("precision", "16.16"))
    found: Options = {
        "data": data,
        "model": name.replace("cifar_", ""),
        "image-size": 224 if photographs and not whole else None,
        "zero-init-residual": whole,
        "crop-scale": "0.05,1" if photographs else None,
        "use-bbox-info": photographs,
        "normalization": "mean-std" if photographs else "per-image",
        "norm-eps": 1.001e-5 if whole else 1e-5,
        "epochs": keys.take("num-epochs", 1),
        "epoch-tail": "drop",
        "batch-size": batch,
        "gradient-accumulation": accumulation,
        "replicas": replicas,
        "bn-span": keys.take("dbn-replica-group-size", 1),
        "label-smoothing": keys.take("label-smoothing", 0),
        "loss-scaling": keys.take("loss-scaling", 1),
        "precision": precision,
        "half-type": "bfloat16" if precision == "32.32" else "float16",
        "enable-stochastic-rounding": precision == "16.16",
        "half-partials": keys.take("half-partials", False),
        "enable-recompute": keys.take("recomputation", False),
        "offload-optimizer": keys.take("optimizer-state-offloading", False),
        "weight-decay": 0,
        "l2-regularization": keys.take("l2-regularization", 0),
        "logs-per-epoch": str(keys.take("logs-per-epoch", 1)),
        "ckpts-per-epoch": str(keys.take("ckpts-per-epoch", 1)),
        "first-ckpt-epoch": keys.take("first-ckpt-epoch", 0),
        "validation-mode": "after" if keys.take("validation", True) else "none",
        "valid-batch-size": keys.take("validation-micro-batch-size"),  # the default changes nothing
        "pipeline-validation-model": keys.take("pipeline-validation-model", False),
        "eight-bit-io": keys.take("eight-bit-transfer"),
    }
    assert keys.take("stochastic-rounding", "ON") == "ON"
    if keys.take("accelerator-side-preprocess", True) is False:
        found["normalization-location"] = "host"
    if "max-cross-replica-buffer-size" in keys:
        found["bucket-mib"] = keys.take("max-cross-replica-buffer-size") / 2**20
    return found | _tf2_norm(keys) | _tf2_update(keys) | _tf2_schedule(keys) | _tf2_stages(keys)


def _tf2_norm(keys: Keys) -> Options:
    norm = keys.take("norm-layer", {"name": "custom_batch_norm", "momentum": 0.97})
    stable = keys.take("stable-norm", False)
    if norm["name"] == "group_norm":
        return {"norm-type": "group", "norm-num-groups": norm["num_groups"]}
    kept = norm.get("momentum", 0.99)  # Keras's own where it is not given
    return {"batchnorm-momentum": round(1 - kept, 9), "disable-stable-batchnorm": not stable}


def _tf2_update(keys: Keys) -> Options:
    name, given = keys.take("optimizer", "sgd"), keys.take("optimizer-params", {"momentum": 0})
    momentum = given["momentum"]
    if name == "sgd":
        return {"optimizer": "momentum" if momentum else "sgd", "momentum": momentum}
    assert name == "lars" and given["epsilon"] == 0
    found = {"optimizer": "lars", "momentum": momentum, "optimizer-eps": 1e-7}  # Keras's for 0
    return {**found, "trust-coefficient": given["eeta"], "trust-decay": given["weight_decay"]}


def _tf2_schedule(keys: Keys) -> Options:
    kind = keys.take("lr-schedule", "const")
    given = keys.take("lr-schedule-params", {"initial_learning_rate": 1e-4})
    warmup = keys.take("lr-warmup-params")
    found = {
        "lr-schedule": {"const": "constant"}.get(kind, kind),
        "lr-per-image": given["initial_learning_rate"],
        "lr-staircase": keys.take("lr-staircase", False),
    }
    if kind != "const":
        found["lr-decay-length"] = f"{given['epochs_to_total_decay']}ep"
    if kind == "polynomial":
        found |= {"lr-power": given["power"], "lr-end-ratio": given["end_learning_rate_ratio"]}
    if warmup:
        found["warmup-epoch"] = f"{warmup['warmup_epochs']}ep"
        found["warmup-mode"] = warmup["warmup_mode"]
    return found


def _tf2_stages(keys: Keys) -> Options:
    splits, devices = keys.take("pipeline-splits"), keys.take("device-mapping")
    schedule = keys.take("pipeline-schedule", "Grouped")
    if not splits:
        return {}
    found = {"pipeline-splits": ",".join(splits), "pipeline-schedule": schedule}
    return {**found, "shards": 1 if devices and set(devices) == {0} else None}


# --- PyTorch Lightning ---


def _expect_pl(keys: Keys) -> Options:
    model, precision = keys.take("model"), str(keys.take("precision"))
    norm, splits = keys.take("norm_type", "batch"), keys.take("pipeline_splits")
    groups, rounds = keys.take("norm_num_groups", 32), keys.take("enable_stochastic_rounding")
    kind, decay = keys.take("lr_schedule"), keys.take("lr_decay", 0.5)
    asked, kept = keys.take("enable_recompute", False), keys.take("recompute_checkpoints")
    found: Options = {
        "data": keys.take("data"),
        "model": model.replace("-", "_"),
        "zero-init-residual": model.startswith("resnet"),
        "norm-type": norm,
        "norm-num-groups": groups if norm == "group" else 32,
        "enable-fast-groupnorm": keys.take("enable_fast_groupnorm", False),
        "use-bbox-info": keys.take("use_bbox_info", False),
        "epochs": keys.take("epoch"),
        "epoch-tail": "drop",
        "batch-size": keys.take("batch_size", 1),
        "gradient-accumulation": keys.take("gradient_accumulation", 1),
        "replicas": keys.take("replicas", 1),
        "seed": keys.take("seed", 0),
        "optimizer": keys.take("optimizer", "sgd"),
        "momentum": keys.take("momentum"),
        "weight-decay": 0,
        "l2-regularization": keys.take("weight_decay"),
        "rmsprop-decay": keys.take("rmsprop_decay", 0.99),
        "optimizer-eps": keys.take("optimizer_eps", 1e-8),
        "loss-velocity-scaling-ratio": keys.take("loss_velocity_scaling_ratio", 1),
        # its counter of periods begins at 1
        "lr": round(keys.take("lr") * (decay if kind == "exponential" else 1), 9),
        "lr-schedule": kind,
        "lr-decay": str(decay) if kind == "exponential" else "0.1",
        "lr-scheduler-freq": str(keys.take("lr_scheduler_freq")),
        "warmup-epoch": f"{keys.take('warmup_epoch')}ep",
        "label-smoothing": keys.take("label_smoothing"),
        "loss-scaling": keys.take("loss_scaling"),
        "initial-loss-scaling": keys.take("initial_loss_scaling"),
        "precision": precision,
        "half-type": "float16",
        "enable-stochastic-rounding": rounds and precision == "16.16",
        "half-partials": keys.take("half_partial", False),
        "pipeline-splits": ",".join(splits) if splits else None,
        "enable-recompute": asked or bool(splits),  # pipelined models always recompute
        "recompute-checkpoints": ",".join(kept) if kept else None,
        "offload-optimizer": keys.take("offload_optimizer", False),
        "eight-bit-io": keys.take("eight_bit_io"),
        "logs-per-epoch": "1",
        "validation-mode": "after",
    }
    assert keys.take("normalization_location", "ipu") == "ipu", "here: device, our default"
    if model.startswith("efficientnet"):
        found["efficientnet-group-dim"] = keys.take("efficientnet_group_dim", 1)
        found["efficientnet-expand-ratio"] = keys.take("efficientnet_expand_ratio", 6)
    if keys.take("weight_avg_strategy") == "exponential":
        found |= _average_all(keys.take("weight_avg_exp_decay"))
    return found


_RULES: dict[str, Callable[[Keys], Options]] = {
    "tf1": _expect_tf1,
    "tf2": _expect_tf2,
    "pl": _expect_pl,
}
