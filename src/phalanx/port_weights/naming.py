"""How an older program names and lays out a network's tensors: one table for each."""

from dataclasses import dataclass, field

from phalanx.port_weights.model_layers import COUNTER, Layer, Shape

NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", COUNTER)


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The names one program gives to the layers of one family.

    Names of layers are templates. They may hold {path}, the name that timm gives; {stage} and
    {index} of the block, both also from one as {stage1} and {index1}; {letter}, the index as a
    letter; {number} of the block in the network; {step}; {channels}; {strided}; and the words
    of the norm in use.
    """

    title: str
    program: str  # a row of programs.PROGRAMS
    family: str
    layers: dict[tuple[str, str], str]  # kind and part to the layer's name
    tensors: dict[str, dict[str, str]]  # by kind, or "depthwise conv": our name to theirs
    layouts: dict[str, str] = field(default_factory=dict)  # by the same, a row of LAYOUTS
    norm_words: dict[str, dict[str, str]] = field(default_factory=dict)  # by type of norm
    separator: str = "/"
    ignored: dict[str, str] = field(default_factory=dict)  # patterns of names that are no weights

    def name_layer(self, layer: Layer, norm: str) -> str:
        """The layer's name there; empty where the program has no such layer."""
        template = self.layers.get((layer.kind, layer.part), "")
        return template.format(
            path=layer.path,
            stage=layer.stage,
            stage1=layer.stage + 1,
            index=layer.index,
            index1=layer.index + 1,
            letter=chr(ord("a") + layer.index),
            number=layer.number,
            step=layer.step,
            channels=layer.channels,
            strided="_ds" if layer.stride > 1 else "",
            **{
                word: text.format(channels=layer.channels)
                for word, text in self.norm_words.get(norm, {}).items()
            },
        )

    def name_tensor(self, layer: Layer, tensor: str, norm: str) -> str:
        """One tensor's name there; empty where the program has none."""
        names = self.tensors.get(f"{layer.part} {layer.kind}") or self.tensors[layer.kind]
        own, path = names.get(tensor, ""), self.name_layer(layer, norm)
        return f"{path}{self.separator}{own}" if own and path else ""

    def find_layout(self, layer: Layer, tensor: str) -> str:
        """The row of LAYOUTS for one tensor."""
        if tensor != "weight" or layer.kind == "norm":
            return "same"
        return self.layouts.get(f"{layer.part} {layer.kind}") or self.layouts.get(
            layer.kind, "same"
        )


LAYOUTS: dict[str, tuple[int, ...] | None] = {  # by which transposition they become ours
    "same": None,
    "HWIO": (3, 2, 0, 1),  # TensorFlow's convolutions, grouped ones too
    "HWC1": (2, 3, 0, 1),  # Keras' depthwise convolutions
    "IO": (1, 0),  # dense layers of TensorFlow and PopART
}


def permute_shape(shape: Shape, layout: str) -> Shape:
    """The shape a tensor has once it is laid out as ours."""
    order = LAYOUTS[layout]
    if order is None or len(order) != len(shape):
        return tuple(shape)
    return tuple(shape[axis] for axis in order)
