"""What must come out the same whether or not the stages of a model have ranks of their own."""

from pathlib import Path
from typing import Any, NamedTuple

from equal_layouts import (
    EVERYTHING,
    FLOAT32,
    FLOAT64,
    GROUP_NORM,
    ONE_STEP,
    STRICT,
    STRICT_CASES,
    WEIGHTS,
    Comparison,
    save_early,
)

FLOAT16, HALF = "float16 16.32, automatic loss scale, EMA", "16.16, stochastic rounding"
SCHEDULES = ("Grouped", "Interleaved", "Sequential")


class _Stages(NamedTuple):
    """A model cut into stages, and the numbers of ranks that it is run on."""

    flags: dict[str, str]
    ranks: tuple[int, ...]


def _cut(splits: str, *, replicas: int, accumulation: int, ranks: tuple[int, ...]) -> _Stages:
    numbers = {"replicas": str(replicas), "gradient-accumulation": str(accumulation)}
    return _Stages({"pipeline-splits": splits, **numbers}, ranks)


LAYOUTS = {  # 6 micro-batches are a group of 4 and one of 2 where there are 2 stages
    "2 stages": _cut("layer2/0", replicas=1, accumulation=6, ranks=(2,)),
    "4 stages": _cut("layer1/0,layer2/0,layer3/0", replicas=1, accumulation=5, ranks=(4,)),
    "2 replicas x 2 stages": _cut("layer3/0", replicas=2, accumulation=3, ranks=(2, 4)),
}
SPECIAL: dict[str, dict[str, str]] = {
    HALF: STRICT_CASES[HALF],
    FLOAT16: STRICT_CASES[FLOAT16],
    "recomputation": {"enable-recompute": "true"},
    "group norm, `lamb`": {**GROUP_NORM, "optimizer": "lamb", "lr": "0.005"},
    "`--bn-span 2`": {"bn-span": "2"},
    "growing images": {"progressive-resolution": "8:50%"},
    "EfficientNet, `rmsprop_tf`": {
        "model": "efficientnet_cifar",
        "pipeline-splits": "blocks/2/0",
        "optimizer": "rmsprop_tf",
        "lr": "0.002",
    },
}


def list_strict_stages() -> list[Comparison]:
    """Every layout and schedule with everything, and one of them with what is special."""
    every = [
        Comparison(
            what=f"{name}, {schedule}",
            flags={**STRICT, **EVERYTHING, **stages.flags, "pipeline-schedule": schedule},
            ranks=stages.ranks,
            against="one stage",
        )
        for name, stages in LAYOUTS.items()
        for schedule in SCHEDULES
    ]
    flags, ranks = LAYOUTS["2 replicas x 2 stages"]
    special = [
        Comparison(
            what=f"2 replicas x 2 stages, {what}",
            flags={**STRICT, **flags, "pipeline-schedule": "Interleaved", **more},
            ranks=ranks[-1:] if "bn-span" in more else ranks,
            # ranks that share statistics take them apart
            bound=FLOAT32 * 10 if "bn-span" in more else 0.0,
            stop=1 if "bn-span" in more else None,
            against="one stage",
        )
        for what, more in SPECIAL.items()
    ]
    return every + special


def list_near_stages() -> list[Comparison]:
    """Sums in any order."""
    rules: tuple[dict[str, Any], ...] = (
        {"bound": FLOAT64, "float64": True, "flags": EVERYTHING},
        {"bound": FLOAT32, "compared": WEIGHTS, "flags": {**EVERYTHING, **ONE_STEP}},
    )
    return [
        Comparison(
            what=f"{name}, {schedule}",
            ranks=stages.ranks,
            against="one stage",
            **{
                **rule,
                "flags": {**rule["flags"], **stages.flags, "pipeline-schedule": schedule},
            },
        )
        for rule in rules
        for name, stages in LAYOUTS.items()
        for schedule in SCHEDULES
    ]


def list_resumed_stages(*, data_dir: Path, folder: Path) -> list[Comparison]:
    """Sessions that were saved with stages on so many ranks and go on on others, under strict."""
    flags, ranks = LAYOUTS["2 replicas x 2 stages"]
    flags = {**STRICT, **EVERYTHING, **flags, **SPECIAL[HALF]}
    return [
        Comparison(
            what=f"2 replicas x 2 stages, saved {'folded' if saved == 1 else f'on {saved} ranks'}",
            flags=flags,
            start=save_early(flags, saved, data_dir=data_dir, folder=folder),
            resumed=True,
            against="one stage",
            ranks=ranks,
        )
        for saved in (1, *ranks)
    ]
