"""Every value of a sweep through the reader and the plan of `phalanx train`, before it runs."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from phalanx.assemble.dataset_summary import MADE_UP, summarise_made_up, summarise_published
from phalanx.assemble.find_data import read_with_data
from phalanx.config.presets import find_preset
from phalanx.config.read import Settings, joined
from phalanx.errors import ConfigError
from phalanx.plan.plan import choose_machine, make_plan, validations
from phalanx.sweep.file import PRESET, SweepFile, read_sweep
from phalanx.sweep.space import Choice, Values, as_text, count_points, iterate_ends, iterate_points
from phalanx.units import parse_rate

_MOST_POINTS = 2_000  # that are read one by one; it takes a millisecond each


def open_file(path: Path) -> SweepFile:
    """The sweep in a file; all that is wrong with it is told together."""
    sweep, problems = read_sweep(path)
    if sweep is not None:
        problems += [told for told in _check_values(sweep, path) if told not in problems]
    if problems or sweep is None:
        raise joined(sorted(problems, key=_line_of))
    return sweep


def _line_of(problem: str) -> int:
    """The line a problem names, to tell them in the order of the file."""
    found = re.search(r":(\d+): ", problem)
    return int(found[1]) if found else 0


def preset_of(sweep: SweepFile, values: Values) -> str | None:
    """The preset of a trial."""
    return str(values[PRESET]) if PRESET in values else sweep.preset


def flags_of(sweep: SweepFile, values: Values) -> dict[str, str]:
    """The options of a trial as flags."""
    drawn = {name: as_text(value) for name, value in values.items() if name != PRESET}
    return {**sweep.options, **drawn}


def _check_values(sweep: SweepFile, path: Path) -> list[str]:
    """What the reader and the plan say to the values of a sweep, each thing once."""
    found = list(_check_presets(sweep))
    if found:
        return found
    known: dict[str, str] = {}
    for values in islice(_iterate_probes(sweep), _MOST_POINTS):
        flags = {**known, **flags_of(sweep, values)}
        try:
            settings = read_with_data(preset_of(sweep, values), flags)
            _refuse_impossible(settings)
        except ConfigError as error:
            found += _blame(str(error), sweep, path)
        else:
            found += [*_refuse_unscored(settings, sweep, path)]
            known = known or _data_of(settings, sweep)
    return list(dict.fromkeys(found))


def _refuse_impossible(settings: Settings) -> None:
    """Raise ConfigError for what the plan refuses; a folder's data is left to the trials."""
    config = settings.config
    made_up = config.data.data in MADE_UP
    dataset = summarise_made_up(config) if made_up else summarise_published(config)
    if dataset is not None and config.data.data_dir is None:
        make_plan(config, dataset.counts, choose_machine(config), places=settings.places)


def _data_of(settings: Settings, sweep: SweepFile) -> dict[str, str]:
    """What lies in the data folder, so that it is looked at once and not for every point."""
    data = settings.config.data
    if data.data_dir is None or sweep.search.keys() & {PRESET, "data", "data-dir"}:
        return {}
    return {"data": data.data, "data-dir": data.data_dir}


def _check_presets(sweep: SweepFile) -> Iterator[str]:
    """Presets that are not there."""
    searched = sweep.search.get(PRESET)
    names = [sweep.preset] if sweep.preset else []
    names += searched.values if isinstance(searched, Choice) else ()
    for name in names:
        try:
            find_preset(name)
        except ConfigError as error:
            yield f"{sweep.places[PRESET]}: {error}"


def _iterate_probes(sweep: SweepFile) -> Iterator[Values]:
    """The points to read: all of them where they can be counted, else the ends of each option."""
    yield from iterate_ends(sweep.search)
    if count_points(sweep.search) is not None:
        yield from iterate_points(sweep.search)


def _blame(message: str, sweep: SweepFile, path: Path) -> list[str]:
    """The reader's problems, each with the line of the sweep's file instead of a flag."""
    lines = message.splitlines()
    several = re.fullmatch(r"\d+ problems:", lines[0]) is not None
    told = [line.strip() for line in lines[1:]] if several else [message]
    return [_named_by_line(line, sweep, path) for line in told]


def _named_by_line(problem: str, sweep: SweepFile, path: Path) -> str:
    """One problem with the place of the option it begins with."""
    found = re.match(r"--([a-z0-9-]+)", problem)
    if found and found[1] in sweep.places:
        return sweep.places[found[1]] + problem[found.end() :]
    return problem if problem.startswith(str(path)) else f"{path}: {problem}"


def _refuse_unscored(settings: Settings, sweep: SweepFile, path: Path) -> Iterator[str]:
    """A sweep goes by scores, and a pruner by scores that come while a trial trains."""
    train = settings.config.train
    after = train.validation and train.validation_mode == "after"
    names = ("validation", "validation-mode", "validation-frequency")
    where = next((sweep.places[name] for name in names if name in sweep.places), str(path))
    if not after and parse_rate(validations(settings.config)) == 0:
        yield f"{where}: a sweep compares validation scores, and there are none; leave it away"
    if after and sweep.prune != "none":
        yield (
            f"{where}: prune: {sweep.prune} needs scores while a trial trains; use "
            "validation-mode: during, or prune: none"
        )
