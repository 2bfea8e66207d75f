"""Checks every value of a sweep before it runs, with the reader and plan of `phalanx train`."""

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from phalanx.assemble.dataset_summary import (
    RANDOM_DATASETS,
    adapt_settings,
    plan_settings,
    summarise_published,
    summarise_random_dataset,
)
from phalanx.assemble.find_data import read_settings_with_data
from phalanx.catalog.plugins import refuse_unnamed_plugins
from phalanx.config.presets import find_preset
from phalanx.config.read import Settings
from phalanx.config.text import parse_option_text
from phalanx.errors import ConfigError, join_problems
from phalanx.plan.plan import find_validation_rate
from phalanx.sweep.file import SweepFileReader
from phalanx.sweep.schema import (
    PLUGIN,
    PRESET,
    Choice,
    SweepFile,
    count_points,
    iterate_ends,
    iterate_points,
)

_MOST_POINTS = 2_000  # that are checked one by one, at a millisecond each


def read_sweep(path: Path) -> SweepFile:
    """The sweep in a file; all mistakes are reported together, in file order."""
    reader = SweepFileReader(path)
    sweep, problems = reader.read(), reader.problems
    if sweep is not None:
        _refuse_unnamed_plugins(sweep)
        problems += [text for text in _check_values(sweep, path) if text not in problems]
    if problems or sweep is None:
        lines = {text: re.search(r":(\d+): ", text) for text in problems}
        raise join_problems(sorted(problems, key=lambda text: int((lines[text] or [0, 0])[1])))
    return sweep


def _refuse_unnamed_plugins(sweep: SweepFile) -> None:
    """Raise if the file gives plugins to trials that the command line does not name."""
    searched = sweep.search.get(PLUGIN)
    names = [sweep.options[PLUGIN]] if PLUGIN in sweep.options else []
    names += searched.values if isinstance(searched, Choice) else ()
    for text in names:
        if (plugins := parse_option_text(PLUGIN, text)) is not None:
            refuse_unnamed_plugins(plugins, where=sweep.locations[PLUGIN])


def _check_values(sweep: SweepFile, path: Path) -> list[str]:
    """Problems that the reader and the plan find in the values of a sweep, each once."""
    problems = list(_check_presets(sweep))
    if problems:
        return problems
    # the ends of each option in any case, and all points if they can be counted
    countable = count_points(sweep.search) is not None
    points = chain(iterate_ends(sweep.search), iterate_points(sweep.search) if countable else ())
    known: dict[str, str] = {}
    for values in islice(points, _MOST_POINTS):
        try:
            settings = read_settings_with_data(
                sweep.preset_for(values), {**known, **sweep.flags_for(values)}
            )
            _refuse_impossible(settings)
        except ConfigError as error:
            problems += _name_lines(str(error), sweep, path)
        else:
            problems += [*_check_scores(settings, sweep, path)]
            known = known or _find_data(settings, sweep)
    return list(dict.fromkeys(problems))


def _check_presets(sweep: SweepFile) -> Iterator[str]:
    """Presets that do not exist."""
    searched = sweep.search.get(PRESET)
    names = [sweep.preset] if sweep.preset else []
    names += searched.values if isinstance(searched, Choice) else ()
    for name in names:
        try:
            find_preset(name)
        except ConfigError as error:
            yield f"{sweep.locations[PRESET]}: {error}"


def _refuse_impossible(settings: Settings) -> None:
    """Raise ConfigError for what the plan refuses; data in folders is checked by the trials."""
    if settings.missing:
        raise ConfigError(settings.missing)
    config = settings.config
    is_random = config.data.data in RANDOM_DATASETS
    dataset = summarise_random_dataset(config) if is_random else summarise_published(config)
    if dataset is not None and config.data.data_dir is None:
        plan_settings(adapt_settings(settings, dataset.counts), dataset.counts)


def _find_data(settings: Settings, sweep: SweepFile) -> dict[str, str]:
    """What is in the data folder, so that it is inspected once and not for every point."""
    data = settings.config.data
    if data.data_dir is None or sweep.search.keys() & {PRESET, "data", "data-dir"}:
        return {}
    return {"data": data.data, "data-dir": data.data_dir}


def _name_lines(message: str, sweep: SweepFile, path: Path) -> Iterator[str]:
    """The reader's problems, each with its line in the sweep's file instead of a flag."""
    first, *others = message.splitlines()
    several = re.fullmatch(r"\d+ problems:", first) is not None
    for problem in [line.strip() for line in others] if several else [message]:
        option = re.match(r"--([a-z0-9-]+)", problem)
        if option and option[1] in sweep.locations:
            yield sweep.locations[option[1]] + problem[option.end() :]
        else:
            yield problem if problem.startswith(str(path)) else f"{path}: {problem}"


def _check_scores(settings: Settings, sweep: SweepFile, path: Path) -> Iterator[str]:
    """Problems with scores: a sweep compares them, and a pruner needs them during training."""
    train = settings.config.train
    after = train.validation and train.validation_mode == "after"
    names = ("validation", "validation-mode", "validation-frequency")
    where = next((sweep.locations[name] for name in names if name in sweep.locations), str(path))
    if not after and find_validation_rate(settings.config) == 0:
        yield f"{where}: a sweep compares validation scores, and there are none; leave it out"
    if after and sweep.prune != "none":
        yield (
            f"{where}: prune: {sweep.prune} needs scores while a trial trains; use "
            "validation-mode: during, or prune: none"
        )
