"""Every option of Phalanx in one table: its default, its limits and its line of help.

A flag, a YAML key and an attribute are the same word: `--batch-size`, `batch-size:`,
`config.data.batch_size`. Sections only group options in code, help and docs.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from phalanx.config.data_options import AugmentConfig, DataConfig
from phalanx.config.fields import Section
from phalanx.config.model_options import EfficientNetConfig, ModelConfig, ResNetConfig
from phalanx.config.train_options import (
    LossConfig,
    MachineConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from phalanx.errors import suggest

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

_OTHER_PROGRAMS = {  # what other training programs call it: our option, and how that is meant
    "optimiser": ("optimizer", ""),
    "num-epochs": ("epochs", ""),
    "micro-batch-size": ("batch-size", ""),
    "gradient-accumulation-count": ("gradient-accumulation", ""),
    "enable-half-partials": ("half-partials", ""),
    "enable-recomputation": ("enable-recompute", ""),
    "recomputation": ("enable-recompute", ""),
    "log-freq": ("logs-per-epoch", "times an epoch instead of steps apart"),
    "bn-decay": ("batchnorm-momentum", "the share of the new batch: 1 less the decay"),
    "epochs-per-ckpt": ("ckpts-per-epoch", "1/N for every N epochs"),
    "rmsprop-epsilon": ("optimizer-eps", ""),
    "abs-end-learning-rate": ("lr-end-ratio", "as a share of the peak"),
}
_NO_SUCH_OPTION = {  # what is done here without an option: one that the command has then, and how
    "restore-path": (
        "init-weights",
        "--resume RUN goes on with a run, --init-weights FILE begins with weights",
    ),
    "shuffle": ("seed", "there is nothing to set: the order is shuffled anew in every epoch"),
}


class Config(Section):
    """All options, complete and frozen. Derived numbers live in the Plan, never here."""

    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    resnet: ResNetConfig = ResNetConfig()
    efficientnet: EfficientNetConfig = EfficientNetConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    run: RunConfig = RunConfig()
    machine: MachineConfig = MachineConfig()

    def flat(self) -> dict[str, Any]:
        """Every option's value under its flag's name."""
        return {
            name: value
            for section in self.model_dump(by_alias=True).values()
            for name, value in section.items()
        }


@dataclass(frozen=True)
class Option:
    """What help, docs and the reader need to know of one option."""

    name: str  # as in --name
    section: str
    heading: str
    type: type  # int, float, bool or str
    optional: bool  # may be left unset, which flags and YAML write as null
    choices: tuple[str, ...]
    default: Any
    help: str
    family: str
    # as declared by `option`
    auto: str
    resumable: bool
    aliases: tuple[str, ...]
    low: float | None
    high: float | None


def _iterate_options() -> Iterator[Option]:
    """All options in the order of the schema."""
    for section, holder in Config.model_fields.items():
        group = holder.annotation
        assert isinstance(group, type) and issubclass(group, Section)
        hints = get_type_hints(group)
        for name, field in group.model_fields.items():
            extra: Any = field.json_schema_extra
            hint = hints[name]
            optional = type(None) in get_args(hint)
            kind = get_args(hint)[0] if optional else hint
            choices = get_args(kind)  # of a Literal
            yield Option(
                name=name.replace("_", "-"),
                section=section,
                heading=(group.__doc__ or "").rstrip("."),
                type=str if choices else kind,
                optional=optional,
                choices=choices,
                default=field.default,
                help=field.description or "",
                family=group.family,
                **extra,
            )


OPTIONS: dict[str, Option] = {option.name: option for option in _iterate_options()}
SPELLINGS: dict[str, str] = {
    spelling: o.name for o in OPTIONS.values() for spelling in (o.name, *o.aliases)
}


def suggest_option(word: str, known: Collection[str]) -> str:
    """The way out of an option that is none of the known ones, with or without its dashes.

    >>> suggest_option("--optimiser", ["--optimizer"]), suggest_option("epohcs", ["epochs"])
    ('it is --optimizer here', "did you mean 'epochs'?")
    """
    plain = word.lstrip("-").lower().replace("_", "-")
    option, meaning = (_OTHER_PROGRAMS | _NO_SUCH_OPTION).get(plain, ("", ""))
    if option not in known and f"--{option}" not in known:
        return suggest(word, known)
    if plain in _NO_SUCH_OPTION:
        return meaning
    return f"it is --{option} here{', ' * bool(meaning)}{meaning}"
