"""What can be exported and how, checked before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from phalanx.assemble.dataset_summary import choose_normalization
from phalanx.assemble.prepare import refuse_missing_weights
from phalanx.assemble.scoring_target import (
    ScorableCheckpoint,
    Target,
    choose_checkpoint,
    get_settings,
    plan_untrained_model,
    read_checkpoint,
    read_untrained_settings,
    refuse_missing_path,
)
from phalanx.config.schema import Config
from phalanx.engine.checkpoint_store import AVERAGE_WEIGHTS
from phalanx.errors import CheckpointError, ConfigError, suggest
from phalanx.export.file_kind import describe_file
from phalanx.export.metadata import WeightsKind, check_model_name, make_model_name
from phalanx.export.timm_config import refuse_unknown_to_timm
from phalanx.plan.model import build_variant
from phalanx.report.folder import is_run_folder

_DTYPES = ("float32", "float16", "bfloat16")
_WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True)
class ExportSource:
    """What is exported: a checkpoint, or a preset or model by name with its initial weights."""

    target: Target

    @property
    def checkpoint(self) -> ScorableCheckpoint | None:
        """The checkpoint; None for an untrained model."""
        return self.target if isinstance(self.target, ScorableCheckpoint) else None

    @property
    def config(self) -> Config:
        """Its options."""
        return get_settings(self.target).config

    @property
    def name(self) -> str:
        """The name of the run, preset or model."""
        if self.checkpoint is None:
            return get_settings(self.target).name
        return str(self.checkpoint.start.facts["run"])

    @property
    def run(self) -> Path | None:
        """The folder of the checkpoint's run."""
        if self.checkpoint is None:
            return None
        folder = self.checkpoint.start.checkpoint.parent.parent
        return folder if is_run_folder(folder) else None

    @property
    def weights(self) -> WeightsKind:
        """Where its weights come from."""
        if self.checkpoint is not None:
            return "trained"
        model = self.config.model
        return "random" if model.init_weights is None or model.reset_head else "file"

    @property
    def note(self) -> str:
        """Which checkpoint was chosen, in words; empty if it was named itself."""
        if self.checkpoint is not None:
            return self.checkpoint.choice
        file = self.config.model.init_weights
        if self.weights == "file":
            return f"the weights of {file}"
        which = f"the weights of {file} with a random classifier" if file else "random weights"
        return f"{which}, so its answers mean nothing"


@dataclass(frozen=True, kw_only=True)
class _ExportFormat:
    """An export format."""

    help: str
    suffix: str = ""  # of its file; empty for a folder
    files: tuple[str, ...] = ()  # in its folder, besides the card; the model first
    packages: tuple[str, ...] = ()
    computes: bool = True  # whether it contains the network, not only weights for another program's
    dtypes: tuple[str, ...] = _DTYPES


_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_FORMATS = {
    "onnx": _ExportFormat(
        help="one file for onnxruntime and many others",
        suffix=".onnx",
        packages=_ONNX_PACKAGES,
        dtypes=_DTYPES[:2],
    ),
    "pt2": _ExportFormat(
        help="a program of torch.export, which needs no code of ours", suffix=".pt2"
    ),
    "safetensors": _ExportFormat(
        help="the weights alone, under timm's names", suffix=".safetensors", computes=False
    ),
    "timm": _ExportFormat(
        help="a folder that timm.create_model and the Hugging Face hub read",
        files=("model.safetensors", "config.json"),
        computes=False,
    ),
    "triton": _ExportFormat(
        help="a model in a repository for NVIDIA's Triton server",
        files=("1/model.onnx", "config.pbtxt", "labels.txt"),
        packages=_ONNX_PACKAGES,
        dtypes=_DTYPES[:2],
    ),
}


_FILE_SUFFIXES = {  # of files; after any other dot, the name may be that of a folder: v1.2
    *(kind.suffix for kind in _FORMATS.values() if kind.suffix), *_WEIGHT_SUFFIXES,
    ".ckpt", ".engine", ".gz", ".h5", ".json", ".keras", ".mar", ".md", ".mlmodel", ".npz", ".ort",
    ".pb", ".pdf", ".pickle", ".pkl", ".plan", ".tar", ".tflite", ".trt", ".txt", ".yaml", ".yml",
    ".zip",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a model is exported, and on how many images the export is checked."""

    format: str = "onnx"
    out: Path | None = None  # by default in the run's folder
    name: str | None = None  # by default the run's
    with_preprocessing: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    averaged: bool = False
    max_batch: int = 32
    check_images: int = 64

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ConfigError(f"--format {self.format}: {suggest(self.format, _FORMATS)}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: {suggest(self.dtype, _DTYPES)}")
        kind = _FORMATS[self.format]
        if self.dtype not in kind.dtypes:
            raise ConfigError(
                f"--dtype {self.dtype}: onnxruntime has no {self.dtype} convolutions on a CPU, so "
                "the file could not be checked; use float16, or --format pt2"
            )
        if self.with_preprocessing and not kind.computes:
            raise ConfigError(
                f"--with-preprocessing: --format {self.format} holds weights alone, which take no "
                "input; leave the option out, or use --format onnx"
            )
        if self.name is not None:
            check_model_name(self.name)

    @property
    def kind(self) -> _ExportFormat:
        """The facts about the format."""
        return _FORMATS[self.format]

    def refuse_missing_packages(self) -> None:
        """Raise if a package is missing, with the command that installs it."""
        missing = [name for name in self.kind.packages if find_spec(name) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ConfigError(
                f"--format {self.format}: {', '.join(missing)} {verb} not installed; "
                "pip install 'phalanx[export]'"
            )

    def refuse_unsupported(self, source: ExportSource) -> None:
        """Raise if the format cannot hold the model."""
        if self.format == "timm":
            config = source.config
            how = choose_normalization(config)
            if source.checkpoint is not None:
                facts = source.checkpoint.start.facts
                how = facts["preprocessing"].get("normalization", "mean-std")
            refuse_unknown_to_timm(config.model.model, build_variant(config), how)

    def choose_name(self, source: ExportSource) -> str:
        """The model's name: the given one, else its run's, in characters allowed in URLs."""
        return self.name or make_model_name(source.name) or "model"

    def choose_path(self, source: ExportSource) -> Path:
        """The export's path: a file, or a folder if the format is one."""
        name = self.choose_name(source)
        out = self.out
        if out is None:
            folder = _choose_folder(source)
            out = folder if self.format == "onnx" else folder / self.format
            if self.kind.suffix:
                return out / f"{name}{self.kind.suffix}"
        wanted = self.kind.suffix
        if wanted and out.suffix == wanted and not out.is_dir():
            return out
        if out.suffix.lower() in _FILE_SUFFIXES and not out.is_dir():
            raise ConfigError(
                f"--out {out}: ends in {out.suffix}, and --format {self.format} writes "
                f"{wanted or 'a folder'}; change one of them"
            )
        if not wanted:
            # a repository may hold several models
            return out / name if self.format == "triton" else out
        return out / f"{name}{wanted}"


def _choose_folder(source: ExportSource) -> Path:
    """The default folder of exports: in the run; for untrained models, the current folder."""
    run, here = source.run, Path.cwd()
    if source.checkpoint is not None and run is None:
        raise ConfigError(
            f"--out: {source.checkpoint.start.checkpoint} is in no run folder to write to; say "
            "where the export goes"
        )
    if run is None:
        return Path("export")
    return (run.relative_to(here) if run.is_relative_to(here) else run) / "export"


def read_export_options(values: Mapping[str, Any]) -> tuple[ExportOptions, dict[str, Any]]:
    """The keywords that are options of the export, and the others."""
    own = {field.name for field in fields(ExportOptions)}
    given = {name: value for name, value in values.items() if name in own and value is not None}
    if "out" in given:
        given["out"] = Path(given["out"])
    return ExportOptions(**given), {n: v for n, v in values.items() if n not in own}


def _find_averaged(checkpoint: Path) -> Path:
    """The averaged weights of a checkpoint."""
    found = checkpoint / AVERAGE_WEIGHTS
    if found.is_file():
        return found
    raise CheckpointError(
        f"--averaged: {checkpoint} has no averaged weights, because the run was not trained with "
        "--ema-decay; leave the option out, or make an average of checkpoints, phalanx average "
        "RUN, and name RUN/checkpoints/average"
    )


def read_export_source(
    target: str, flags: Mapping[str, str], *, selection: str | None, averaged: bool
) -> ExportSource:
    """The model of a path, or of the name of a preset or model, in 32 bits on the CPU.

    selection: which checkpoint of a run, as for `choose_checkpoint`.
    """
    path, given = Path(target), {**flags, "device": "cpu", "precision": "32.32"}
    settings = read_untrained_settings(target, given)
    if settings is not None:
        if selection is not None or averaged:
            flag = "--averaged" if selection is None else f"--checkpoint {selection}"
            raise ConfigError(
                f"{flag}: {target} is not a run, so it has no checkpoints; leave it out"
            )
        refuse_missing_weights(settings.config)
        # impossible settings are refused before torch is imported
        plan_untrained_model(settings, without_data=True)
        return ExportSource(settings)
    if path.is_file() and path.name != AVERAGE_WEIGHTS:
        of_model = f", or the model: phalanx export MODEL --init-weights {path}"
        raise CheckpointError(
            f"{path}: is a file ({describe_file(path)}); name the run or the checkpoint to export"
            + of_model * (path.suffix in _WEIGHT_SUFFIXES)
        )
    refuse_missing_path(target)
    return ExportSource(
        read_scorable_checkpoint(path, given, selection=selection, averaged=averaged)
    )


def read_scorable_checkpoint(
    path: Path, flags: Mapping[str, str], *, selection: str | None, averaged: bool
) -> ScorableCheckpoint:
    """The checkpoint at a path, or its averaged weights."""
    if not averaged or path.name == AVERAGE_WEIGHTS:
        return read_checkpoint(path, flags, selection=selection)
    chosen, choice = choose_checkpoint(path, selection)
    found = read_checkpoint(_find_averaged(chosen), flags)
    return replace(found, choice=f"{choice}; its averaged weights" if choice else "")
