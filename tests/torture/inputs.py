"""What users and strangers type: options, config files, names of files and classes."""

import os
import string
from random import Random

import yaml

from phalanx.cli.main import COMMANDS
from phalanx.config.presets import builtin_preset_folder
from phalanx.config.schema import OPTIONS, Option
from small_photos import encode, photo
from torture.law import MARK, Outcome, Violation, check_end, describe, read_summary
from torture.material import COUNTS, Trial, train_words

_NOT_TYPED = {
    "plugin",
    "data-dir",
    "run-dir",
    "init-weights",
}  # import, read or write what they say
_SIZES = {  # in a training they decide how long it takes; `plan` gets them, too
    "batch-size", "dataloader-rebatch-size", "device-iterations", "epochs",
    "gradient-accumulation", "image-size", "iterations", "model", "progressive-resolution",
    "repeated-augmentation", "replicas", "steps", "threads", "valid-batch-size", "workers", "data",
    "data-dir", "run-dir",
}  # fmt: skip
_WORDS = [
    "", " ", "0", "-1", "1", "2", "0.5", "1e-3", "1e400", "nan", "inf", "-inf", "null", "none",
    "true", "false", "yes", "1/2", "1/0", "5ep", "500st", "10%", "101%", "0.1,0.9", "[1,2]", "{}",
    "auto", "cpu", "cuda:99", "mps", "1" * 60, "9" * 5000, "x" * 300, "\x1b[2J", "a\nb", "²", "٣",
    "../..", "/", "-", "--", "--lr", "a=b", "%s%n", "$(true)", "\u202e", "\udcff", "😀", "2**70",
    "18446744073709551616", "128:30%,176:60%", "cat,dog",
]  # fmt: skip

_TEXTS = [
    "5ep",
    "500st",
    "10%",
    "1/2",
    "2",
    "0",
    "0.1,0.9",
    "0.5,1",
    "10",
    "1%",
    "30,60",
]  # that fit


def _choose_value(option: Option, chance: Random) -> str:
    """A value for an option: one that fits, or anything."""
    if chance.random() < 0.15:
        return chance.choice(_WORDS)
    if option.choices:
        return chance.choice(option.choices)
    low = 0 if option.low is None else option.low
    high = low + 1000 if option.high is None else option.high
    fitting = {
        bool: lambda: chance.choice(["true", "false"]),
        int: lambda: str(chance.choice([int(low), int(high), chance.randint(1, 9)])),
        float: lambda: str(chance.choice([low, high, chance.uniform(0, 1)])),
        str: lambda: chance.choice([str(option.default), *_TEXTS]),
    }
    return fitting[option.type]()


def fuzz_options(trial: Trial) -> Outcome:
    """A command with a few options, known and unknown, and any values."""
    chance = trial.chance
    trains = chance.random() < 0.3
    names = sorted(set(OPTIONS) - _NOT_TYPED - (_SIZES if trains else set()))
    flags = []
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(names)
        if chance.random() < 0.1:
            flags.append("--" + "".join(chance.choices(string.ascii_lowercase + "-_=.", k=7)))
        else:
            value = _choose_value(OPTIONS[name], chance)
            flags += chance.choice([[f"--{name}={value}"], [f"--{name}", value]])
    if trains:
        trial.lay_out("idx", half=False)
        words = [word for word in train_words("idx") if not word.startswith("--steps")]
        given = {flag.partition("=")[0] for flag in flags}
        words = [word for word in words if word.partition("=")[0] not in given]
        words += ["--steps=1", *flags]
    else:
        words = [*chance.choice(_light_commands(chance)), *flags]
    ended = trial.run(words)
    trial.tell(ended.line())
    return check_end(ended)


def _light_commands(chance: Random) -> list[list[str]]:
    """Commands that say something without training, and one that is none."""
    presets = sorted(path.stem for path in builtin_preset_folder().glob("*.yaml"))
    preset = chance.choice(presets)
    return [
        *[["plan", preset, "--no-fetch"]] * 8,
        ["models", "show", chance.choice(["resnet18", "efficientnet_b0", "resnet8", "x"])],
        ["presets", "cat", chance.choice([preset, "x", ""])],
        ["data", "list", chance.choice([".", "/nowhere", "x\ny"])],
        ["report", chance.choice([".", "x", ""])],
        ["validate", "."],
        ["compare", ".", "x"],
        ["predict", ".", "x"],
        [*chance.choice(sorted(COMMANDS)).split(), "--help"],
        [chance.choice(_WORDS)],
    ]


def fuzz_config(trial: Trial) -> Outcome:
    """A config file of any content: options with any values, or a preset with damage."""
    chance, folder = trial.chance, trial.folder
    kind = chance.choice(["options", "damage", "bytes", "nested", "merges"])
    presets = sorted(builtin_preset_folder().glob("*.yaml"))
    if kind == "options":
        names = chance.sample(sorted(set(OPTIONS) - _NOT_TYPED), k=chance.randint(1, 6))
        values: dict[object, object] = {name: _choose_yaml(OPTIONS[name], chance) for name in names}
        if chance.random() < 0.2:
            values[chance.choice([1, None, True, "lrr", "extends", ("a", "b")])] = "demo"
        content = yaml.dump(values, Dumper=yaml.Dumper).encode()
    elif kind == "nested":
        opening = chance.choice(["[", "{", "- ", "a: [", "? ", "{a: ", "!!x ", "&a [", "<<: {"])
        content = (opening * chance.choice([3, 100, 2000, 20000])).encode()
    elif kind == "merges":
        content = _merge_often(chance.randint(2, 9), chance.randint(2, 12))
    else:
        content = bytearray(chance.choice(presets).read_bytes())
        for _ in range(chance.randint(1, 5)):
            place = chance.randrange(len(content))
            wild = chance.randbytes(chance.randint(1, 8))
            content[place : place + chance.randint(0, 9)] = (
                wild
                if kind == "bytes"
                else chance.choice([b":", b"\n", b"  ", b"- ", b"&a", b"*a"])
            )
    name = chance.choice(["mine.yaml", "presets/mine.yaml", "configs.yml"])
    (folder / "presets").mkdir()
    (folder / name).write_bytes(content)
    named = "mine" if name != "mine.yaml" else name
    words = chance.choice([["plan", named], ["presets", "ls"], ["presets", "cat", named]])
    if name == "configs.yml":
        words = chance.choice([["plan", "demo"], ["presets", "ls"]])
    trial.tell(f"{name} with {kind}: {bytes(content[:200])!r}")
    return check_end(trial.run(words))


def _merge_often(levels: int, times: int) -> bytes:
    """Mappings that merge the one before several times: few lines, which may mean many keys."""
    lines = ["a0: &a0 {lr: 1}"]
    for level in range(1, levels):
        merged = ", ".join([f"*a{level - 1}"] * times)
        lines.append(f"a{level}: &a{level} {{<<: [{merged}]}}")
    return "\n".join([*lines, f"<<: [*a{levels - 1}]", ""]).encode()


def _choose_yaml(option: Option, chance: Random) -> object:
    text = _choose_value(option, chance)
    return chance.choice(
        [
            text,
            yaml.safe_load("7"),
            [text],
            {"a": text},
            None,
            0.5,
            -1,
            True,
            text.encode("utf-8", "replace"),
        ]
    )


# --- names ---

_HOSTILE = [
    b"\x1b[2J\x1b]0;owned\x07", b"\n" + MARK.encode(), b"\xff\xfe\x80", b"\r" + MARK.encode(),
    b"-rf", b"--run-dir=x", b"'\"`$(true)", b"a,b;c\tc", b"%s%n{0}", b"<script>alert(1)",
    "\u202egpj.exe".encode(), "e\u0301\u0327".encode(), b"\xc2\x9b31m", b"CON", b"[bold red]x",
    b" ", b"~", b"*?", b"\\", b"=cmd|'calc'!A0", b"x" * 180, "ö".encode() * 90,
]  # fmt: skip


def _hostile(prefix: str, chance: Random) -> bytes:
    """A name that sorts as its prefix does."""
    return prefix.encode() + chance.choice(_HOSTILE)


def name_badly(trial: Trial) -> Outcome:
    """Classes and files with hostile names, sorted as the plain ones are: the same weights."""
    chance, seed, names = trial.chance, 0, {}
    root = os.fsencode(trial.folder / "data")
    for split, count in COUNTS.items():
        for number in range(3):
            name = names.setdefault(number, _hostile(f"{number}", chance))
            os.makedirs(os.path.join(root, split.encode(), name))
            for image in range(count):
                file = _hostile(f"{image}", chance) + b".jpg"
                with open(os.path.join(root, split.encode(), name, file), "wb") as out:
                    out.write(encode(photo(seed, size=(24, 20))))
                seed += 1
    trial.tell(f"classes {list(names.values())!r}")
    ended = trial.run(train_words("jpeg folder"))
    if check_end(ended) is Outcome.REFUSED:
        raise Violation(f"names alone stop a training\n{describe(ended)}")
    plain = read_summary(trial.material.whole("jpeg folder") / "run")
    if read_summary(trial.folder / "run")["weights_sha256"] != plain["weights_sha256"]:
        raise Violation(f"names alone give other weights\n{describe(ended)}")
    example = os.fsdecode(os.path.join(root, b"train", names[0]))
    for words in chance.sample(_name_commands(example), k=2):
        check_end(trial.run(words))
    return Outcome.IDENTICAL


def _name_commands(folder: str) -> list[list[str]]:
    """Commands that print the names of classes or files."""
    return [
        ["validate", "run"],
        ["predict", "run", folder],
        ["predict", "run", folder, "--csv"],
        ["data", "verify", "data", "--workers", "1"],
        ["data", "verify", "data", "--workers", "1", "--out", "page.html"],
        ["data", "list", "data"],
        ["data", "build", "data", "--to", "packed", "--out", "packed", "--workers", "1"],
        ["data", "build", "data", "--to", "tfrecord", "--out", "records", "--workers", "1"],
        ["report", "run"],
        ["replay", "run", "--step", "3"],
        ["plan", "--data", "folder", "--data-dir", "data"],
        ["predict", "run", folder + "/missing\x1b[2J"],
        ["train", "--resume", "run\x1b[2J"],
    ]
