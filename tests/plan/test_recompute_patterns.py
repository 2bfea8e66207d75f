"""Patterns of --recompute-checkpoints mean the modules they name, and others are refused."""

from dataclasses import replace

import pytest

from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from phalanx.plan.recompute import find_kept_modules, plan_recomputation, split_patterns

RESNET8_CONVS = (
    "conv1",
    "layer1/0/conv1",
    "layer1/0/conv2",
    "layer2/0/conv1",
    "layer2/0/conv2",
    "layer3/0/conv1",
    "layer3/0/conv2",
)


def stored(*patterns: str, model: str = "resnet8") -> tuple[str, ...]:
    return find_kept_modules(MODELS[model], patterns, model=model)


def test_the_oldest_example_takes_everything_with_conv_in_its_path():
    assert stored(".*conv.*") == RESNET8_CONVS
    shortcut = "layer1/0/downsample/0"
    assert shortcut not in stored(".*conv.*", model="resnet50")
    assert shortcut in stored("conv", model="resnet50"), "the word means every convolution"


def test_the_words_of_the_oldest_recipe_take_all_convolutions_and_all_norms():
    both = stored("conv", "norm", model="resnet50")
    assert len(both) == 2 * 53
    assert set(stored("norm", model="resnet50")) == {
        path for path in both if "bn" in path or path.endswith("downsample/1")
    }


def test_a_plain_path_means_itself_and_a_pattern_the_beginning_of_paths():
    assert stored("layer3/0") == stored("layer3.0") == ("layer3/0",)
    assert stored("layer3/0/conv") == ("layer3/0/conv1", "layer3/0/conv2")
    assert stored(r"layer3\.0\.conv2") == stored("layer3.0.conv2") == ("layer3/0/conv2",)
    assert stored("layer3/0/conv2", ".*/conv2", "layer3/0") == (
        "layer3/0/conv2",
        "layer1/0/conv2",
        "layer2/0/conv2",
        "layer3/0",
    )


def test_a_stage_means_the_output_of_its_last_block():
    assert stored("layer3", model="resnet50") == ("layer3/5",)
    assert stored("blocks/1", "blocks", model="efficientnet_b0") == ("blocks/1/1", "blocks/6/0")


def test_names_of_traced_graphs_are_known():
    # as an ancestor's recipe for ResNet-50 has them
    names = ("add", "add_3", "add/5", "layer4/0/downsample_0", "layer4/0/downsample/1", "avgpool")
    assert stored(*names, model="resnet50") == (
        "layer1/0",
        "layer2/0",
        "layer2/2",
        "layer4/0/downsample/0",
        "layer4/0/downsample/1",
        "global_pool",
    )
    assert stored("add_1", model="efficientnet_b0") == ("blocks/2/1",), "those that add alone"


def test_without_patterns_the_output_of_every_unit_is_stored():
    assert stored() == ("maxpool", "layer1/0", "layer2/0", "layer3/0", "fc")
    assert stored(model="efficientnet_cifar")[-2:] == ("blocks/6/0", "classifier")
    assert stored(model="resnet9")[-1] == "scale"


def test_projections_are_there_where_the_shortcut_says_so():
    pattern = ["layer2/0/downsample/0"]
    with pytest.raises(ConfigError):
        find_kept_modules(MODELS["resnet8"], pattern, model="resnet8")
    projecting = replace(MODELS["resnet8"], shortcut="B")
    assert find_kept_modules(projecting, pattern, model="resnet8") == tuple(pattern)


REFUSED = {
    "layr3/0/conv2": r"no module of resnet8 matches 'layr3/0/conv2'; it has layer3/0/conv2, ",
    "zzz": r"no module of resnet8 matches 'zzz'; it has conv1, bn1, act1 and \d+ more; "
    r"for example \.\*conv\.\*$",
    "layer4/.*": r"no module of resnet8 matches 'layer4/\.\*'; it has ",
    "conv(": r"'conv\(' is not a regular expression: missing \)",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    with pytest.raises(ConfigError, match=f"^--recompute-checkpoints: {REFUSED[pattern]}"):
        stored("fc", pattern)


def test_of_a_plugins_network_nothing_is_known_beforehand():
    own = OwnVariant(image_size=8, build="some:net")
    assert find_kept_modules(own, ["anything"], model="own") == ()


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("conv,norm", ("conv", "norm")),
        ("[conv, norm]", ("conv", "norm")),
        ("[conv]", ("conv",)),
        ("layer[12]", ("layer[12]",)),
        ("[a-z]*/0/conv2", ("[a-z]*/0/conv2",)),
        ("[lc].*[12]", ("[lc].*[12]",)),
        ("conv{1,2},bn1", ("conv{1,2}", "bn1")),
        ("(conv,|bn)1", ("(conv,|bn)1",)),
        ("layer[1,2], [,(]x", ("layer[1,2]", "[,(]x")),
        ("[layer[1,2],conv]", ("layer[1,2]", "conv")),
        (r"a\[,b\],c\(,d", (r"a\[", r"b\]", r"c\(", "d")),
        ("[]],a", ("[]]", "a")),
        ("[", ("[",)),
        ("[]", ()),
        (" , ", ()),
    ],
)
def test_patterns_are_split_at_commas_that_are_not_their_own(text, patterns):
    assert split_patterns(text) == patterns


def planned(text: str) -> tuple[str, ...] | None:
    flags = {"enable-recompute": "true", "recompute-checkpoints": text}
    return plan_recomputation(read_settings("demo", flags).config)


def test_classes_and_counts_of_regular_expressions_reach_the_modules():
    assert planned("layer[12]") == ("layer[12]",)
    assert stored("layer[12]/0$") == ("layer1/0", "layer2/0")
    assert stored("[a-z]*[0-9]/0/conv2") == tuple(f"layer{n}/0/conv2" for n in (1, 2, 3))
    assert planned("conv{1,2}") == ("conv{1,2}",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "'[' is not a regular expression"),
        ("conv,[a", "'[a' is not a regular expression"),
        ("[]", "'[]' names no module; give patterns with commas, such as .*conv.*, or leave it"),
        ("", "'' names no module"),
    ],
)
def test_lists_without_a_pattern_are_refused(text, told):
    with pytest.raises(ConfigError) as caught:
        planned(text)
    assert str(caught.value).startswith(f"--recompute-checkpoints: {told}")


def test_without_patterns_every_block_is_kept():
    assert plan_recomputation(read_settings("demo", {"enable-recompute": "true"}).config) == ()
    assert plan_recomputation(read_settings("demo").config) is None
