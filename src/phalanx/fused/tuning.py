"""Compiles and chooses kernels before the first step, and keeps the choices for later runs."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.cache_folder import ensure_writable, find_user_cache, open_temporary_cache
from phalanx.disk import write_atomically
from phalanx.errors import DiskError
from phalanx.kernels.choices import CHOICES
from phalanx.models.units import UnitModel, find_noise_sizes

_COMPILERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_KEPT_NOISE = 0.999  # drop-path drops nothing, whatever its rate


def set_compiler_cache(folder: Path | None) -> Path:
    """Make compilers cache in a folder, the user's cache if none is given; returns it.

    torch creates its part even if nothing is compiled, and fails if it cannot: a temporary folder
    is used if the user's cache is not writable.
    """
    chosen = folder or (find_user_cache() or open_temporary_cache()) / "kernels"
    try:
        ensure_writable(chosen, *(chosen / name for name in _COMPILERS.values()))
    except OSError as cause:
        if folder is not None:
            raise DiskError(
                f"--model-cache-path {folder}: cannot be written to ({cause.strerror or cause}); "
                "choose another folder, or leave the option out"
            ) from cause
        chosen = open_temporary_cache() / "kernels"
    for variable, name in _COMPILERS.items():
        if folder is not None or variable not in os.environ:
            os.environ[variable] = str(chosen / name)
    return chosen


def describe_temporary_cache(cache: Path) -> list[str]:
    """A note about the folder that `set_compiler_cache` chose, if it is not the user's own."""
    own = find_user_cache()
    if own is not None and cache == own / "kernels":
        return []
    why = "you have no home folder" if own is None else f"{own} cannot be written to"
    return [
        f"{why}: compiled kernels are kept in {cache}, and lost with the temporary files; choose "
        "another folder with --model-cache-path"
    ]


def tune_kernels(model: UnitModel, images: Tensor, *, half: torch.dtype) -> None:
    """Compile and choose the kernels of training passes over such images.

    The model is unchanged afterwards: no gradients, and the running statistics that it had.
    """

    def run_pass() -> None:
        sizes = find_noise_sizes(model).items()
        shape = {path: (len(images), size) for path, size in sizes}
        noise = {p: torch.full(s, _KEPT_NOISE, device=images.device) for p, s in shape.items()}
        with torch.autocast(images.device.type, dtype=half):
            logits = model(images, noise) if noise else model(images)
        logits.float().logsumexp(1).sum().backward()

    with _restore_afterwards(model):
        CHOICES.compile_all(run_pass)
        run_pass()


@contextmanager
def _restore_afterwards(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in training mode; afterwards it is as before."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        model.zero_grad(set_to_none=True)


class ChoiceStore:
    """The files of kernel choices: in the run that made them, and in the cache for other runs."""

    def __init__(self, run: Path | None, cache: Path) -> None:
        versions = f"{torch.cuda.get_device_name()} {torch.__version__}"
        name = sha256(versions.encode()).hexdigest()[:16]
        self._files = [run / "kernels.json"] if run else []
        self._files.append(cache / f"choices-{name}.json")

    def load(self) -> None:
        """Load earlier choices; the run's own take precedence."""
        for file in reversed(self._files):
            CHOICES.chosen_names |= _read(file)

    def save(self, all_gather: Callable[[Any], list[Any]], *, writes: bool) -> None:
        """Adopt the first rank's choices, and write them."""
        CHOICES.chosen_names = all_gather(CHOICES.chosen_names)[0]
        for file in self._files if writes else ():
            text = json.dumps(_read(file) | CHOICES.chosen_names, indent=1, sort_keys=True)
            with suppress(DiskError, OSError):  # they can be timed again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, text)


def _read(file: Path) -> dict[str, str]:
    """The choices in a file; none if it cannot be read: they can be timed again."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
