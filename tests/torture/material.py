"""What trials disturb: data in every form, and for each a whole run and one killed halfway."""

import io
import json
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from small_photos import CLASSES, encode, photo, write_photos
from small_runs import make_digits
from torture.command import KILLED, NEVER, Break, Ended, run
from torture.law import answer, check_end

COUNTS = {"train": 8, "val": 3}  # of each of the three classes
HALF = 4  # the step whose checkpoint the killed run goes on from: the end of its first epoch
FORMS = {  # form: (--data, --image-size, --batch-size: a quarter of the images)
    "jpeg folder": ("folder", 16, 6),
    "png folder": ("folder", 16, 6),
    "packed": ("packed", 16, 6),
    "packed raw": ("packed", 16, 6),
    "tar": ("tar", 16, 6),
    "tfrecord": ("tfrecord", 16, 6),
    "parquet": ("parquet", 16, 6),
    "idx": ("mnist", 12, 6),
    "cifar": ("cifar10", 32, 5),
}
HAVE_SUMS = ("packed", "packed raw", "tfrecord")  # forms that notice damage at the first reading
BUILDS = {"packed": [], "packed raw": ["--raw"], "tar": [], "tfrecord": ["--shards", "2"]}
ANSWERS = {  # commands that print an answer about the killed run
    "validate": ["validate", "run", "--json"],
    "predict": ["predict", "run", "image.jpg", "--csv"],
    "average": ["average", "run", "--json"],
    "replay": ["replay", "run", "--step", str(HALF + 1), "--json"],
}


def train_words(form: str, *more: str) -> list[str]:
    """Eight steps in two epochs, a checkpoint and a log point every second one."""
    data, size, batch = FORMS[form]
    options = {
        "data": data, "data-dir": "data", "run-dir": "run", "model": "resnet8",
        "image-size": size, "batch-size": batch, "steps": 8, "ckpts-per-epoch": 2, "keep": 2,
        "logs-per-epoch": 2, "workers": 0, "lr": 0.05, "warmup-epoch": "1st", "device": "cpu",
    }  # fmt: skip
    return ["train", *(f"--{name}={value}" for name, value in options.items()), *more]


def has_parquet() -> bool:
    """Whether parquet files can be written here."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


class Material:
    """Made when it is first asked for, below one folder; trials get copies."""

    def __init__(self, root: Path):
        self.root = root
        self.forms = [form for form in FORMS if form != "parquet" or has_parquet()]
        self.data = cache(self._make_data)
        self.whole = cache(self._make_whole)
        self.half = cache(self._make_half)
        self.answer = cache(self._make_answer)

    def lay_out(self, folder: Path, form: str, *, half: bool) -> Path:
        """A trial's own folder with the data, and the run that was killed halfway."""
        shutil.copytree(self.whole(form) / "data", folder / "data", symlinks=True)
        shutil.copy(self._image(), folder / "image.jpg")
        if half:
            shutil.copytree(self.half(form) / "run", folder / "run", symlinks=True)
        return folder

    def _image(self) -> Path:
        path = self.root / "image.jpg"
        if not path.exists():
            path.write_bytes(encode(photo(7, size=(24, 20))))
        return path

    def _make_data(self, form: str) -> Path:
        """The folder of a dataset."""
        folder = self.root / "data" / form.replace(" ", "-")
        if form == "jpeg folder":
            return write_photos(folder, COUNTS, size=(24, 20))
        if form in BUILDS:
            words = ["data", "build", "in", "--to", form.split(maxsplit=1)[0], "--out", "out"]
            work = self.root / "build" / form.replace(" ", "-")
            work.mkdir(parents=True)
            (work / "in").symlink_to(self.data("jpeg folder"))
            ended = run([*words, "--workers", "1", *BUILDS[form]], work)
            assert ended.code == 0, ended
            return work / "out"
        if form == "idx":
            return make_digits(folder, train=24, valid=10)
        folder.mkdir(parents=True)
        {"png folder": write_pngs, "parquet": write_parquet, "cifar": write_cifar}[form](
            folder, self.data("jpeg folder")
        )
        return folder

    def _make_whole(self, form: str) -> Path:
        """The folder of an undisturbed run: data/ and run/."""
        folder = self.root / "whole" / form.replace(" ", "-")
        folder.mkdir(parents=True)
        shutil.copytree(self.data(form), folder / "data")
        ended = run(train_words(form), folder)
        assert ended.code == 0, ended
        return folder

    def _make_half(self, form: str) -> Path:
        """The folder of a run that was killed after its first epoch, with a checkpoint of it."""
        folder = self.root / "half" / form.replace(" ", "-")
        folder.mkdir(parents=True)
        shutil.copytree(self.whole(form) / "data", folder / "data", symlinks=True)
        metrics = folder / "run" / "metrics.jsonl"
        checkpoint = folder / "run" / "checkpoints" / f"step-{HALF:08}"

        def is_halfway() -> bool:
            return checkpoint.exists() and f'"step": {HALF + 1},' in metrics.read_text()

        ended = run(train_words(form), folder, stop=Break(when=is_halfway))
        assert ended.code == KILLED, ended
        return folder

    def _make_answer(self, form: str, command: str) -> str:
        """What a command says of the killed run while nothing is damaged."""
        folder = self.root / "answers" / f"{form.replace(' ', '-')}-{command}"
        folder.mkdir(parents=True)
        self.lay_out(folder, form, half=True)
        ended = run(ANSWERS[command], folder)
        check_end(ended)
        assert ended.code == 0, ended
        return answer(ended, folder)


@dataclass(frozen=True)
class Trial:
    """What one trial has: material, a folder of its own, chance, and what it did so far."""

    material: Material
    folder: Path
    chance: Random
    told: list[str] = field(default_factory=list)

    def tell(self, what: str) -> None:
        """Note what is done, for whoever reads of a violation."""
        self.told.append(what)

    def lay_out(self, form: str, *, half: bool) -> None:
        """Data, and the run that was killed halfway, in the trial's folder."""
        self.material.lay_out(self.folder, form, half=half)

    def run(self, words: list[str], stop: Break = NEVER) -> Ended:
        """Run a command in the trial's folder."""
        return run(words, self.folder, stop=stop)


def write_pngs(folder: Path, photos: Path) -> None:
    """The photographs as PNG files."""
    for path in sorted(photos.rglob("*.jpg")):
        target = folder / path.relative_to(photos).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).save(target)


def write_parquet(folder: Path, photos: Path) -> None:
    """The photographs as rows, as Hugging Face writes them."""
    import pyarrow
    from pyarrow.parquet import write_table

    features = {"label": {"names": CLASSES, "_type": "ClassLabel"}}
    facts = json.dumps({"info": {"features": features}}).encode()
    for split, name in (("train", "train"), ("val", "validation")):
        paths = sorted((photos / split).rglob("*.jpg"))
        images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
        labels = [CLASSES.index(path.parent.name) for path in paths]
        table = pyarrow.table({"image": images, "label": labels})
        table = table.replace_schema_metadata({b"huggingface": facts})
        write_table(table, folder / f"{name}-00000-of-00001.parquet", row_group_size=8)


def write_cifar(folder: Path, photos: Path) -> None:
    """CIFAR-10's six files of four images each."""
    paths = sorted(photos.rglob("*.jpg"))
    files = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for number, file in enumerate(files):
        out = io.BytesIO()
        for path in paths[4 * number :][:4]:
            pixels = np.asarray(Image.open(path).resize((32, 32)))
            label = CLASSES.index(path.parent.name)
            out.write(bytes([label]) + pixels.transpose(2, 0, 1).tobytes())
        (folder / file).write_bytes(out.getvalue())
