"""What must come out the same however replicas are laid out, and how far apart it comes out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ranked_sessions import Case, relative_difference, run_on_ranks, run_session
from torch import Tensor, nn

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.engine.checkpoint_store import list_checkpoints
from phalanx.engine.tensor_bytes import view_bytes

Left = Mapping[str, Tensor]  # what a session leaves, by name
STEPS, SAVED_AT = 20, 3
FLOAT64, FLOAT32 = 1e-12, 1e-6  # how far apart tensors may be, relative to their length
# gradients of norms stay in the optimizer's state; in float32 even torch's own are good to 1e-5
WEIGHTS = ("weights", "replica", "average")
ALL = (*WEIGHTS, "optimizer", "metrics", "loss scale")

BASE = {
    "data": "mnist",
    "image-size": "12",
    "batch-size": "4",
    "steps": str(STEPS),
    "lr": "0.02",
    "warmup-epoch": "10%",
    "device": "cpu",
    "threads": "1",
    "replicas": "4",
    "gradient-accumulation": "2",
    "drop-path": "0.2",
    "mixup-alpha": "0.2",
}
PLAIN = {"drop-path": "0", "mixup-alpha": "0", "weight-decay": "0"}
ONE_STEP = {"steps": "1", "warmup-epoch": "0"}
STRICT = {"determinism": "strict"}
GROUP_NORM = {"norm-type": "group", "norm-num-groups": "4"}
EVERYTHING = {
    "ema-decay": "0.9",
    "clip-grad-norm": "0.5",
    "clip-grad-value": "0.1",
    "label-smoothing": "0.1",
    "cutmix-lambda-low": "0.2",
    "cutmix-lambda-high": "0.8",
    "bucket-mib": "0.05",
}
RATES = {
    "sgd": "0.02",
    "momentum": "0.02",
    "nesterov": "0.02",
    "sgd_combined": "0.02",
    "adamw": "0.002",
    "rmsprop": "0.0005",
    "rmsprop_tf": "0.002",
    "lars": "1",
    "lamb": "0.005",
}
STRICT_CASES = {
    **{f"`{name}`": {"optimizer": name, "lr": rate} for name, rate in RATES.items()},
    "EMA, clipping, cutmix, label smoothing, several buckets": EVERYTHING,
    "float16 16.32, automatic loss scale, EMA": {
        "precision": "16.32",
        "half-type": "float16",
        "auto-loss-scaling": "true",
        "loss-scaling": str(2**20),
        "ema-decay": "0.9",
    },
    "16.16, stochastic rounding": {"precision": "16.16", "enable-stochastic-rounding": "true"},
    "recomputation": {"enable-recompute": "true"},
    "group norm": GROUP_NORM,
    "EfficientNet, `rmsprop_tf`": {
        "model": "efficientnet_cifar",
        "optimizer": "rmsprop_tf",
        "lr": "0.002",
    },
    "5 replicas, EMA": {"replicas": "5", "ema-decay": "0.9"},
    "7 replicas, accumulation 1": {"replicas": "7", "gradient-accumulation": "1"},
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sessions with the same options on any number of ranks, and what they are held against."""

    what: str
    flags: Mapping[str, str]
    bound: float = 0.0  # on the relative L2 of each tensor; 0: bit for bit
    ranks: Sequence[int] = (2, 3, 4)
    float64: bool = False
    against: str = "folded"  # or "one replica", "one stage", "plain torch", "float64"
    start: str = ""  # a checkpoint that they begin with
    stop: int | None = None  # the step they stop after
    resumed: bool = False  # what they are held against has gone all the way by itself
    compared: Sequence[str] = ALL

    def case(self, data_dir: Path, **more: Any) -> dict[str, Any]:
        """What `run_session` takes."""
        flags = {**BASE, "data-dir": str(data_dir), **self.flags}
        start = {"start": self.start} if self.start else {}
        return {"flags": flags, "float64": self.float64, "stop": self.stop, **start, **more}


class Row(NamedTuple):
    """How far a layout is from what it is held against."""

    comparison: Comparison
    ranks: int  # 1: folded
    apart: float  # the largest relative L2 of a tensor
    where: str  # that tensor; empty where all are the same bit for bit
    tensors: int  # how many there are

    @property
    def holds(self) -> bool:
        """Whether it is within the bound."""
        bound = self.comparison.bound
        return self.apart <= bound if bound else not self.where


# --- what is compared ---


def list_strict() -> list[Comparison]:
    """Sums in the order of replicas."""
    return [
        Comparison(what=what, flags={**STRICT, **flags}) for what, flags in STRICT_CASES.items()
    ]


def list_resumed(
    saved_on: Sequence[int], *, data_dir: Path, folder: Path, steps: int = STEPS
) -> list[Comparison]:
    """Sessions that were saved on so many ranks and go on on others, under strict."""
    flags = {**STRICT, **EVERYTHING, "steps": str(steps)}
    return [
        Comparison(
            what=f"saved at step {SAVED_AT} {'folded' if ranks == 1 else f'on {ranks} ranks'}",
            flags=flags,
            start=save_early(flags, ranks, data_dir=data_dir, folder=folder),
            resumed=True,
        )
        for ranks in saved_on
    ]


def save_early(flags: Mapping[str, str], ranks: int, *, data_dir: Path, folder: Path) -> str:
    """A checkpoint that so many ranks save after a few steps."""
    saves = folder / f"saved-on-{ranks}-{flags.get('determinism')}"
    early = Comparison(what="", flags=flags, stop=SAVED_AT)
    case = early.case(data_dir, save=str(saves))
    if ranks == 1:
        run_session(case)
    else:
        run_on_ranks([case], ranks, folder)
    return str(list_checkpoints(saves)[-1])


def list_split_spans(*, data_dir: Path, folder: Path) -> list[Comparison]:
    """Batch norms that ranks share, in float32, at a step that is not the first.

    Before it, each replica had norms of its own, as in a run that is forked with another span.
    Before the first, biases of norms are 0, and after it nothing but a gradient, in which float32's
    own error is as large as the bound.
    """
    start = save_early(EVERYTHING, 1, data_dir=data_dir, folder=folder)
    return [
        Comparison(
            what=f"`--bn-span {span}`, step {SAVED_AT + 1}",
            flags={**EVERYTHING, "bn-span": str(span)},
            bound=FLOAT32,
            start=start,
            stop=SAVED_AT + 1,
            compared=WEIGHTS,
            ranks=(2, 4),
        )
        for span in (2, 4)
    ]


def list_near() -> list[Comparison]:
    """Sums in any order."""
    some = {
        "EMA, clipping, cutmix, label smoothing": EVERYTHING,
        "`adamw`": {"optimizer": "adamw", "lr": "0.002"},
        "5 replicas": {"replicas": "5"},
        "7 replicas": {"replicas": "7"},
    }
    float64 = [
        Comparison(what=what, flags=flags, bound=FLOAT64, float64=True)
        for what, flags in some.items()
    ]
    float32 = [
        Comparison(what=what, flags={**flags, **ONE_STEP}, bound=FLOAT32, compared=WEIGHTS)
        for what, flags in some.items()
    ]
    return float64 + float32


def list_one_replica() -> list[Comparison]:
    """Accumulation in place of replicas."""
    some = {"batch norm, EMA": {"ema-decay": "0.9"}, "group norm": GROUP_NORM}
    float64 = [
        Comparison(what=what, flags=flags, bound=FLOAT64, float64=True, against="one replica")
        for what, flags in some.items()
    ]
    float32 = [
        Comparison(
            what=what,
            flags={**flags, **ONE_STEP},
            bound=FLOAT32,
            against="one replica",
            compared=WEIGHTS,
        )
        for what, flags in some.items()
    ]
    return float64 + float32


def list_spans() -> list[Comparison]:
    """Batch norm over several replicas."""
    return [
        Comparison(
            what=f"`--bn-span {span}`",
            flags={**PLAIN, "bn-span": str(span)},
            bound=FLOAT64,
            float64=True,
            against="plain torch",
            ranks=(2, 4),
        )
        for span in (1, 2, 4)
    ]


def list_first_steps() -> list[Comparison]:
    """A first step in float32 with norms that ranks share, and what float32 loses in it anyway."""
    alone = {"replicas": "1", "batch-size": "16"}
    some = [
        ("1 replica of 16 images", alone, "float64", ()),
        ("`--bn-span 4`", {"bn-span": "4"}, "float64", (2, 4)),
        ("`--bn-span 4`", {"bn-span": "4"}, "folded", (2, 4)),
    ]
    return [
        Comparison(
            what=f"{what}, first step",
            flags={**flags, **ONE_STEP},
            bound=1e-5,
            against=against,
            compared=WEIGHTS,
            ranks=ranks,
        )
        for what, flags, against, ranks in some
    ]


# --- what it is held against ---


def find_expected(comparison: Comparison, data_dir: Path) -> Left:
    """What a comparison's sessions must leave."""
    case = comparison.case(data_dir)
    if comparison.resumed:
        del case["start"]
    if comparison.against == "plain torch":
        return run_plainly(case)
    if comparison.against == "one stage":
        whole = {n: text for n, text in case["flags"].items() if not n.startswith("pipeline")}
        return run_session({**case, "flags": whole})
    if comparison.against in ("folded", "float64"):
        return run_session({**case, "float64": case["float64"] or comparison.against == "float64"})
    flags = case["flags"]
    passes = int(flags["replicas"]) * int(flags["gradient-accumulation"])
    alone = {**flags, "replicas": "1", "gradient-accumulation": str(passes)}
    left = run_session({**case, "flags": alone})
    # a replica's running statistics have seen its own images only
    return {
        name: t for name, t in left.items() if "running_" not in name and "_tracked" not in name
    }


def run_plainly(case: Case) -> Left:
    """Data-parallel training in plain torch: a model for each group that shares statistics.

    Only the weights at the beginning, the images and the learning rates come from a session.
    """
    settings, plan, _ = plan_new_run(read_settings(None, case["flags"]))
    replicas, span = plan.layout.replicas, plan.layout.bn_span
    with Session(settings.config, plan) as session:
        first = deepcopy(session.model).double().train()
        assert any(type(module) is nn.BatchNorm2d for module in first.modules())
        models = [first, *(deepcopy(first) for _ in range(1, replicas // span))]
        velocity = {name: torch.zeros_like(w) for name, w in first.named_parameters()}
        for step, passes in enumerate(session.feed.batches_from(0)):
            for number, model in enumerate(models):
                model.zero_grad()
                for begin in range(number * span, len(passes), replicas):
                    together = passes[begin : begin + span]
                    logits = model(torch.cat([one.images.double() for one in together]))
                    labels = torch.cat([one.labels for one in together])
                    loss = F.cross_entropy(logits, labels, reduction="sum")
                    (loss / plan.global_batch).backward()
            update_plainly(models, velocity, plan.lr(step))
    statistics = [dict(models[replica // span].named_buffers()) for replica in range(replicas)]
    left = {f"weights {name}": w.detach() for name, w in first.named_parameters()}
    left |= {f"optimizer {name}:momentum_buffer": v for name, v in velocity.items()}
    for name in statistics[0]:
        rows = [one[name] for one in statistics]
        left |= {f"replica {number}/{name}": row for number, row in enumerate(rows)}
        left[f"weights {name}"] = torch.stack(rows).double().mean(0)
    return left


@torch.no_grad()
def update_plainly(models: Sequence[nn.Module], velocity: dict[str, Tensor], lr: float) -> None:
    """SGD with a momentum of 0.9 on the sum of the models' gradients, for all of them."""
    weights = [dict(model.named_parameters()) for model in models]
    for name, moving in velocity.items():
        moving.mul_(0.9)
        for own in weights:
            moving.add_(own[name].grad)
        for own in weights:
            own[name].sub_(lr * moving)


# --- the comparison ---


def measure(
    comparisons: Sequence[Comparison], ranks: Sequence[int], *, data_dir: Path, folder: Path
) -> Iterator[Row]:
    """A row for each comparison and number of ranks; for 1, where that is a comparison at all."""
    expected = [find_expected(one, data_dir) for one in comparisons]
    for count in ranks:
        chosen = [
            (one, must)
            for one, must in zip(comparisons, expected, strict=True)
            if count in (1, *one.ranks) and (count > 1 or one.against != "folded" or one.resumed)
        ]
        cases = [one.case(data_dir) for one, _ in chosen]
        if count == 1:
            found = [run_session(case) for case in cases]
        else:
            found = run_on_ranks(cases, count, folder)
        for (one, must), left in zip(chosen, found, strict=True):
            yield compare(one, count, left, must)


def compare(comparison: Comparison, ranks: int, found: Left, expected: Left) -> Row:
    """The tensor that is farthest from what is expected."""
    names = [name for name in expected if name.startswith(tuple(comparison.compared))]
    if comparison.against == "folded":
        assert found.keys() == expected.keys()
    assert all(expected[name].isfinite().all() for name in names)
    apart, where = 0.0, ""
    for name in names:
        one, other = found[name], expected[name]
        if name == "metrics":  # of a session that was resumed, those since then
            other = other[-len(one) :]
        if one.dtype == other.dtype and view_bytes(one) == view_bytes(other):
            continue
        apart, where = max((apart, where), (relative_difference(one, other), name))
    return Row(comparison, ranks, apart, where, len(names))


def check(rows: Iterable[Row], *, count: int) -> None:
    """Fail unless there are so many rows, and all of them hold."""
    found = list(rows)
    missed = [
        f"{row.comparison.what}, against {row.comparison.against}, {row.ranks} ranks: "
        f"{row.where} is {row.apart:.1e} apart"
        for row in found
        if not row.holds
    ]
    assert not missed, "\n".join(missed)
    assert len(found) == count
    assert all(row.tensors > 20 for row in found)
