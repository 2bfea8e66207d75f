"""Which outputs recomputation stores: patterns over the paths of modules, without torch.

The paths are those of the networks, derived from the tables, with "/" between parts. Other names
for a module (`add_3` in a traced graph, torchvision's `avgpool`) are accepted, too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from phalanx.catalog.airbench import AirbenchVariant
from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.resnets import FastResNetVariant, ResNetVariant
from phalanx.catalog.splits import list_traced_additions
from phalanx.catalog.variant import OwnVariant, Variant
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.plan.model import build_variant
from phalanx.plan.pipeline import Pipeline

_Names = Mapping[str, tuple[str, ...]]  # the possible names of modules, and the modules meant

_SUGGESTIONS = 3
_STEM = {
    "ResNet": "conv1 bn1 act1 maxpool",
    "ResNet-9": "conv1 bn1 act1",
    "EfficientNet": "conv_stem bn1 act1",
    "airbench": "whitening act1",
}
_HEAD = {
    "ResNet": "global_pool drop fc",
    "ResNet-9": "global_pool drop fc scale",
    "EfficientNet": "conv_head bn2 act2 global_pool drop classifier",
    "airbench": "global_pool drop fc scale",
}
_RESIDUAL = {
    "basic": "conv1 bn1 act1 conv2 bn2 act2 downsample",
    "bottleneck": "conv1 bn1 act1 conv2 bn2 act2 conv3 bn3 act3 downsample",
}
_PROJECTION = " downsample/0 downsample/1"
_FAST = ("conv1 bn1 act1 pool", "conv1 bn1 act1 conv2 bn2 act2")  # by place in the stage
_AIRBENCH = "conv1 pool bn1 act1 conv2 bn2 act2"
_SQUEEZE = "se se/conv_reduce se/act1 se/conv_expand"
_LAYER_TYPES = {  # names in the oldest recipes for all convolutions or norms, not patterns
    "conv": re.compile(r"(.*/)?(conv\d?|conv_\w+|downsample/0)"),
    "norm": re.compile(r"(.*/)?(bn\d|downsample/1)"),
}
_REGEX_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_NESTING = {"(": 1, "{": 1, ")": -1, "}": -1}


def plan_recomputation(config: Config) -> tuple[str, ...] | None:
    """Patterns of the modules whose outputs are stored; None without recomputation."""
    if not config.machine.enable_recompute:
        return None
    text = config.machine.recompute_checkpoints
    if text is None:
        return ()
    patterns, variant = split_patterns(text), build_variant(config)
    if not patterns:
        raise ConfigError(
            f"--recompute-checkpoints: {text!r} names no module; give patterns with commas, such "
            "as .*conv.*, or leave it out to keep the output of every block"
        )
    for pattern in patterns:
        _compile_pattern(pattern)
    if not isinstance(variant, OwnVariant):
        # raises if a pattern matches nothing
        find_kept_modules(variant, patterns, model=config.model.model)
    return patterns


def add_stage_outputs(
    pipeline: Pipeline, config: Config, patterns: tuple[str, ...] | None, *, folded: bool
) -> tuple[str, ...] | None:
    """The same for a model in stages: the outputs of stages are stored, too.

    Folded stages always recompute the rest. Those on their own devices do so if the option says
    so, and get the stored inputs from the previous stage.
    """
    if patterns is None and not folded:
        return None
    variant = build_variant(config)
    if isinstance(variant, OwnVariant):  # only the network itself knows its units
        return patterns or ()
    ends = tuple(stage[-1] for stage in pipeline.split_units(variant.units)[:-1])
    return (*(patterns or ()), *ends)


def split_patterns(text: str) -> tuple[str, ...]:
    """Comma-separated regular expressions, with or without brackets; they may contain commas.

    >>> split_patterns("[conv{1,2}, layer[1,2]]"), split_patterns("[a-z]*/0,(a,b)")
    (('conv{1,2}', 'layer[1,2]'), ('[a-z]*/0', '(a,b)'))
    """
    text = text.strip()
    words, depth = [""], 0
    for piece in _REGEX_TOKEN.findall(text[1:-1] if _is_bracketed(text) else text):
        depth = max(0, depth + _NESTING.get(piece, 0))
        if piece == "," and depth == 0:
            words.append("")
        else:
            words[-1] += piece
    return tuple(word.strip() for word in words if word.strip())


def _is_bracketed(text: str) -> bool:
    """Whether a text starts with a bracket that its last character closes."""
    depth = 0
    for place, piece in enumerate(pieces := re.findall(r"\\.|.", text, re.DOTALL), start=1):
        depth += {"[": 1, "]": -1}.get(piece, 0)
        if depth <= 0:
            return piece == "]" and depth == 0 and place == len(pieces)
    return False


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled regular expression; ConfigError if it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--recompute-checkpoints: {pattern!r} is not a regular expression: {error}; "
            "for example .*conv.* or layer3/.*"
        ) from error


def find_kept_modules(variant: Variant, patterns: Sequence[str], *, model: str) -> tuple[str, ...]:
    """Paths of the modules whose outputs are stored; without patterns, the last of every unit.

    Empty for a plugin's network, whose modules are known only once it is built.

    >>> from phalanx.catalog.models import MODELS
    >>> find_kept_modules(MODELS["resnet8"], ["add_1", "layer3/0/conv"], model="resnet8")
    ('layer2/0', 'layer3/0/conv1', 'layer3/0/conv2')
    """
    names = _list_module_names(variant)
    if not names:
        return ()
    if not patterns:
        return tuple(dict.fromkeys(path for unit in variant.units for path in names[unit]))
    return match_modules(patterns, names, model=model)


def match_modules(patterns: Sequence[str], names: _Names, *, model: str) -> tuple[str, ...]:
    """The modules that the patterns match, each once; ConfigError if one matches nothing."""
    found: dict[str, None] = {}
    for pattern in patterns:
        paths = [path for name in _match_names(pattern, names) for path in names[name]]
        if not paths:
            near = get_close_matches(pattern.replace(".", "/"), names, n=_SUGGESTIONS, cutoff=0.5)
            shown = near or list(names)[:_SUGGESTIONS]
            raise ConfigError(
                f"--recompute-checkpoints: no module of {model} matches {pattern!r}; it has "
                f"{', '.join(shown)} and {len(names) - len(shown)} more; for example .*conv.*"
            )
        found |= dict.fromkeys(paths)
    return tuple(found)


def _match_names(pattern: str, names: _Names) -> list[str]:
    """The names that a pattern matches: the equal one, or all whose beginning it matches."""
    for name in (pattern, pattern.replace(".", "/")):
        if name in names:
            return [name]
    regex = _compile_pattern(pattern)
    return [
        name
        for name, paths in names.items()
        if (name not in _LAYER_TYPES or paths == (name,))
        and (regex.match(name) or regex.match(name.replace("/", ".")))
    ]


def _list_module_names(variant: Variant) -> dict[str, tuple[str, ...]]:
    """All possible names of a variant's modules; empty for a plugin's network."""
    paths = list_module_paths(variant)
    if not paths:
        return {}
    names: dict[str, tuple[str, ...]] = {}
    for path in paths:
        inside = [unit for unit in variant.units if unit.startswith(f"{path}/")]
        names[path] = (inside[-1] if inside else path,)  # a stage's output is its last unit's
    for unit, words in (("stem", _STEM), ("head", _HEAD)):
        names[unit] = (words[variant.family].split()[-1],)
    names |= {name: (unit,) for name, unit in list_traced_additions(variant).items()}
    names["avgpool"] = names["global_pool"]
    projections = [path for path in paths if re.search(r"downsample/\d$", path)]
    names |= {re.sub(r"/(\d)$", r"_\1", path): (path,) for path in projections}
    for layer_type, pattern in _LAYER_TYPES.items():
        names[layer_type] = tuple(path for path in paths if pattern.fullmatch(path))
    return names


def list_module_paths(variant: Variant) -> tuple[str, ...]:
    """The paths of all modules in the order of the tree; empty for a plugin's network."""
    if variant.family not in _STEM:
        return ()
    paths = _STEM[variant.family].split()
    for unit, words in _list_block_words(variant):
        parts = unit.split("/")
        paths += ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        paths += [f"{unit}/{word}" for word in words.split()]
    return tuple(dict.fromkeys(paths + _HEAD[variant.family].split()))


def _list_block_words(variant: Variant) -> Iterator[tuple[str, str]]:
    """Every block and the names of its modules."""
    if isinstance(variant, ResNetVariant):
        for block in variant.blocks:
            projection = _PROJECTION if variant.projects(block) else ""
            yield block.unit, _RESIDUAL[variant.block] + projection
    if isinstance(variant, FastResNetVariant):
        yield from ((unit, _FAST[int(unit[-1])]) for unit in variant.units[1:-1])
    if isinstance(variant, AirbenchVariant):
        yield from ((unit, _AIRBENCH) for unit in variant.units[1:-1])
    if isinstance(variant, EfficientNetVariant):
        for inverted in variant.blocks:
            squeeze = _SQUEEZE if inverted.squeeze_width else "se"
            if inverted.widens:
                yield inverted.unit, f"conv_pw bn1 act1 conv_dw bn2 act2 {squeeze} conv_pwl bn3"
            else:
                yield inverted.unit, f"conv_dw bn1 act1 {squeeze} conv_pw bn2"
