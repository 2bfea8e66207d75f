"""How large images are, at the end of a run and before it."""

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.model import build_variant, check_variant
from phalanx.plan.schedule_options import RunLength
from phalanx.units import parse_resolutions

Growth = tuple[tuple[int, int], ...]  # until which step training images have which size


def choose_image_size(config: Config) -> int:
    """As asked, else the model's own where images are cut to size anyway, else the dataset's."""
    dataset = DATASETS[config.data.data]
    own = MODELS[config.model.model].image_size if dataset.any_size else dataset.image_size
    return config.data.image_size or own


def plan_growth(config: Config, image_size: int, clock: RunLength) -> Growth:
    """Until which step training images have which smaller size; empty where they never do."""
    text = config.data.progressive_resolution
    if text is None:
        return ()
    total, per_epoch = clock.total, clock.steps_per_epoch
    growth = tuple(
        (end.steps(steps_per_epoch=per_epoch, total_steps=total), size)
        for size, end in parse_resolutions(text)
    )
    ends = [end for end, _ in growth]
    if ends != sorted(set(ends)) or ends[0] == 0:
        raise ConfigError(
            f"--progressive-resolution {text}: ends at steps {ends}; each must come after the one "
            "before it"
        )
    if ends[-1] >= total:
        raise ConfigError(
            f"--progressive-resolution {text}: lasts until step {ends[-1]:,} of {total:,}, and no "
            "step is left at --image-size; end it earlier, such as at 80%"
        )
    if any(size >= image_size for _, size in growth):
        raise ConfigError(
            f"--progressive-resolution {text}: wants sizes below --image-size {image_size}, "
            "which the run ends with"
        )
    return growth


def check_sizes(config: Config, image_size: int, growth: Growth) -> None:
    """Refuse a network that cannot be built, or images of a size it cannot take."""
    model, batch = config.model.model, config.data.batch_size
    for size in (image_size, *(size for _, size in growth)):
        check_variant(model, build_variant(config), size, micro_batch=batch)
