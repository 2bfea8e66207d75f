"""What is owed on a GPU, in few calls: stages with time limits, and a short report at the end.

    bash scripts/lab/carry.sh PHOTOS            (here, before)
    python3 scripts/lab/gpu_session.py STAGE... [--out FOLDER] [--carry carry] [--seconds 570]

On the machine with the GPU, in the root of the repository. STAGE: tests, those marked gpu;
unmarked, tests that use a GPU where there is one; peers, EfficientNets' scoring and ResNet-50's
training alternating with timm's; folder, training from photographs for eight epochs, three times by
default, where the cores decode the first, then with one kind of decoder, and with synthetic images;
slow, the same for EfficientNet-B4, which the cores can feed; damage, nvjpeg_damage.py; large,
scoring batches with tensors of more than 2^31 elements; variants, decode_variants.py; grouped,
grouped_variants.py. Logs go to --out, the end of each to the output. With --device cpu, folder and
variants train something small, and grouped takes 20 minutes in Triton's interpreter, to try this
out.

What to expect: no failure. EfficientNet-B0 in batches of 1, 32 and 256 at 1.9, 1.7 and 1.7 times
timm's rate, B4 in batches of 1 and 5 at 1.5 and 1.7, from measurements in different calls; 1.4 for
training. From a folder 9,500 to 9,850 images/s decoded by the GPU, 5,300 by the cores, 8,700 by
default (one eighth at 4,800, as whole images take the cores longer), 11,150 synthetic. For
EfficientNet-B4 the default is the cores, within 2 % of synthetic images; the GPU takes 7 % longer.
Batches beyond 2^31 elements within 5 % of the rate at 256 (42,000 images/s), and errors as there:
0.02.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "gpu-session"  # ignored, and does not travel with carry/
MARKED = re.compile(r"mark\.gpu|small_steps")
KERNELS = "^tests/(kernels|mbconv|inference|products|fused)/"
UNMARKED = re.compile(rf"cuda\.is_available\(\)|small_gpu|small_steps|{KERNELS}")
PEERS = (
    *(f"small-score-efficientnet_b0-{batch}" for batch in (1, 8, 16, 32)),
    *(f"small-score-efficientnet_b4-{batch}" for batch in (1, 5)),
    *("score-efficientnet-b0-256", "resnet50-float16"),
)
COPIES = 27  # of each photograph, as links
SHOWN = 10_500  # characters of the report
FOLDER_RUNS = ("default", "synthetic", "default", "false", "default", "true")  # --gpu-decode
RESNET = "synthetic-resnet50 --batch-size 256 --steps 248 --half-type float16 --loss-scaling 128"
SLOW_RUNS = ("default", "false", "synthetic", "default", "true")
EFFICIENTNET = (  # which the cores can feed
    "synthetic-resnet50 --model efficientnet-b4 --image-size 380 --batch-size 64 --steps 250"
)
ON_CPU = "synthetic-resnet50 --batch-size 8 --steps 14 --image-size 32 --model resnet18"


@dataclass(frozen=True)
class Job:
    """A stage that is running."""

    words: argparse.Namespace
    log: Path
    ends_at: float  # of time.monotonic

    def call(self, *command: str) -> int:
        """Run a command until it ends or the stage's time is over; its output goes to the log."""
        paths = [ROOT / "src", self.words.carry / "site"]
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
        with self.log.open("a", encoding="utf-8") as log:
            running = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | own,
                start_new_session=True,
            )
            for end in (signal.SIGINT, signal.SIGKILL):  # the first makes pytest report
                grace = 15.0 if end == signal.SIGKILL else self.ends_at - time.monotonic() - 15
                with suppress(subprocess.TimeoutExpired):
                    return running.wait(max(1.0, grace))
                log.write(f"\n{end.name}: the time of this stage is over\n")
                if end == signal.SIGINT:
                    running.send_signal(end)
            os.killpg(running.pid, signal.SIGKILL)
            return running.wait()


def list_tests(pattern: re.Pattern[str]) -> list[str]:
    """The test files that contain a pattern, or whose path does."""
    names = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    contents = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    return [name for name in names if pattern.search(f"{name}\n{contents[name]}")]


def run_tests(job: Job, marker: str, pattern: re.Pattern[str]) -> str:
    """Failures in full, as far as there is room, and pytest's summary."""
    options = ["-m", marker, "-n", str(job.words.processes), "--dist", "worksteal"]
    options += ["-k", job.words.select] if job.words.select else []
    options += ["-p", "no:benchmark", "--continue-on-collection-errors", "-rfE"]
    job.call("-m", "pytest", *options, "--durations=5", *list_tests(pattern))
    text = job.log.read_text(encoding="utf-8", errors="replace")
    heads = [m.start() for m in re.finditer(r"(?m)^=+ (ERRORS|FAILURES|slowest|short)", text)]
    return text[heads[0] :] if heads else text[-1500:]


def run_marked(job: Job) -> str:
    """The tests that need a GPU."""
    return run_tests(job, "gpu", MARKED)


def run_unmarked(job: Job) -> str:
    """The tests that run anywhere and use a GPU where there is one."""
    return run_tests(job, "not gpu and not slow", UNMARKED)


def run_peers(job: Job) -> str:
    """The table of scripts/peers.py."""
    out = WORK / "peers"
    options = ["--rows", job.words.rows, "--seconds", "0.6", "--together", "8", "--limit", "240"]
    job.call("scripts/peers.py", *options, "--device", job.words.device, "--out", str(out))
    with suppress(FileNotFoundError):
        shutil.copy(out / "peers.json", job.log.parent / "peers.json")
    return job.log.read_text(encoding="utf-8")[-3500:]


def make_folder(carry: Path) -> Path:
    """A set in which each photograph occurs many times; its class is the start of its name."""
    root = WORK / "folder"
    for photo in sorted((carry / "photos").iterdir()):
        place = root / "train" / photo.name.partition("_")[0]
        place.mkdir(parents=True, exist_ok=True)
        for number in range(COPIES):
            with suppress(FileExistsError):
                os.link(photo, place / f"{number}-{photo.name}")
    return root


def train_once(job: Job, folder: Path, work: str, decode: str, number: int) -> str:
    """One run of `phalanx train`: its rate, and how long it waited for data."""
    run, on_cpu = WORK / f"run-{number}", job.words.device == "cpu"
    shutil.rmtree(run, ignore_errors=True)
    command = ["-m", "phalanx", "train", *(ON_CPU if on_cpu else work).split()]
    command += ["--device", job.words.device, "--validation-mode", "none"]
    command += ["--ckpts-per-epoch", "0", "--run-dir", str(run)]
    if decode != "synthetic":
        command += ["--data", "folder", "--data-dir", str(folder)]
        command += [] if on_cpu or decode == "default" else ["--gpu-decode", decode]
    began, code = time.monotonic(), job.call(*command)
    if code:
        return f"--gpu-decode {decode}: ended with {code}"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rate, took = summary["images_per_second"], time.monotonic() - began
    wait = f"waited {summary['data_wait']:.1%}"
    return f"--gpu-decode {decode:<10}{rate:>9,.0f} images/s, {wait}, {took:.0f} s in all"


def train_from_folder(job: Job, work: str, kinds: tuple[str, ...]) -> str:
    """The rate of each run."""
    folder = make_folder(job.words.carry)
    lines: list[str] = []
    chosen = job.words.decoders
    for number, decode in enumerate(chosen.split(",") if chosen else kinds):
        if job.ends_at - time.monotonic() > 30:
            lines.append(train_once(job, folder, work, decode, number))
    log = job.log.read_text(encoding="utf-8")
    failed = any("ended with" in line for line in lines)
    return "\n".join([*lines, *[log[-1500:]] * failed])


def run_folder(job: Job) -> str:
    """The rates of ResNet-50."""
    return train_from_folder(job, RESNET, FOLDER_RUNS)


def run_slow(job: Job) -> str:
    """The rates of EfficientNet-B4."""
    return train_from_folder(job, EFFICIENTNET, SLOW_RUNS)


def run_damage(job: Job) -> str:
    """The table of nvjpeg_damage.py."""
    job.call("scripts/lab/nvjpeg_damage.py", str(job.words.carry / "photos"))
    return job.log.read_text(encoding="utf-8")[-3000:]


def run_large(job: Job) -> str:
    """The rates and errors of large batches."""
    sizes = ["resnet50:256", "resnet50:4096", "resnet18:256", "resnet18:12288"]
    job.call("scripts/measure_inference.py", *sizes, "--seconds", "0.2")
    return job.log.read_text(encoding="utf-8")[-2500:]


def run_variants(job: Job) -> str:
    """The table of decode_variants.py."""
    folder, own = make_folder(job.words.carry), job.words.variants
    options = ["--device", job.words.device, "--out", str(job.log.parent / "variants")]
    options += ["--seconds", str(max(30.0, job.ends_at - time.monotonic() - 45))]
    options += ["--variants", own] if own else []
    if job.words.device == "cpu":
        options += ["--steps", "8", "--rounds", "1", "--set", "model=resnet18", "batch-size=8"]
        options += ["image-size=32", "precision=32.32", "loss-scaling=1"]
    job.call("scripts/lab/decode_variants.py", str(folder), *options)
    return job.log.read_text(encoding="utf-8")[-7500:]


def run_grouped(job: Job) -> str:
    """The tables of grouped_variants.py, the whole ones beside the log."""
    left_s = max(30.0, job.ends_at - time.monotonic() - 60)
    options = ["--device", job.words.device, "--out", str(job.log.parent / "grouped")]
    job.call("scripts/lab/grouped_variants.py", *options, "--seconds", str(left_s))
    return job.log.read_text(encoding="utf-8")[-SHOWN:]


STAGES: dict[str, tuple[float, Callable[[Job], str]]] = {  # seconds at most
    "tests": (420, run_marked),
    "unmarked": (240, run_unmarked),
    "peers": (450, run_peers),
    "folder": (240, run_folder),
    "slow": (260, run_slow),
    "damage": (120, run_damage),
    "large": (120, run_large),
    "variants": (330, run_variants),
    "grouped": (480, run_grouped),
}


def main() -> int:
    """Run the stages, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", "session"))
    parser.add_argument("--carry", type=Path, default=Path("carry"))
    parser.add_argument("--seconds", type=float, default=570, help="of all stages together")
    parser.add_argument("--rows", default=",".join(PEERS), help="of peers")
    parser.add_argument("--decoders", help="of folder and slow: default, true, false, synthetic")
    parser.add_argument("--select", default="", help="of tests: pytest's -k")
    parser.add_argument("--variants", help="of decode_variants.py")
    parser.add_argument("--processes", type=int, default=12, help="of pytest")
    parser.add_argument("--device", default="cuda")
    words = parser.parse_args()
    words.carry, out = words.carry.resolve(), Path(words.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    began, reports = time.monotonic(), []
    for name in words.stages:
        start = time.monotonic()
        limit_s, run = STAGES[name]
        left_s = words.seconds - (start - began)
        if left_s < 40:
            reports.append((f"== {name}: not begun, {left_s:.0f} s are left", ""))
            continue
        log = out / f"{name}.log"
        log.unlink(missing_ok=True)
        job = Job(words, log, start + min(limit_s, left_s))
        try:
            text = run(job)
        except Exception as failure:  # noqa: BLE001 - the other stages run all the same
            text = repr(failure)
        reports.append((f"== {name}: {time.monotonic() - start:.0f} s", text.strip()))
        print(reports[-1][0], flush=True)
    room = SHOWN // len(reports)
    spare = sum(max(0, room - len(text)) for _, text in reports)
    for head, text in reports:
        print(f"\n{head}\n{text[-(room + spare) :]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
