"""Every option of Phalanx in one table: its default, its limits and its line of help.

A flag, a YAML key and an attribute are the same word: `--batch-size`, `batch-size:`,
`config.data.batch_size`. Sections only group options in code, help and docs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

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
    kind: Any  # the annotation
    default: Any
    help: str
    auto: str
    resumable: bool
    also: tuple[str, ...]
    family: str
    low: float | None
    high: float | None


def _limit(field: FieldInfo, name: str) -> float | None:
    """A field's bound, which pydantic keeps among its metadata."""
    return next((getattr(m, name) for m in field.metadata if hasattr(m, name)), None)


def _iterate_options() -> Iterator[Option]:
    """All options in the order of the schema."""
    for section, holder in Config.model_fields.items():
        kind = holder.annotation
        assert isinstance(kind, type) and issubclass(kind, Section)
        for name, field in kind.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict)
            yield Option(
                name=name.replace("_", "-"),
                section=section,
                heading=(kind.__doc__ or "").rstrip("."),
                kind=field.annotation,
                default=field.default,
                help=field.description or "",
                auto=str(extra["auto"]),
                resumable=bool(extra["resumable"]),
                also=tuple(str(old) for old in extra["also"]),  # type: ignore[union-attr]
                family=kind.family,
                low=_limit(field, "ge"),
                high=_limit(field, "le"),
            )


OPTIONS: dict[str, Option] = {option.name: option for option in _iterate_options()}
SPELLINGS: dict[str, str] = {
    spelling: o.name for o in OPTIONS.values() for spelling in (o.name, *o.also)
}
