"""The house rules: what points where, how large it may grow, and that its papers are in order."""

import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import pytest
from PIL import Image

import phalanx
from phalanx.assemble.dataset_summary import plan_run
from phalanx.catalog.datasets import DATASETS
from phalanx.config.presets import builtin_preset_folder, iterate_old_presets
from phalanx.config.read import read_settings
from phalanx.config.schema import OPTIONS

PACKAGE = Path(phalanx.__file__).parent
HOME = PACKAGE.parents[1]
FILES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
SURFACE = ("__init__", "__main__")
ORDER = (  # lowest first; rooms of one line do not import each other
    ("errors", "escapes"),
    ("units",),
    ("disk", "cache_folder", "parent_process", "signals", "ranges"),
    ("catalog",),
    ("config",),
    ("plan",),
    ("dialects",),
    ("port",),
    ("kernels",),
    ("products", "mbconv"),
    ("models", "data", "optim", "parallel"),
    ("fused", "inference", "port_weights"),
    ("engine",),
    ("profile",),
    ("report",),
    ("trackers",),
    ("assemble",),
    ("export", "lightning", "client"),
    ("serve",),
    ("bench", "benchmarks", "sweep", "launch", "check"),
    ("cli",),
)
HEIGHT = {room: height for height, rooms in enumerate(ORDER) for room in rooms}
DATA_ORDER = (
    *("process_pool", "string_array", "orientation", "pillow_image", "layouts", "formats"),
    *("fetch", "transforms", "loading", "convert", "verify"),
)
ALLOWED: set[tuple[str, str]] = set()
PHOTOGRAPHS = ("folder", "tfrecord", "tar", "parquet", "packed")
OPTION_NAMES = [
    "adam-betas", "auto-augment", "auto-loss-scaling", "base-learning-rate", "batch-size",
    "batchnorm-momentum", "bn-span", "bucket-mib", "ckpts-per-epoch", "class-from",
    "clip-grad-norm", "clip-grad-value", "color-jitter", "compile", "crop-ratio", "crop-rule",
    "crop-scale", "cutmix-disable-prob", "cutmix-lambda", "cutmix-lambda-high",
    "cutmix-lambda-low", "data", "data-dir", "dataloader-rebatch-size", "dataset-cache",
    "determinism", "device", "device-iterations", "devices", "disable-metrics",
    "disable-stable-batchnorm", "drop-path", "dropout-rate", "efficientnet-expand-ratio",
    "efficientnet-group-dim", "eight-bit-io", "ema-decay", "enable-fast-groupnorm",
    "enable-recompute", "enable-stochastic-rounding", "engine", "epoch-tail", "epochs", "eval-crop",
    "exif-orientation", "first-ckpt-epoch", "flip-averaging", "flips", "fp-exceptions",
    "full-precision-norm", "global-batch-size", "gpu-decode",
    "gradient-accumulation", "graph", "half-partials", "half-type", "image-size", "init-weights",
    "initial-loss-scaling", "iterations", "keep", "keep-on-device", "kernels", "l2-regularization",
    "label-smoothing", "labels", "listing-rule",
    "logs-per-epoch", "loss", "loss-scaling", "loss-velocity-scaling-ratio",
    "lr", "lr-batch", "lr-decay", "lr-decay-length", "lr-decay-period", "lr-drop-after",
    "lr-end-ratio", "lr-epoch-decay", "lr-per-image", "lr-power", "lr-schedule",
    "lr-schedule-start",
    "lr-scheduler-freq", "lr-staircase", "max-bad", "max-file-mib", "max-pixels", "mixup-alpha",
    "mlflow", "mlflow-experiment", "mlflow-uri",
    "model", "model-cache-path", "momentum", "no-fetch", "no-fold", "norm-bias-lr-scale",
    "norm-eps", "norm-num-groups", "norm-type", "normalization", "normalization-location",
    "offload-optimizer", "optimizer", "optimizer-eps",
    "padding", "pipeline", "pipeline-schedule", "pipeline-splits", "pipeline-validation-model",
    "plugin", "precision", "profile", "progressive-resolution", "random-erasing", "rank-timeout",
    "recompute-checkpoints",
    "repeated-augmentation", "replicas", "reset-head", "rmsprop-decay", "rmsprop-start",
    "run-dir", "seed", "sharding-exclude-filter", "sharding-include-filter", "shards", "shift-fill",
    "shift-pixels",
    "shortcut-type", "smoothing-over", "stage1-projection", "steps",
    "stride-in", "tensorboard", "threads", "training", "trust-coefficient", "trust-decay",
    "use-bbox-info",
    "val-split", "valid-batch-size", "valid-split",
    "validation", "validation-device", "validation-frequency", "validation-mode",
    "wandb", "wandb-mode", "wandb-project", "wandb-run-name", "wandb-tags",
    "warmup-epoch", "warmup-mode", "weight-avg-exp-decay", "weight-avg-n", "weight-avg-strategy",
    "weight-decay", "workers", "zero-init-residual",
]  # fmt: skip


@cache
def parsed() -> list[tuple[Path, ast.Module]]:
    """Every file of the package with its syntax tree."""
    assert len(FILES) > 70, f"the search went blind: {len(FILES)} files in {PACKAGE}"
    return [
        (path.relative_to(PACKAGE), ast.parse(path.read_text(encoding="utf-8"))) for path in FILES
    ]


def room_of(path: Path) -> str:
    return path.with_suffix("").parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names under phalanx that a file reaches for, however it spells it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from imported_by_call(node)


def imported_by_call(call: ast.Call) -> Iterator[str]:
    """What import_module("...") and __import__("...") name; of an f-string, its beginning."""
    if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__") and call.args:
        word = call.args[0]
        first = word.values[0] if isinstance(word, ast.JoinedStr) else word
        if isinstance(first, ast.Constant):
            yield str(first.value)


def rooms_reached(tree: ast.AST) -> set[str]:
    """The rooms a file imports; "surface" stands for the commands of `import phalanx`."""
    found = set()
    for dotted in imported(tree):
        whole, _, rest = dotted.partition(".")
        name = rest.split(".")[0]
        if whole == "phalanx" and name and not name.startswith("__"):
            found.add(name if name in HEIGHT else "surface")
    return found


def may_import(own: str, other: str) -> bool:
    if own == other or (own, other) in ALLOWED:
        return True
    return other in HEIGHT and HEIGHT[other] < HEIGHT[own]


@pytest.mark.parametrize(
    "source",
    [
        "import phalanx.engine",
        "import phalanx.engine.train as loop",
        "from phalanx import engine",
        "from phalanx.engine import train",
        "from phalanx.engine.train import fit",
        "def later():\n    from phalanx.engine.train import fit",
        "if TYPE_CHECKING:\n    from phalanx.engine.train import fit",
        "import_module('phalanx.engine.train')",
        "importlib.import_module(f'phalanx.engine.{name}')",
        "__import__('phalanx.engine')",
        "import phalanx\nphalanx.engine.train.fit()",
    ],
)
def test_the_import_guard_sees_every_spelling(source):
    assert rooms_reached(ast.parse(source)) == {"engine"}


def test_the_import_guard_knows_up_from_down():
    assert may_import("cli", "errors") and may_import("assemble", "report")
    assert not may_import("report", "assemble")
    assert not may_import("data", "models")
    assert not may_import("engine", "assemble")
    assert not may_import("errors", "units")
    assert not may_import("cli", "surface")


def test_imports_point_down():
    seen = 0
    for path, tree in parsed():
        own = room_of(path)
        if own in SURFACE:
            continue
        assert own in HEIGHT, f"{path}: the room {own} has no place in the order"
        for other in sorted(rooms_reached(tree)):
            seen += 1
            assert may_import(own, other), f"{path} imports {other}, which is not below {own}"
    assert seen > 150, f"the guard went blind: it saw {seen} imports"


def test_imports_inside_data_point_down():
    seen = 0
    for path, tree in parsed():
        if room_of(path) != "data" or path.name == "__init__.py":
            continue
        own = DATA_ORDER.index(path.with_suffix("").parts[1])
        for dotted in imported(tree):
            parts = dotted.split(".")
            if parts[:2] == ["phalanx", "data"] and len(parts) > 3:
                seen += 1
                assert DATA_ORDER.index(parts[2]) <= own, f"{path} imports {dotted}, above it"
    assert seen > 60, f"the guard went blind: it saw {seen} imports"


def test_imports_are_absolute():
    for path, tree in parsed():
        relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, f"{path}: `{ast.unparse(relative[0])}`"


def test_modules_are_named_for_a_concept_and_lie_two_levels_deep():
    vague = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
    for path, _ in parsed():
        assert not vague & set(path.with_suffix("").parts), f"{path}: says nothing"
        depth = 3 if room_of(path) == "data" else 2
        assert len(path.parts) <= depth, f"{path}: deeper than {depth} levels"


def test_rooms_stay_small():
    files = Counter(path.parent for path, _ in parsed())
    assert len(files) > 15, f"the guard went blind: it saw {len(files)} folders"
    full = {room: count for room, count in files.items() if count > 20 and room != Path("cli")}
    assert not full, f"more than 20 files directly in a folder: {full}"


def test_a_class_name_means_one_thing():
    homes: dict[str, list[str]] = {}
    for path, tree in parsed():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.as_posix())
    assert len(homes) > 150, f"the guard went blind: it saw {len(homes)} classes"
    assert not {name: where for name, where in homes.items() if len(where) > 1}


TORCH_FREE = r"""
import sys
from importlib import import_module

for name in sys.argv[1:]:
    import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{name} imports torch")
print("free")
"""


@cache
def names_taken() -> dict[str, set[Path]]:
    """The dotted names that code reaches for outside of their own file, with who does."""
    taken: dict[str, set[Path]] = {}
    code = [
        path for folder in ("src", "tests", "scripts") for path in (HOME / folder).rglob("*.py")
    ]
    for path in code:
        tree, short = ast.parse(path.read_text(encoding="utf-8")), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                short |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        found = {*imported(tree), *(str(name) for name in named if str(name).count(".") > 1)}
        for name in found:
            first, _, rest = name.partition(".")
            taken.setdefault(f"{short.get(first, first)}.{rest}", set()).add(path)
    return taken


def names_defined(tree: ast.Module) -> Iterator[str]:
    """The names a file defines at its top level."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


def test_what_only_its_own_file_uses_begins_with_an_underscore():
    entrances = {"COMMANDS", "main", "__all__", "__version__"}  # found by name when a command runs
    alone, seen = [], 0
    for path, tree in parsed():
        module = ".".join(["phalanx", *path.with_suffix("").parts]).removesuffix(".__init__")
        for name in names_defined(tree):
            seen += 1
            others = names_taken().get(f"{module}.{name}", set()) - {PACKAGE / path}
            if not (others or name.startswith("_") or name in entrances or module == "phalanx"):
                alone.append(f"{module}.{name}")
    assert seen > 1000, f"the guard went blind: it saw {seen} names"
    assert not alone


ON_DEVICE = tuple(
    f"data/loading/{name}.py"
    for name in ("decoder_choice", "device", "resident", "gpu_decode", "nvjpeg")
)


def is_torch_free(path: Path) -> bool:
    rooms = (
        "errors",
        "units",
        "disk",
        "cache_folder",
        "catalog",
        "config",
        "plan",
        "dialects",
        "port",
        "port_weights",
        "report",
        "trackers",
        "data",
    )
    before_torch = (
        "prepare scoring_target fork dataset_summary find_data blackbox environment signals"
    )
    single = (f"assemble/{name}.py" for name in before_torch.split())
    single = ("engine/checkpoint_store.py", *single)
    single = ("parallel/supervisor.py", "parallel/watchdog.py", *single)
    if path.as_posix() in ON_DEVICE:
        return False
    return (
        room_of(path) in (*rooms, "sweep", "launch", "cli", "__init__") or path.as_posix() in single
    )


def test_most_rooms_never_import_torch():
    files = [path for path, _ in parsed() if is_torch_free(path)]
    assert len(files) > 50, f"the guard went blind: it saw {len(files)} modules"
    names = [".".join(["phalanx", *path.with_suffix("").parts]) for path in files]
    names = [name.removesuffix(".__init__") for name in names]
    done = subprocess.run(
        [sys.executable, "-c", TORCH_FREE, *names], capture_output=True, text=True, check=False
    )
    assert done.stdout == "free\n", done.stderr


# --- sizes ---

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def functions() -> Iterator[tuple[Path, Function]]:
    for path, tree in parsed():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def nesting(node: ast.AST) -> int:
    """How deep blocks lie in each other; an elif lies beside its if, a nested def counts alone."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            continue
        is_elif = (
            isinstance(node, ast.If)
            and node.orelse == [child]
            and isinstance(child, ast.If)
            and child.col_offset == node.col_offset
        )
        own = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, own + nesting(child))
    return deepest


def test_nesting_is_counted_as_a_reader_counts_it():
    def depth(source: str) -> int:
        return nesting(ast.parse(source).body[0])

    assert depth("def f():\n return [a for b in c for a in b if a]") == 0
    assert depth("def f():\n if a: b\n elif c: d\n elif e: g\n else: h") == 1
    assert depth("def f():\n if a: b\n else:\n  if c: d") == 2
    assert depth("def f():\n try:\n  x\n except E:\n  for a in b:\n   while c: d") == 3
    assert depth("def f():\n with a:\n  def g():\n   if b: c") == 1


def test_files_stay_short():
    for path, _ in parsed():
        lines = len((PACKAGE / path).read_text(encoding="utf-8").splitlines())
        assert lines <= 400, f"{path}: {lines} lines, more than 400"


def test_functions_stay_short_and_flat():
    lengths = []
    for path, function in functions():
        where = f"{path}:{function.lineno} {function.name}"
        lengths.append(length(function))
        assert lengths[-1] <= 60, f"{where}: {lengths[-1]} lines, more than 60"
        depth = nesting(function)
        assert depth <= 3, f"{where}: nested {depth} deep, more than 3"
    assert len(lengths) > 400, f"the guard went blind: it saw {len(lengths)} functions"
    assert median(lengths) <= 12, f"the median function has {median(lengths)} lines"
    assert quantiles(lengths, n=10)[-1] <= 40, f"one in ten exceeds {quantiles(lengths, n=10)[-1]}"


def calls_to(tree: ast.AST, *names: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names
    ]


def test_only_the_command_line_and_the_reports_print():
    printing = {room_of(path) for path, tree in parsed() if calls_to(tree, "print")}
    assert "cli" in printing, "the guard went blind"
    assert printing <= {"cli", "report"}


def test_only_the_entrance_ends_the_process():
    leaving = {
        path.as_posix()
        for path, tree in parsed()
        if calls_to(tree, "sys.exit", "exit", "quit", "SystemExit")
    }
    assert "__main__.py" in leaving, "the guard went blind"
    assert leaving <= {"__main__.py", "cli/main.py", "cli/trial.py", "trackers/worker.py"}


def test_no_exception_is_caught_without_a_name():
    handlers = [
        (path, node)
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
    ]
    assert len(handlers) > 20, f"the guard went blind: it saw {len(handlers)} handlers"
    bare = [f"{path}:{node.lineno}" for path, node in handlers if node.type is None]
    assert not bare


def test_nothing_is_left_to_do():
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    for path, _ in parsed():
        found = words.search((PACKAGE / path).read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"


def test_exports_are_the_public_functions():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    written = [node.name for node in tree.body if isinstance(node, Function)]
    assert len(written) > 5
    assert phalanx.__all__ == sorted(name for name in written if not name.startswith("_"))
    for name in phalanx.__all__:
        offered = getattr(phalanx, name)
        assert callable(offered), f"phalanx.{name} is no function once the rooms are imported"
        assert offered.__doc__, f"phalanx.{name} has no docstring"


def test_a_command_can_be_called_twice_from_python():
    twice = "import phalanx; print([phalanx.plan('demo').total_steps for _ in range(2)])"
    done = subprocess.run(
        [sys.executable, "-c", twice], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[1000, 1000]\n", done.stderr


PRESETS = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))


@pytest.fixture
def image_folder(tmp_path):
    """Two classes, sixteen tiny images to train on and two to score."""
    for split, count in (("train", 8), ("val", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads_and_plans(name, image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    first = (builtin_preset_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert re.match(r"# \w", first), f"{name}: the first line says what it trains"
    data = read_settings(name).config.data.data
    only_files_know = DATASETS[data].needs_folder and DATASETS[data].train_images is None
    flags = {"data-dir": str(image_folder)} if only_files_know else {}
    plan, _ = plan_run(read_settings(name, flags), without_data=True)
    assert plan.total_steps >= 1 and plan.num_classes >= 2


def test_there_are_presets_and_every_dataset_has_its_own():
    assert len(PRESETS) >= 8
    for name, dataset in DATASETS.items():
        assert dataset.preset in PRESETS
        trained = read_settings(dataset.preset, {"data": name}).config.data.data
        own = read_settings(dataset.preset).config.data.data
        # the other forms of photographs share a preset: the same pictures, kept otherwise
        assert trained == name and own in ({"folder"} if name in PHOTOGRAPHS else {name})


def test_the_options_page_is_fresh():
    page = (HOME / "docs" / "options.md").read_text(encoding="utf-8")
    assert page.count("| `--") == len(OPTIONS)
    writer = runpy.run_path(str(HOME / "scripts" / "write_docs.py"))
    assert page == writer["options_page"](), "stale: run `make docs`"
    page = (HOME / "docs" / "old-configs.md").read_text(encoding="utf-8")
    assert page.count("\n| `") == len(list(iterate_old_presets())) >= 50
    assert page == writer["old_presets_page"](), "stale: run `make docs`"
    page = (HOME / "docs" / "other-trainers.md").read_text(encoding="utf-8")
    assert page == writer["other_trainers_page"](), "stale: run `make docs`"


def test_an_option_is_added_on_purpose():
    assert sorted(OPTIONS) == OPTION_NAMES


# --- the README ---


def readme_commands() -> list[str]:
    """The lines of the README's sh fences."""
    text = (HOME / "README.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [line for fence in fences for line in fence.splitlines() if line.strip()]


def test_the_readme_shows_nothing_but_commands():
    strange = [line for line in readme_commands() if line.split()[0] not in ("phalanx", "make")]
    assert not strange, "lines of a sh fence start with phalanx or make"


def test_the_readme_names_targets_the_makefile_has():
    makefile = (HOME / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    lines = [line for line in readme_commands() if line.startswith("make ")]
    assert lines and len(targets) > 4
    for line in lines:
        asked = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
        assert asked and set(asked) <= targets, line


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_pages_name_files_that_are_there(page):
    named = re.findall(r"(?<![\w./*])\w+(?:/\w+)+\.py\b", (HOME / page).read_text())
    homes = (HOME, PACKAGE)
    assert [file for file in named if not any((home / file).exists() for home in homes)] == []


def test_the_readme_commands_run(tmp_path, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    commands = [line for line in readme_commands() if line.startswith("phalanx ")]
    assert len(commands) >= 4, "the README lost its commands"
    for line in commands:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
