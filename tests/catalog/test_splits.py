"""Split names: every spelling in use finds its unit, and says so when it had to move."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from phalanx.catalog.models import MODELS
from phalanx.catalog.splits import SPELLINGS, Split, expand_spelling, find_split, list_split_names
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError

# A name, then the unit: after "=" the name points there, after ">" the split had to move.
IN_USE = {  # what the published commands and configurations of the older programs say
    "resnet50": """
        layer0             = stem
        layer1/conv        = layer1/0
        layer2/block3/bn   > layer3/0

        b1/0/relu          > layer1/1
        b1/2/relu          > layer2/0
        b2/0/relu          > layer2/1
        b2/2/relu          > layer2/3
        b2/3/relu          > layer3/0
        b3/0/relu          > layer3/1
        b3/3/relu          > layer3/4
        b3/5/relu          > layer4/0

        stage1/unit1/relu  > layer1/1
        stage1/unit2/relu  > layer1/2
        stage1/unit3/relu  > layer2/0
        stage2/unit1/relu  > layer2/1
        stage2/unit3/relu  > layer2/3
        stage2/unit4/relu  > layer3/0
        stage3/unit1/relu  > layer3/1
        stage3/unit4/relu  > layer3/4

        conv2_block1_out   > layer1/1
        conv2_block2_out   > layer1/2
        conv2_block3_out   > layer2/0
        conv3_block1_out   > layer2/1
        conv3_block3_out   > layer2/3
        conv3_block4_out   > layer3/0
        conv4_block1_out   > layer3/1
        conv4_block2_out   > layer3/2
        conv4_block4_out   > layer3/4

        layer1/2           = layer1/2
        layer2/3           = layer2/3
        layer3/4           = layer3/4
    """,
    "resnet18": """
        layer4/0           = layer4/0
    """,
    "resnext101_32x4d": """
        b3/3/relu          > layer3/4
        stage3/unit4/relu  > layer3/4
    """,
    "resnet8": """
        conv2_block1_post_addition_relu > layer2/0
        conv3_block1_post_addition_relu > layer3/0
        conv4_block1_post_addition_relu > head
    """,
    "resnet56": """
        conv2_block4_post_addition_relu > layer1/4
        conv2_block7_post_addition_relu > layer1/7
        conv3_block4_post_addition_relu > layer2/4
    """,
    "efficientnet_b0": """
        block2a/SE               > blocks/1/1
        block2b                  = blocks/1/1
        block4a                  = blocks/3/0
        block5c                  = blocks/4/2
        block6a                  = blocks/5/0

        _blocks/1/_project_conv  > blocks/1/1
        _blocks/4                = blocks/2/1
        _blocks/4/_bn1           > blocks/3/0
        _blocks/4/_project_conv  > blocks/3/0
        _blocks/8/_project_conv  > blocks/4/1
        _blocks/11/_bn1          > blocks/5/1

        blocks/3/0               = blocks/3/0
        blocks/3/0/conv_pw       = blocks/3/0
    """,
    "efficientnet_b4": """
        block0              = stem
        block2a             = blocks/1/0
        block2a/b           > blocks/1/1
        block2b             = blocks/1/1
        block2c             = blocks/1/2
        block2d             = blocks/1/3
        block3a             = blocks/2/0
        block3c             = blocks/2/2
        block4a             = blocks/3/0
        block4b             = blocks/3/1
        block4c             = blocks/3/2
        block5a             = blocks/4/0
        block5d             = blocks/4/3
        block6a             = blocks/5/0
        block6c             = blocks/5/2
        block6e             = blocks/5/4

        blocks/1/1          = blocks/1/1
        blocks/3/0          = blocks/3/0
        blocks/4/5          = blocks/4/5
        blocks/1/1/conv_pw  = blocks/1/1
        blocks/3/0/conv_pw  = blocks/3/0
        blocks/3/0/bn2      > blocks/3/1
        blocks/4/5/conv_pw  = blocks/4/5
    """,
}
BY_RULE = {  # the rest of each vocabulary
    "resnet50": """
        layer3                 = layer3/0
        layer3.0               = layer3/0
        layer3/0/conv1         = layer3/0
        layer3/0/bn1           > layer3/1
        layer3.0.bn1           > layer3/1
        layer3/0/conv2         > layer3/1
        layer3/5/conv3         > layer4/0
        layer2/0/downsample    = layer2/0
        layer2/0/downsample/0  = layer2/0
        layer2.0.downsample.1  > layer2/1
        layer4/0/downsample_0  = layer4/0
        layer4/2/relu          > head
        layer2/block3          = layer2/3
        layer2/block3/conv     = layer2/3

        b3                     = layer3/0
        b3/2                   = layer3/2
        stage3                 = layer3/0
        stage3/unit1           = layer3/0

        conv4_block2_1_conv    = layer3/1
        conv4_block1_0_conv    = layer3/0
        conv4_block1_0_bn      > layer3/1
        conv4_block1_1_relu    > layer3/1
        conv4_block1_2_gn      > layer3/1
        conv4_block1_3_bn      > layer3/1
        conv4_block6_add       > layer4/0
        conv5_block3_out       > head

        add                    > layer1/1
        add_3                  > layer2/1
        add/3                  > layer2/1
        add_15                 > head
    """,
    "resnet20": """
        conv2_block1_layer1_conv     = layer1/0
        conv3_block1_layer1_conv_ds  = layer2/0
        conv3_block1_shortcut        = layer2/0
        conv3_block1_layer1_bn       > layer2/1
        conv3_block1_layer1_relu     > layer2/1
        conv3_block2_layer2_conv     > layer2/2
        conv3_block3_add             > layer3/0
    """,
    "resnet9": """
        layer1          = layer1/0
        layer1/0/conv1  = layer1/0
        layer1/0/bn1    > layer1/1
        layer1/0/pool   > layer1/1
        layer1/1/conv2  > layer2/0
        layer2/0/act1   > layer3/0
    """,
    "efficientnet_b0": """
        blocks/3                    = blocks/3/0
        blocks.3.0.se.conv_reduce   > blocks/3/1
        blocks/3/0/conv_dw          > blocks/3/1
        blocks/3/0/act2             > blocks/3/1
        blocks/0/0/conv_dw          = blocks/0/0
        blocks/0/0/conv_pw          > blocks/1/0
        blocks/6/0/bn3              > head

        _blocks/0                   = blocks/0/0
        _blocks/0/_depthwise_conv   = blocks/0/0
        _blocks/0/_bn2              > blocks/1/0
        _blocks/4/_expand_conv      = blocks/2/1
        _blocks/4/_bn0              > blocks/3/0
        _blocks/4/_depthwise_conv   > blocks/3/0
        _blocks/15/_se_expand       > head

        block4                      = blocks/3/0
        block1a/b                   = blocks/0/0
        block1a/SE                  > blocks/1/0
        block7a/c                   > head

        add                         > blocks/2/0
        add_1                       > blocks/3/0
    """,
}
ENDS = {
    "resnet50": """
        b0           = stem
        stage0       = stem
        conv1        = stem
        conv1_pad    = stem
        conv1_conv   = stem
        conv1_bn     > layer1/0
        conv1_relu   > layer1/0
        pool1_pad    > layer1/0
        pool1_pool   > layer1/0
        bn1          > layer1/0
        maxpool      > layer1/0

        global_pool  = head
        avgpool      = head
        avg_pool     = head
        reduce_mean  = head
        fc           > head
        fc1          > head
        fc_layer     > head
        predictions  > head
    """,
    "resnet9": """
        conv1        = stem
        bn1          > layer1/0
        global_pool  = head
        drop         > head
        scale        > head
    """,
    "efficientnet_b0": """
        conv_stem    = stem
        _conv_stem   = stem
        bn1          > blocks/0/0
        _bn0         > blocks/0/0

        conv_head    = head
        _conv_head   = head
        Top          = head
        bn2          > head
        _bn1         > head
        global_pool  > head
        classifier   > head
        _fc          > head
    """,
}


def rows_of(table: dict[str, str]) -> list[tuple[str, str, str, str]]:
    """Model, name, sign and unit of every line."""
    rows = [
        (model, *line.split())
        for model, lines in table.items()
        for line in lines.splitlines()
        if line.strip()
    ]
    assert rows and all(len(row) == 4 and row[2] in "=>" for row in rows)
    return rows


def split(model: str, name: str) -> Split:
    return find_split(MODELS[model], name, model=model)


@pytest.mark.parametrize(
    ("model", "name", "sign", "unit"), [*rows_of(IN_USE), *rows_of(BY_RULE), *rows_of(ENDS)]
)
def test_a_name_finds_its_unit(model, name, sign, unit):
    found = split(model, name)
    assert (found.name, found.unit) == (name, unit)
    assert bool(found.shifted) == (sign == ">"), found.shifted


@pytest.mark.parametrize("model", MODELS)
def test_every_unit_of_every_model_is_its_own_split(model):
    assert len(MODELS[model].units) > 4
    for unit in MODELS[model].units:
        assert split(model, unit) == Split(unit, unit, "")


@pytest.mark.parametrize("model", MODELS)
def test_every_spelling_names_every_block_or_the_first_of_every_stage(model):
    variant = MODELS[model]
    known = list_split_names(variant)
    blocks = variant.units[1:-1]
    for spelling in SPELLINGS[variant.family]:
        each = any(field in spelling.template for field in ("{block}", "{letter}", "{flat}"))
        wanted = [unit for unit in blocks if each or unit.endswith("/0")]
        names = dict.fromkeys(
            name for name, place in expand_spelling(variant, spelling) if place.is_first
        )
        assert list(dict.fromkeys(known[name].unit for name in names)) == wanted, spelling.template


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("b3/0/relu", "b3/0/relu is inside layer3/0; the stage starts at layer3/1"),
        ("layer3.0.bn1", "layer3.0.bn1 is inside layer3/0; the stage starts at layer3/1"),
        ("maxpool", "maxpool is inside stem; the stage starts at layer1/0"),
        ("fc", "fc is inside head, after which there is no boundary; the stage starts at head"),
    ],
)
def test_a_split_that_moved_says_why(name, told):
    assert split("resnet50", name).shifted == told


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        ("resnet50", "b3/9/relu", "layer3 has b3/0/relu to b3/5/relu"),
        ("resnet50", "layer3/6", "layer3 has layer3/0 to layer3/5"),
        ("resnet50", "layer3.9.conv2", "layer3 has layer3.0.conv2 to layer3.5.conv2"),
        ("resnet50", "stage1/unit0/relu", "layer1 has stage1/unit1/relu to stage1/unit3/relu"),
        ("resnet50", "conv4_block7_out", "layer3 has conv4_block1_out to conv4_block6_out"),
        ("resnet50", "conv1_block1_out", "it has conv2_block1_out to conv5_block3_out"),
        ("resnet50", "layer5", "it has layer1 to layer4"),
        ("resnet20", "layer4/0", "it has layer1/0 to layer3/2"),
        ("resnet10", "b1/1/relu", "layer1 has b1/0/relu"),
        ("resnet18", "layer2/block3/bn", "layer2 has layer2/block0/bn to layer2/block1/bn"),
        ("resnet9", "layer2/1", "layer2 has layer2/0"),
        ("efficientnet_b0", "block2c", "blocks/1 has block2a to block2b"),
        ("efficientnet_b0", "block8a/SE", "it has block1a/SE to block7a/SE"),
        ("efficientnet_b0", "_blocks/16/_bn1", "it has _blocks/0/_bn1 to _blocks/15/_bn1"),
        ("efficientnet_b0", "_blocks/0/_bn0", "it has _blocks/1/_bn0 to _blocks/15/_bn0"),
    ],
)
def test_a_number_outside_the_model_is_answered_with_what_there_is(model, name, told):
    with pytest.raises(ConfigError) as error:
        split(model, name)
    assert str(error.value) == f"--pipeline-splits: {model} has no '{name}'; {told}"


STAGES_OF_B0 = f"it has stem, {', '.join(f'blocks/{stage}' for stage in range(7))}, head"


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        ("resnet50", "b9/relu", "near it: b4/2/relu, b4/1/relu, b4/0/relu"),
        ("resnet50", "layer3.0.conv7", "near it: layer3.0.conv3, layer3.0.conv2, layer3.0.conv1"),
        ("resnet50", "nonsense", "it has stem, layer1, layer2, layer3, layer4, head"),
        ("resnet18", "layer1/0/conv3", "near it: layer1/0/conv2, layer1/0/conv1, layer1/conv"),
        ("efficientnet_b0", "blok4a", "near it: block4a, block4, block4a/c"),
        ("efficientnet_b0", "b3/0/relu", STAGES_OF_B0),
    ],
)
def test_an_unknown_name_is_answered_with_the_near_ones(model, name, told):
    with pytest.raises(ConfigError) as error:
        split(model, name)
    assert str(error.value) == f"--pipeline-splits: no part of {model} is called '{name}'; {told}"


@pytest.mark.parametrize("name", ["", "/", "layer3/", "layer3//0", " layer3", "b3/0/relu/relu"])
def test_half_a_name_is_no_name(name):
    with pytest.raises(ConfigError, match="no part of resnet50"):
        split("resnet50", name)


@dataclass(frozen=True, kw_only=True)
class Foreign(Variant):
    """A model of a family the tables do not know."""

    family: ClassVar[str] = "Foreign"
    head: ClassVar[str] = "logits"

    @property
    def units(self) -> tuple[str, ...]:
        return ("patches", "encoder/0", "encoder/1", "neck.wide", "logits")

    @property
    def halvings(self) -> int:
        return 0

    def norm_channels(self) -> dict[str, int]:
        return {}


def test_a_foreign_model_is_split_at_its_units_and_stages_alone():
    variant = Foreign(image_size=32)
    own = {unit: find_split(variant, unit, model="foreign").unit for unit in variant.units}
    assert own == {unit: unit for unit in variant.units}
    assert find_split(variant, "encoder", model="foreign") == Split("encoder", "encoder/0", "")
    assert find_split(variant, "encoder.1", model="foreign").unit == "encoder/1"
    for name in ("encoder/0/conv1", "b1/0/relu", "fc", "add", "encoder/2"):
        with pytest.raises(ConfigError, match=f"no part of foreign is called '{name}'"):
            find_split(variant, name, model="foreign")


def test_a_block_has_only_the_parts_of_its_kind():
    assert "blocks/0/0/conv_pwl" not in list_split_names(MODELS["efficientnet_b0"])
    assert "blocks/1/0/conv_pwl" in list_split_names(MODELS["efficientnet_b0"])
    assert "conv2_block1_3_conv" not in list_split_names(MODELS["resnet34"])
    assert "conv2_block1_3_conv" in list_split_names(MODELS["resnet50"])
    assert split("efficientnet_b4", "add").unit == "blocks/1/0", "blocks/0/1 adds, blocks/0/0 not"
