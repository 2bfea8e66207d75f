"""What a file of weights does not say of its network, because its program always did it so."""

from dataclasses import dataclass, field, replace

_MEAN = "if it was trained without --normalise-input: add --normalization mean"
_PER_IMAGE = (
    "each image was normalised by its own mean and deviation: add --normalization per-image"
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The conventions of one program, for one family of networks."""

    title: str
    padding: str = "symmetric"
    stride_in: str = "3x3"  # of bottlenecks
    eps: dict[str, float] = field(default_factory=dict)  # by type of norm, where it is not 1e-5
    groups: int = 32  # of group norm, unless its user said otherwise
    small_groups: int = 32  # ... for small images
    interleaved: bool = False  # whether group norm takes channels g, g+G, g+2G...
    notes: tuple[str, ...] = ()  # what else makes a difference, for large images
    small_notes: tuple[str, ...] = ()  # ... and for small ones


_TENSORFLOW1 = Program(
    title="TensorFlow 1",
    padding="same",
    eps={"group": 1.53e-5},
    small_groups=16,
    interleaved=True,
    notes=(_MEAN,),
    small_notes=(_PER_IMAGE,),
)
PROGRAMS = {
    "pytorch": Program(title="PyTorch"),
    "efficientnet_pytorch": Program(
        title="PyTorch", padding="same", eps={"batch": 1e-3, "group": 1e-3}, groups=4
    ),
    "tensorflow1": replace(
        _TENSORFLOW1,
        notes=(
            _MEAN,
            "if it is of SDK 2.0 or older, convolutions were padded evenly: no --padding same then",
        ),
    ),
    "tensorflow1_earlier": replace(_TENSORFLOW1, padding="symmetric"),
    "tensorflow1_later": _TENSORFLOW1,
    "tensorflow1_efficientnet": Program(
        title="TensorFlow 1",
        padding="same",
        eps={"batch": 1e-3, "group": 1e-3},
        groups=4,
        small_groups=4,
        interleaved=True,
        notes=(_MEAN,),
        small_notes=(_PER_IMAGE,),
    ),
    "keras": Program(
        title="Keras",
        padding="same",
        eps={"batch": 1.001e-5, "group": 1.001e-5},
        interleaved=True,
        notes=(
            "its stem was padded evenly and its blocks as SAME: with --padding same the network "
            "sees the image shifted by three pixels, and computes the same but at the edges",
        ),
    ),
    "keras_applications": Program(
        title="Keras",
        stride_in="1x1",
        eps={"batch": 1.001e-5},
        notes=(
            "convolutions have biases, as in keras.applications, whose published weights expect "
            "other images than Phalanx feeds them: blue first, 0 to 255 minus the mean",
        ),
    ),
    "keras_small": Program(
        title="Keras",
        padding="same",
        eps={"batch": 1.001e-5, "group": 1.001e-5},
        small_groups=16,
        interleaved=True,
        small_notes=(_PER_IMAGE,),
    ),
    "keras_efficientnet": Program(
        title="Keras", padding="same", eps={"batch": 1e-3, "group": 1e-3}, groups=4, small_groups=4
    ),
    "popart": Program(title="PopART", stride_in="1x1"),
}
