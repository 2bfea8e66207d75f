"""PopART's names: the initializers of resnet_main.py's ckpt.onnx."""

from phalanx.port_weights.naming import Naming

POPART_NAMINGS = (
    Naming(
        title="initializers of PopART's ResNet and ResNeXt",
        program="popart",
        family="ResNet",
        layers={
            ("conv", "stem"): "initial_block/conv",
            ("norm", "stem"): "initial_block/{norm}",
            ("conv", "block"): "b{stage}/{index}/{step}/conv",
            ("norm", "block"): "b{stage}/{index}/{step}/{norm}",
            ("conv", "projection"): "b{stage}/{index}/shortcut/residual/conv",
            ("norm", "projection"): "b{stage}/{index}/shortcut/residual/{norm}",
            ("dense", "head"): "classifier/fc",
        },
        tensors={
            "conv": {"weight": "weights", "bias": "bias"},
            "norm": {
                "weight": "scale",
                "bias": "biases",
                "running_mean": "mean",
                "running_var": "var",
            },
            "dense": {"weight": "weights", "bias": "biases"},
        },
        layouts={"dense": "IO"},
        norm_words={"batch": {"norm": "batch_norm"}, "group": {"norm": "group_norm/{channels}"}},
        ignored={
            r"(^|/)[A-Z]\w*?___": "optimizer state",  # PopART's own names begin so
            r"^classifier/reduce_mean/": "a constant of the graph",
        },
    ),
)
