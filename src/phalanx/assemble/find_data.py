"""Finds out which dataset --data-dir holds if --data is not given; downloads missing ones."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.catalog.datasets import DATASETS, PUBLISHED
from phalanx.config.read import Settings, read_settings
from phalanx.config.schema import Config
from phalanx.disk import expand_home
from phalanx.errors import ConfigError, DataError
from phalanx.plan.model import choose_image_size
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.data.formats.detect import DetectedDataset
    from phalanx.data.layouts.listing import LayoutOptions

_FOLDER_FLAGS = ("data-dir", "imagenet-data-path")  # the flags that name the folder
_IDX = ("mnist", "fashion-mnist")  # their files have the same names, so --data is trusted


def read_settings_with_data(
    preset: str | None, flags: Mapping[str, str], *, problems: tuple[str, ...] = ()
) -> Settings:
    """The settings of a command line; without --data, the contents of the data folder decide.

    A preset for photographs accepts any other dataset of photographs; one for small images, such
    as CIFAR-10, keeps its dataset.
    """
    flag_folder = _find_data_folder(flags)
    folder = flag_folder or os.environ.get("DATA_DIR")
    if not folder:
        return read_settings(preset, flags, problems=problems)
    given = {} if "data" in flags else _infer_data_flags(preset, flags, folder, problems=problems)
    settings = read_settings(preset, {**flags, **given}, problems=problems)
    if given:
        origins = dict.fromkeys(given, "environment DATA_DIR") if not flag_folder else {}
        return replace(settings, origins=settings.origins | origins)
    if preset is not None or "data" in flags:
        return _resolve_data_folder(settings, folder)
    if not flag_folder:
        from phalanx.data.formats.sources import refuse_no_folder

        hint = "DATA_DIR names it; correct or unset that, or name a dataset with --data-dir"
        refuse_no_folder(expand_home(folder), hint)
        note = (
            f"DATA_DIR is {folder}, where no dataset was recognised: using the embedded one; name "
            "another with --data and --data-dir"
        )
        return replace(settings, notes=(note, *settings.notes))
    return settings


def use_random_data(settings: Settings, kind: str) -> Settings:
    """The settings with noise instead of the data: synthetic on the device, generated on the host.

    Images have the size of those of the data that a preset or the user has named.
    """
    config, is_named = settings.config, settings.origins.get("data", "default") != "default"
    size = choose_image_size(config) if is_named else config.data.image_size
    unset = ("data-dir", "val-split", "valid-split", "class-from", "labels", "keep-on-device")
    off = ("gpu-decode", "dataset-cache", "use-bbox-info")
    noise = {"data": kind, "image-size": size, "progressive-resolution": None}
    changed = settings.replace_options(noise | dict.fromkeys(unset) | dict.fromkeys(off, False))
    return replace(changed, origins={**settings.origins, "data": "made up"})


def make_data_dir_absolute(settings: Settings) -> Settings:
    """The settings with an absolute data folder, so that the run finds its data from anywhere.

    A path that begins with ~ stays as it is: it may differ between hosts.
    """
    folder = settings.config.data.data_dir
    if folder is None or expand_home(folder).is_absolute():
        return settings
    return settings.replace_options({"data-dir": str(Path(folder).absolute())})


def refuse_run_in_data(config: Config, run: Path) -> None:
    """Raise ConfigError if a run folder would be read as a class of the run's own data."""
    if config.data.data_dir is None:
        return
    from phalanx.assemble.dataset_summary import build_layout_options, locate_data
    from phalanx.data.formats.sources import refuse_output_in_data

    data, folder = locate_data(config)
    layout = build_layout_options(config)
    refuse_output_in_data(run, "--run-dir", data=data, root=Path(folder or ""), layout=layout)


def infer_data_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """The flags that name the data in the data folder, if there is no preset."""
    folder = _find_data_folder(flags) or os.environ.get("DATA_DIR")
    if not folder or "data" in flags:
        return {}
    return _infer_data_flags(None, flags, folder, problems=())


def _find_data_folder(flags: Mapping[str, str]) -> str:
    """The data folder that flags name; empty if they name none."""
    folder = next((flags[name] for name in _FOLDER_FLAGS if flags.get(name)), "")
    if not folder and _read_layout(flags).labels:  # paths are relative to the folder of the file
        folder = str(expand_home(flags["labels"]).absolute().parent)
    return folder


def _infer_data_flags(
    preset: str | None, flags: Mapping[str, str], folder: str, *, problems: tuple[str, ...]
) -> dict[str, str]:
    """The flags that name the data in a folder; none if unknown or if the preset keeps its own.

    Raises DataError for a folder that only a flag names, if it holds nothing known.
    """
    root = expand_home(folder)
    must_be = preset is None and not problems and not flags.keys().isdisjoint(_FOLDER_FLAGS)
    if not must_be and not root.is_dir():
        return {}
    # takes half a second to import, so only when needed
    from phalanx.data.formats.detect import describe_no_dataset, detect_datasets

    detected = detect_datasets(root, _read_layout(flags))
    if must_be and not detected:
        raise DataError(describe_no_dataset(root))
    if preset is not None:
        settings = read_settings(preset, flags, problems=problems)
        named = settings.config.data.data
        # else from the environment
        is_asked = not flags.keys().isdisjoint({*_FOLDER_FLAGS, "labels"})
        keeps_own = not DATASETS[named].any_size or not (is_asked or DATASETS[named].needs_folder)
        if keeps_own or named in {finding.data for finding in detected}:
            return {}
        detected = [f for f in detected if f.data not in DATASETS or DATASETS[f.data].any_size]
    return _choose_data_flags(detected, folder)


def _read_layout(flags: Mapping[str, str]) -> "LayoutOptions":
    """The layout options among flags that decide how a folder is recognised."""
    from phalanx.data.layouts.listing import LayoutOptions

    given = {name: flags.get(name, "none") for name in ("class-from", "labels")}
    texts = {name: text for name, text in given.items() if text.lower() not in ("none", "null")}
    return LayoutOptions(class_from=texts.get("class-from"), labels=texts.get("labels"))


def _resolve_data_folder(settings: Settings, data_dir: str) -> Settings:
    """The settings with the actual format and folder of the data, at or below the named folder.

    The dataset may be in a subfolder, and ImageNet may be in any of its formats.
    """
    from phalanx.assemble.dataset_summary import build_layout_options
    from phalanx.data.formats.detect import locate_dataset

    options = settings.config.data
    if not DATASETS[options.data].needs_folder or not expand_home(data_dir).is_dir():
        return settings
    root, layout = expand_home(data_dir), build_layout_options(settings.config)
    form, folder = locate_dataset(options.data, root, layout)
    found = {"data": form} if form != options.data else {}
    if folder != root or options.data_dir is None:
        found["data-dir"] = str(folder)
    return settings.replace_options(found, origin=f"found in {data_dir}")


def _choose_data_flags(detected: "list[DetectedDataset]", folder: str) -> dict[str, str]:
    """The flags that name the dataset; none if none was found."""
    from phalanx.data.formats.detect import describe_conversion, describe_several_datasets

    ready = [finding for finding in detected if finding.data in DATASETS]
    if detected and not ready:
        raise DataError(describe_conversion(detected[0]))
    if len(ready) > 1:
        raise ConfigError(describe_several_datasets(Path(folder), ready))
    return {"data": ready[0].data, "data-dir": str(ready[0].folder)} if ready else {}


def fetch_missing_dataset(settings: Settings, print_line: Callable[[str], None]) -> Settings:
    """The settings with the folder of a published dataset, downloaded if it is missing."""
    options = settings.config.data
    folder = expand_home(options.data_dir) if options.data_dir else None
    if options.data not in PUBLISHED or options.no_fetch or (folder and folder.is_file()):
        return settings
    from phalanx.data.fetch import fetch_dataset
    from phalanx.data.formats.detect import detect_datasets

    there = (
        {finding.data for finding in detect_datasets(folder)}
        if folder and folder.is_dir()
        else set()
    )
    if options.data in there or (options.data in _IDX and there & set(_IDX)):
        return settings
    print_line(
        f"{options.data} is not in {folder or 'data/' + options.data}: looking for it elsewhere"
    )
    found = fetch_dataset(options.data, folder)
    files = format_plural(len(found.downloaded), "file")
    how = f"{files} downloaded to" if found.downloaded else "found in"
    print_line(f"{options.data}: {how} {found.folder}, all checksums match")
    return settings.replace_options({"data-dir": str(found.folder)}, origin="fetched")
