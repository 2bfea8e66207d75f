"""Which dataset --data-dir holds, when nobody said; and fetching one that is not there."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.catalog.datasets import DATASETS, PUBLISHED
from phalanx.config.read import Settings, read_settings
from phalanx.errors import ConfigError, DataError

if TYPE_CHECKING:
    from phalanx.data.formats.detect import DetectedDataset

_IDX = ("mnist", "fashion-mnist")  # files of the same names: whoever names the set is believed


def read_with_data(
    preset: str | None, flags: Mapping[str, str], *, problems: tuple[str, ...] = ()
) -> Settings:
    """The settings of a command line; without --data, what lies in the data folder decides.

    A preset that names one kind of photographs takes any other; one for a set of small images,
    such as CIFAR-10, keeps to it.
    """
    place = flags.get("data-dir") or flags.get("imagenet-data-path")
    if preset is not None:  # a bare `phalanx train` is the demo, whatever the environment holds
        place = place or os.environ.get("DATA_DIR")
    if "data" in flags or not place or not Path(place).expanduser().is_dir():
        return read_settings(preset, flags, problems=problems)
    # half a second of imports, for those who need it
    from phalanx.data.formats.detect import detect_datasets

    found = detect_datasets(Path(place).expanduser())
    if preset is not None:
        settings = read_settings(preset, flags, problems=problems)
        named = settings.config.data.data
        if not DATASETS[named].any_size or named in {finding.data for finding in found}:
            return settings
        found = [f for f in found if f.data not in DATASETS or DATASETS[f.data].any_size]
    return read_settings(preset, {**flags, **_choose_data(found, place)}, problems=problems)


def _choose_data(found: "list[DetectedDataset]", place: str) -> dict[str, str]:
    """The flags that name the dataset; none where nothing is known to lie there."""
    from phalanx.data.formats.detect import describe_choices, describe_conversion

    ready = [finding for finding in found if finding.data in DATASETS]
    if found and not ready:
        raise DataError(describe_conversion(found[0]))
    if len(ready) > 1:
        raise ConfigError(describe_choices(Path(place), ready))
    return {"data": ready[0].data, "data-dir": str(ready[0].folder)} if ready else {}


def fetch_missing(settings: Settings, say: Callable[[str], None]) -> Settings:
    """The settings with a published set in its place, downloaded if it is not there yet."""
    options = settings.config.data
    place = Path(options.data_dir).expanduser() if options.data_dir else None
    if options.data not in PUBLISHED or options.no_fetch or (place and place.is_file()):
        return settings
    from phalanx.data.fetch import fetch_dataset
    from phalanx.data.formats.detect import detect_datasets

    there = (
        {finding.data for finding in detect_datasets(place)} if place and place.is_dir() else set()
    )
    if options.data in there or (options.data in _IDX and there & set(_IDX)):
        return settings
    say(f"{options.data} is not in {place or 'data/' + options.data}: looking for it elsewhere")
    found = fetch_dataset(options.data, place)
    how = f"{len(found.downloaded)} files downloaded to" if found.downloaded else "found in"
    say(f"{options.data}: {how} {found.folder}, all checksums match")
    data = options.model_copy(update={"data_dir": str(found.folder)})
    origins = {**settings.origins, "data-dir": "fetched"}
    return replace(
        settings, config=settings.config.model_copy(update={"data": data}), origins=origins
    )
