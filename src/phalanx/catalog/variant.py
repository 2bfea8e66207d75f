"""What every entry of the model tables has, whatever its family."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

NORM_LAYOUT_KEY = "norm-layout"  # in the metadata of a weights file; see Norm.layout
METADATA_KEY = "phalanx"  # in the metadata of an exported file: a ModelMetadata as JSON


@dataclass(frozen=True, kw_only=True)
class Norm:
    """How activations are normalised."""

    type: str = "batch"  # "batch", "group" or "none"
    groups: int = 32  # of group norm
    momentum: float = 0.1  # of batch norm's running statistics, as torch defines it
    eps: float = 1e-5
    full_precision: bool = False  # computed in 32 bits, whatever the input's dtype
    stable: bool = True  # batch norm: variance around the mean, not from a sum of squares
    interleaved: bool = False  # group norm: group g takes channels g, g+G, g+2G...

    @property
    def layout(self) -> str:
        """Which channels share a group: weights of one layout are meaningless in the other."""
        return "interleaved" if self.type == "group" and self.interleaved else "contiguous"


@dataclass(frozen=True, kw_only=True)
class Variant(ABC):
    """One model: complete, so that a network can be built from it alone."""

    family: ClassVar[str]
    image_size: int  # at which the published figures were measured
    head: str = "fc"  # path of the classifier
    classes: int = 1000  # of the data it was published for
    norm: Norm = Norm()
    padding: str = "symmetric"  # or "same", as TensorFlow pads: more below and to the right
    drop_path: float = 0.0  # rate of skipping whole blocks: grows linearly towards this at the end
    dropout: float = 0.0  # rate before the classifier

    @property
    @abstractmethod
    def units(self) -> tuple[str, ...]:
        """The smallest parts into which the model can be split, in data order."""

    @abstractmethod
    def norm_channels(self) -> dict[str, int]:
        """Every norm layer's path and channels."""

    @property
    @abstractmethod
    def halvings(self) -> int:
        """How many times the image is halved on the way to the head."""

    @property
    def smallest_image(self) -> int:
        """The smallest image in which every stride still has more than one pixel to choose from."""
        return 2 ** max(self.halvings - 1, 0) + 1


@dataclass(frozen=True, kw_only=True)
class OwnVariant(Variant):
    """A network of a user's own, from a plugin."""

    family: ClassVar[str] = "plugin"
    build: str  # "module:function"; called with the number of classes, returns the network

    @property
    def units(self) -> tuple[str, ...]:
        """Only the network itself knows; the table treats it as one unit."""
        return ("model",)

    @property
    def halvings(self) -> int:
        """Unknown: no image is refused for its size."""
        return 0

    def norm_channels(self) -> dict[str, int]:
        """Unknown: the network brings its own norms."""
        return {}
