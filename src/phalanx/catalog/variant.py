"""What every entry of the model tables says, whatever its family."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

NORM_LAYOUT_KEY = "norm-layout"  # in the metadata of a file of weights; see Norm.layout


@dataclass(frozen=True, kw_only=True)
class Norm:
    """How activations are normalised."""

    type: str = "batch"  # "batch", "group" or "none"
    groups: int = 32  # of group norm
    momentum: float = 0.1  # of batch norm's running statistics, as torch counts it
    eps: float = 1e-5
    full_precision: bool = False  # computed in 32 bits, whatever comes in
    stable: bool = True  # batch norm: variance around the mean, not from a sum of squares
    interleaved: bool = False  # group norm: group g takes channels g, g+G, g+2G...

    @property
    def layout(self) -> str:
        """Which channels share a group: weights of one layout mean nothing in the other."""
        return "interleaved" if self.type == "group" and self.interleaved else "contiguous"


@dataclass(frozen=True, kw_only=True)
class Variant(ABC):
    """One model: complete, so that a network can be built from it alone."""

    family: ClassVar[str]
    image_size: int  # what the published figures were measured at
    head: str = "fc"  # path of the classifier
    classes: int = 1000  # of the data it was published for
    norm: Norm = Norm()
    padding: str = "symmetric"  # or "same", as TensorFlow pads: more below and to the right
    drop_path: float = 0.0  # rate of skipping whole blocks: grows evenly towards this at the end
    dropout: float = 0.0  # rate before the classifier

    @property
    @abstractmethod
    def units(self) -> tuple[str, ...]:
        """The smallest parts the model is cut into, in the order of the data."""

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
    build: str  # "module:function"; called with the number of classes, gives the network

    @property
    def units(self) -> tuple[str, ...]:
        """Only the network itself can tell; as far as the table knows it is one piece."""
        return ("model",)

    @property
    def halvings(self) -> int:
        """Unknown: no image is refused for its size."""
        return 0

    def norm_channels(self) -> dict[str, int]:
        """Unknown: the network brings its own norms."""
        return {}
