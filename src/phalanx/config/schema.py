"""All options of Phalanx: default, limits and help.

A flag, a YAML key and an attribute are the same word: `--batch-size`, `batch-size:`,
`config.data.batch_size`. Sections only group options in code, help and docs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from phalanx.config.data_options import AugmentConfig, DataConfig
from phalanx.config.fields import Section
from phalanx.config.machine_options import MachineConfig
from phalanx.config.model_options import EfficientNetConfig, ModelConfig, ResNetConfig
from phalanx.config.pipeline_options import PipelineConfig
from phalanx.config.tracker_options import TrackerConfig
from phalanx.config.train_options import (
    LossConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

MODEL_SECTIONS = ("model", "resnet", "efficientnet")  # whose options describe the network
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Config(Section):
    """All options, complete and frozen. Derived numbers are in the Plan, never here."""

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
    pipeline: PipelineConfig = PipelineConfig()
    trackers: TrackerConfig = TrackerConfig()

    def flat(self) -> dict[str, Any]:
        """The value of every option, by name of its flag."""
        return {
            name: value
            for section in self.model_dump(by_alias=True).values()
            for name, value in section.items()
        }

    def replace_options(self, options: Mapping[str, Any]) -> "Config":
        """The config with other values for these options, by name of the flag; not validated."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            sections.setdefault(OPTIONS[name].section, {})[name.replace("-", "_")] = value
        changed = {
            name: getattr(self, name).model_copy(update=values) for name, values in sections.items()
        }
        return self.model_copy(update=changed)


@dataclass(frozen=True)
class Option:
    """What help, docs and the parser need to know about one option."""

    name: str  # as in --name
    section: str
    heading: str
    type: type  # int, float, bool or str
    takes_share: bool  # whether a boolean may also be a share between 0 and 1
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

    @property
    def expected_values(self) -> str:
        """The expected values, in words; auto is mentioned only if it is not the default."""
        auto = " or auto" * (self.optional and self.default is not None)
        share = ", or a share such as 0.4" * self.takes_share
        return f"{_TYPE_NAMES[self.type]}{share}{auto}"


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
            takes_share = {bool, float} <= set(get_args(hint))
            kind = get_args(hint)[0] if optional or takes_share else hint
            choices = get_args(kind)  # of a Literal
            yield Option(
                name=name.replace("_", "-"),
                section=section,
                heading=(group.__doc__ or "").rstrip("."),
                type=str if choices else kind,
                takes_share=takes_share,
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
