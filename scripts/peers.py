"""Phalanx compared with timm on one GPU: training, scoring, training from photographs.

    python scripts/peers.py [--rows all|small|NAME,...] [--out DIR] [--rounds 3] [--photos DIR]

Each row is measured in rounds, Phalanx and its peer alternating on the same idle GPU: median and
range of the rounds, and the peak memory of both. Training with Phalanx is `phalanx train` as a user
calls it, a new process per round; the rate is its summary's. Scoring with Phalanx is what
`validate` and `predict` call, with images on the device. The peer is timm's model in channels_last,
compiled with CUDA graphs (reduce-overhead; --modes tries others and takes the best), under autocast
with fused SGD in training and in 16 bits in scoring, synthetic images on the device; for
photographs it is torchvision's decoder in a DataLoader alone, an upper bound for any training.

Peers compile with empty caches of their own, all at once, each in a process with a time limit,
while Phalanx warms up (two to four minutes); then they wait, and nothing else runs while a round is
timed (half a minute per row, scoring less). --seconds: the length of a round of the peer, and of
scoring. --photos: a folder of JPEGs; without it, synthetic ones are made. Prints a table and writes
peers.json. --list names the rows.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from threading import Thread
from typing import Any


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    kind: str  # train, score, or how photographs are stored
    title: str
    model: str = "resnet50"
    half: str = "float16"
    batch: int = 256
    size: int = 224
    steps: int = 160  # of Phalanx's training, per round


ROWS = {
    "resnet50-float16": Row("train", "ResNet-50 train, float16"),
    "resnet50-bfloat16": Row("train", "ResNet-50 train, bfloat16", half="bfloat16"),
    "resnext101": Row("train", "ResNeXt-101 32x4d train, float16", "resnext101_32x4d", steps=100),
    "efficientnet-b0": Row("train", "EfficientNet-B0 train, float16", "efficientnet_b0"),
    "efficientnet-b4": Row(
        *("train", "EfficientNet-B4 train, 380 px, batch 64, bfloat16", "efficientnet_b4"),
        *("bfloat16", 64, 380, 120),
    ),
    "score-resnet50-256": Row("score", "ResNet-50 scoring, batch 256, float16"),
    "score-resnet50-1": Row("score", "ResNet-50 scoring, batch 1, float16", batch=1),
    "score-resnext101-256": Row(
        "score", "ResNeXt-101 32x4d scoring, batch 256, float16", "resnext101_32x4d"
    ),
    "score-efficientnet-b0-256": Row(
        "score", "EfficientNet-B0 scoring, batch 256, float16", "efficientnet_b0"
    ),
    "photos-folder": Row("folder", "ResNet-50 train from a folder of JPEGs, float16"),
    "photos-packed": Row("packed", "ResNet-50 train from packed JPEGs, float16"),
}
# the batch sizes of an older benchmark guide: one for training, those for scoring
_SMALL = {
    "resnet50": ("ResNet-50", "float16", 224, (16,), (1, 4, 16, 32, 64, 90)),
    "resnext101_32x4d": ("ResNeXt-101 32x4d", "float16", 224, (6,), (1, 2, 4, 8, 16)),
    "efficientnet_b0": ("EfficientNet-B0", "float16", 224, (32,), (1, 8, 16, 32)),
    "efficientnet_b4": ("EfficientNet-B4, 380 px", "float16", 380, (5,), (1, 5)),
}
SMALL_ROWS = {
    f"small-{kind}-{model}-{batch}": Row(
        kind, f"{title} {verb}, batch {batch}, {half}", model, half, batch, size, steps=300
    )
    for model, (title, half, size, trained, scored) in _SMALL.items()
    for kind, verb, batches in (("train", "train", trained), ("score", "scoring", scored))
    for batch in batches
}
ROWS |= SMALL_ROWS
_PHOTOS, _REPEATED = 330, 12_000  # files, and images of the set made by repeating them
_SELF = Path(__file__).resolve()


@dataclass
class Rounds:
    """The results of one side."""

    rates: list[float] = field(default_factory=list)  # images/s
    peak_gib: float | None = None
    ready_s: float | None = None  # from its start to its first timed round
    notes: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Child:
    """One side in its own process: it prepares, then times a round for each request."""

    def __init__(self, words: list[str], log: Path, *, caches: Path, threads: int) -> None:
        self._log = log.open("w", encoding="utf-8")
        self._began = time.monotonic()
        self._lines: Queue[str] = Queue()
        own = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
        own |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        own = {} if "phalanx" in words else own
        self._process = subprocess.Popen(
            [sys.executable, str(_SELF), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | own,
            start_new_session=True,
        )
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Its next answer; TimeoutError or RuntimeError if there is none."""
        try:
            line = self._lines.get(timeout=limit_s)
        except Empty:
            raise TimeoutError(f"no answer in {limit_s:.0f} s") from None
        if not line:
            said = Path(self._log.name).read_text(encoding="utf-8").strip().splitlines()
            raise RuntimeError(f"ended: {said[-1] if said else 'without a word'}")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def age_s(self) -> float:
        """Seconds since it was started."""
        return round(time.monotonic() - self._began, 1)

    def time_round(self, limit_s: float) -> dict[str, Any]:
        """One timed round."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.answer(limit_s)

    def close(self) -> None:
        """End it, with everything it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


# --- in a child process ---


def wait_for_device() -> float:
    """Wait for the device; returns the peak memory in GiB."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def serve_rounds(block: Callable[[], int], seconds: float, **ready: Any) -> None:
    """Warm up, report that, and time a round of `seconds` for each line of standard input."""
    for _ in range(3):
        block()
    wait_for_device()
    began = time.perf_counter()
    block()
    wait_for_device()
    count = max(1, round(seconds / max(time.perf_counter() - began, 1e-6)))
    print(json.dumps({"ready": True, **ready}), flush=True)
    for _ in sys.stdin:
        began, images = time.perf_counter(), 0
        for _ in range(count):
            images += block()
        peak = wait_for_device()
        rate = images / (time.perf_counter() - began)
        print(json.dumps({"rate": rate, "peak_gib": peak}), flush=True)


def run_peer(row: Row, words: argparse.Namespace) -> None:
    """timm's training step or scoring, compiled."""
    import timm
    import torch
    import torch.nn.functional as F

    torch.backends.cudnn.benchmark = True
    device, mode = words.device, words.child
    half, scores = getattr(torch, row.half), row.kind == "score"
    torch.manual_seed(0)
    made = timm.create_model(row.model, num_classes=1000)
    model = made.to(device, memory_format=torch.channels_last)
    x = torch.randn(row.batch, 3, row.size, row.size, device=device, dtype=half)
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (row.batch,), device=device)
    if scores:
        model = model.to(half).eval()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True
    )
    forward = torch.compile(model, mode=None if mode == "default" else mode)
    times = 10 if row.batch > 1 else 100

    def train() -> int:
        for _ in range(times):
            with torch.autocast(device, half):
                loss = F.cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return times * row.batch

    @torch.inference_mode()
    def score() -> int:
        for _ in range(times):
            forward(x)
        return times * row.batch

    serve_rounds(score if scores else train, words.seconds, timm=timm.__version__, mode=mode)


def run_scoring(row: Row, words: argparse.Namespace) -> None:
    """What Phalanx's scoring calls for each batch, on images that are on the device."""
    import torch

    from phalanx.assemble.dataset_summary import plan_run
    from phalanx.assemble.session import Session
    from phalanx.config.read import read_settings
    from phalanx.engine.evaluate import ValidBatch
    from phalanx.engine.step import compute_logits

    device = words.device
    flags = {"model": row.model, "half-type": row.half, "batch-size": str(max(row.batch, 8))}
    flags |= {"image-size": str(row.size), "device": device, "precision": "16.32"}
    settings = read_settings("synthetic-resnet50", flags)
    plan, dataset = plan_run(settings)
    session = Session(settings.config, plan, classes=dataset.classes)
    x = torch.randn(row.batch, 3, row.size, row.size, device=device)
    x = x.to(memory_format=torch.channels_last)
    labels = torch.zeros(row.batch, dtype=torch.int64, device=device)
    batch = ValidBatch(x, labels, torch.arange(row.batch, device=device))
    model, times = session.find_scoring_model(), 10 if row.batch > 1 else 100

    @torch.inference_mode()
    def block() -> int:
        for _ in range(times):
            compute_logits(model, x, session.options)
        return times * row.batch

    for _ in range(3):
        block()
    wait_for_device()
    began, count = time.perf_counter(), 16 if row.batch > 1 else 200
    session.evaluate([batch] * count)
    whole = count * row.batch / (time.perf_counter() - began)
    serve_rounds(
        block, words.seconds, kind=type(model).__name__, whole_score_images_per_s=round(whole)
    )


def run_loader(words: argparse.Namespace) -> None:
    """torchvision's decoder and transforms in a DataLoader: the upper bound of a peer's input."""
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    blobs = [path.read_bytes() for path in sorted(Path(words.photos).rglob("*.jpg"))[:_PHOTOS]]
    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    transform = v2.Compose(steps)

    class Photos(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 256 * 400

        def __getitem__(self, index: int) -> Any:
            content = torch.frombuffer(bytearray(blobs[index % len(blobs)]), dtype=torch.uint8)
            return transform(decode_jpeg(content, mode=ImageReadMode.RGB))

    batches = iter(
        torch.utils.data.DataLoader(
            Photos(),
            batch_size=256,
            num_workers=os.cpu_count() or 1,
            worker_init_fn=lambda _: torch.set_num_threads(1),
        )
    )

    def block() -> int:
        return sum(len(next(batches)) for _ in range(10))

    serve_rounds(block, words.seconds, decoder="torchvision decode_jpeg", workers=os.cpu_count())


# --- the parent ---


def train_with_phalanx(row: Row, folder: Path, options: list[str], steps: int) -> dict[str, Any]:
    """Run one `phalanx train`; returns its summary, with the seconds it took."""
    began = time.monotonic()
    loss = ["--auto-loss-scaling", "true"] if row.half == "float16" else []
    command = [
        *(sys.executable, "-m", "phalanx", "train", "synthetic-resnet50", "--model", row.model),
        *("--batch-size", str(row.batch), "--image-size", str(row.size), "--steps", str(steps)),
        *("--half-type", row.half, "--precision", "16.32", *loss, "--lr", "0.01"),
        *("--validation-mode", "none", "--ckpts-per-epoch", "0", *options),
        *("--run-dir", str(folder / f"run-{time.time_ns()}"), "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"phalanx train ended with {done.returncode}: {done.stderr[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found | {"seconds": round(time.monotonic() - began, 1), "command": command[2:]}


def prepare_training(
    row: Row, folder: Path, options: list[str], side: Rounds
) -> Callable[[], None]:
    """Warm up, so that kernels are compiled; returns a call that trains for a round.

    Peers use the GPU meanwhile, so the choice of kernels is discarded and made again in the
    untimed steps of the first round.
    """
    side.ready_s = train_with_phalanx(row, folder, options, 30)["seconds"]

    def turn() -> None:
        if not side.rates:
            for choices in folder.glob("kernels/choices-*.json"):
                choices.unlink()
        summary = train_with_phalanx(row, folder, options, row.steps)
        side.rates.append(summary["images_per_second"])
        side.peak_gib = (summary["memory"]["measured"] or 0) / 2**30
        side.notes = {"command": " ".join(summary["command"]), "wait": summary["data_wait"]}

    return turn


def make_photos(folder: Path) -> Path:
    """JPEGs like photographs: smooth shapes with fine grain, about 100 kB each."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    for number in range(_PHOTOS):
        random = np.random.default_rng(number)
        image = np.zeros((375, 500, 3))
        for cells in (3, 9, 27, 81, 243):
            coarse = random.uniform(-1, 1, (cells, cells * 4 // 3, 3)) * 1.1 ** -(cells**0.5)
            for channel in range(3):
                plane = Image.fromarray(coarse[..., channel].astype(np.float32))
                image[..., channel] += np.asarray(
                    plane.resize((500, 375), Image.Resampling.BICUBIC)
                )
        grain = random.normal(0, 9, (375, 500, 1))
        pixels = np.clip(128 + 80 * image + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04}.jpg", quality=92)
    return folder


def prepare_photos(row: Row, words: argparse.Namespace, folder: Path) -> list[str]:
    """Prepare a set of photographs in the row's form; returns the options that name it."""
    photos = Path(words.photos) if words.photos else folder / "photos"
    if not photos.exists():
        make_photos(photos)
    files, root = sorted(photos.rglob("*.[jJ][pP]*")), folder / "set"
    if not root.exists():
        for number in range(_REPEATED):
            split = "train" if number % 20 else "val"
            target = root / split / f"class{number % 10}" / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[number % len(files)].read_bytes())
    if row.kind == "folder":
        return ["--data", "folder", "--data-dir", str(root)]
    packed = folder / "packed"
    if not packed.exists():
        build = ["data", "build", str(root), "--to", "packed", "--out", str(packed)]
        command = [sys.executable, "-m", "phalanx", *build, "--short-side", "256"]
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return ["--data", "packed", "--data-dir", str(packed)]


class Contest:
    """One row: both sides prepare, then alternate."""

    def __init__(self, name: str, words: argparse.Namespace, folder: Path) -> None:
        self._row, self._words, self._folder = ROWS[name], words, folder
        has_photos = self._row.kind in ("folder", "packed")
        self._options = ["--device", words.device, "--model-cache-path", str(folder / "kernels")]
        self._options += prepare_photos(self._row, words, folder) if has_photos else []
        self._turns: dict[str, Callable[[], None]] = {}
        self._children: dict[str, Child] = {}
        self.sides: dict[str, Rounds] = {}
        photos, caches = words.photos or folder / "photos", Path(tempfile.mkdtemp(dir=folder))
        peers = ["loader"] if has_photos else words.modes.split(",")
        chosen = {"phalanx": ["phalanx"], "peers": peers}.get(words.only, [*peers, "phalanx"])
        threads = max(1, (os.cpu_count() or 1) // words.together)
        for side in chosen:
            self.sides[side] = Rounds()
            if side != "phalanx" or self._row.kind == "score":
                what = ["--child", side, "--rows", name, "--photos", str(photos)]
                what += ["--device", words.device, "--seconds", str(words.seconds)]
                log = words.out / f"{name}-{side}.log"
                self._children[side] = Child(what, log, caches=caches, threads=threads)

    def prepare(self, *, ours: bool) -> None:
        """Prepare one side: ours warms up while peers compile."""
        for side, found in self.sides.items():
            if ours == (side == "phalanx"):
                _try(found, partial(self._prepare, side))

    def _prepare(self, side: str) -> None:
        found = self.sides[side]
        if side in self._children:
            self._turns[side] = _prepare_child(self._children[side], found, self._words.limit)
        else:
            self._turns[side] = prepare_training(self._row, self._folder, self._options, found)

    def run(self) -> None:
        """Run all rounds."""
        for _ in range(self._words.rounds):
            for side, turn in self._turns.items():
                _try(self.sides[side], turn)

    def close(self) -> None:
        """End what was started."""
        for child in self._children.values():
            child.close()


def _try(side: Rounds, run: Callable[[], None]) -> None:
    """Run it, or store the failure: the other side is measured anyway."""
    try:
        run()
    except (RuntimeError, TimeoutError, subprocess.SubprocessError, ValueError, OSError) as error:
        side.problem = str(error)[:800]


def _prepare_child(child: Child, side: Rounds, limit_s: float) -> Callable[[], None]:
    """Wait until it is ready; returns a call that times a round."""
    side.notes = child.answer(max(1.0, limit_s - child.age_s))
    side.ready_s = child.age_s

    def turn() -> None:
        found = child.time_round(120)
        side.rates.append(found["rate"])
        side.peak_gib = found["peak_gib"]

    return turn


def describe(row: Row, side: Rounds) -> str:
    """A cell: the median with its range, in milliseconds for single images."""
    if not side.rates:
        return f"failed: {side.problem[:60]}"
    values = [1e3 * row.batch / rate if row.batch == 1 else rate for rate in side.rates]
    form = "{:.3f}" if row.batch == 1 else "{:,.0f}"
    low, high = form.format(min(values)), form.format(max(values))
    unit = " ms" if row.batch == 1 else ""
    return f"{form.format(median(values))}{unit} ({low} to {high})"


def print_row(name: str, sides: dict[str, Rounds]) -> None:
    """A line of the table."""
    row, ours = ROWS[name], sides.get("phalanx", Rounds(problem="not asked for"))
    peers = {mode: side for mode, side in sides.items() if mode != "phalanx"}
    best = max(peers, key=lambda mode: median(peers[mode].rates or [0]), default="")
    theirs = peers.get(best, Rounds(problem="not asked for"))
    ratio = median(ours.rates) / median(theirs.rates) if ours.rates and theirs.rates else 0
    memory = [f"{s.peak_gib:.1f}" if s.peak_gib is not None else "" for s in (theirs, ours)]
    cells = [row.title, f"{describe(row, theirs)} {best}", describe(row, ours)]
    print(f"| {' | '.join([*cells, f'{ratio:.2f}', *memory])} |", flush=True)


def run_contests(
    names: list[str], words: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, dict[str, Rounds]]]:
    """Rows that are prepared at the same time and then measured one by one."""
    contests: dict[str, Contest] = {}
    try:
        for name in names:
            contests[name] = Contest(name, words, folder)
        for ours in (True, False):
            for contest in contests.values():
                contest.prepare(ours=ours)
        for name, contest in contests.items():
            contest.run()
            yield name, contest.sides
    finally:
        for contest in contests.values():
            contest.close()


def main() -> None:
    """Measure the rows that were named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="all")
    parser.add_argument("--out", type=Path, default=Path("peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", help="folder of JPEGs")
    parser.add_argument("--modes", default="reduce-overhead", help="of torch.compile, for the peer")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a peer to get ready")
    parser.add_argument("--together", type=int, default=12, help="rows that get ready at once")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a round that is timed")
    parser.add_argument("--only", choices=("phalanx", "peers"))
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    words = parser.parse_args()
    groups = {"all": [name for name in ROWS if name not in SMALL_ROWS], "small": [*SMALL_ROWS]}
    names = groups.get(words.rows) or words.rows.split(",")
    if words.list:
        print("\n".join(f"{name:28} {row.title}" for name, row in ROWS.items()))
        return
    if words.child:
        row = ROWS[names[0]]
        if words.child == "phalanx":
            run_scoring(row, words)
        elif words.child == "loader":
            run_loader(words)
        else:
            run_peer(row, words)
        return
    words.out.mkdir(parents=True, exist_ok=True)
    print("| work | timm, images/s | Phalanx, images/s | ratio | timm GiB | Phalanx GiB |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=words.out) as folder:
        for first in range(0, len(names), words.together):
            group = names[first : first + words.together]
            for name, sides in run_contests(group, words, Path(folder)):
                print_row(name, sides)
                results[name] = {side: asdict(found) for side, found in sides.items()}
                text = json.dumps(results, indent=1)
                (words.out / "peers.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
