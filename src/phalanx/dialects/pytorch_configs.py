"""The named configurations of the PyTorch program's configs.yml, as the options they stand for.

They are those of SDK 2.1, the age of the README, then those of 2.0, 2.4 and 3.4 that it had no
longer or not yet. Where a name says recompute, it does.
"""

_RESNET50 = (
    "--model resnet50 --data imagenet --precision 16.16 --enable-stochastic-rounding "
    "--label-smoothing 0.1 --weight-decay 0.0001 --lr-schedule cosine --loss-scaling 128 "
    "--lr-scheduler-freq 16"
)
_GROUP_NORM = f"{_RESNET50} --lr 0.5 --momentum 0.85 --warmup-epoch 5 --norm-type group"
_COMBINED = "--optimizer sgd_combined --epoch 100 --half-partial --seed 42"
_SIXTEEN = (
    f"{_RESNET50} --lr 0.3125 --momentum 0.85 --warmup-epoch 16 --norm-type group --epoch 100 "
    "--loss-scaling 512 --initial-loss-scaling 64 --half-partial --seed 42 --replicas 16"
)
_STAGES = "--pipeline-splits layer1/2 layer2/3 layer3/4"
_KEPT = (
    "layer3/5/conv1 layer3/5/conv2 layer3/5/conv3 layer3/4/conv1 layer3/4/conv2 layer3/4/conv3 "
    "layer4/0/conv1 layer4/0/conv2 layer4/0/conv3 layer3/5/bn1 layer3/5/bn2 layer3/5/bn3 "
    "layer3/2/conv1 layer3/2/conv2 layer3/2/conv3 layer3/3/conv1 layer3/3/conv2 layer3/3/conv3 "
    "layer3/1/conv1 layer3/1/conv2 layer3/1/conv3 layer4/1/conv2 layer4/1/conv3 layer4/2/conv1 "
    "layer4/2/conv2 layer4/2/conv3 layer4/1/bn1 layer4/1/bn2 layer4/1/bn3 layer3/0/bn1 "
    "layer3/0/bn3 layer3/1/bn2 layer3/1/bn3 layer3/0/bn2 layer3/2/bn1 layer3/3/bn1 layer3/2/bn2 "
    "layer3/2/bn3 layer1/0/bn3 layer1/1/bn1 layer1/1/bn2 layer1/2/bn3 layer2/1/bn1 layer2/2/bn1 "
    "layer3/1/bn1 layer4/0/bn1 layer4/0/bn3 layer4/2/bn1 layer4/2/bn2 layer4/2/bn3"
)
_DEVICE_INPUT = "--eight-bit-io --normalization-location ipu"
_PIPELINED = (
    f"{_RESNET50} {_COMBINED} --precision 16.32 --lr 2 --momentum 0.9 --warmup-epoch 5 "
    f"--norm-type batch {_STAGES} --batch-size 16 {_DEVICE_INPUT} --use-bbox-info "
    f"--recompute-checkpoints {_KEPT}"
)
_B0 = (
    "--model efficientnet-b0 --data imagenet --epoch 350 --warmup-epoch 5 --precision 16.32 "
    "--label-smoothing 0.1 --enable-stochastic-rounding --optimizer rmsprop --lr 0.1 "
    "--lr-schedule exponential --lr-decay 0.98 --lr-scheduler-freq 0.416 --momentum 0.9 "
    "--weight-decay 1e-05 --loss-scaling 128 --norm-type group --norm-num-groups 4"
)
_GROUP_16 = (
    "--data imagenet --seed 0 --half-partial --efficientnet-group-dim 16 "
    "--efficientnet-expand-ratio 4 --norm-type group --norm-num-groups 4 --epoch 350 "
    f"--warmup-epoch 5 {_DEVICE_INPUT} --optimizer rmsprop_tf --optimizer-eps 0.001 "
    "--momentum 0.9 --rmsprop-decay 0.953125 --lr-schedule exponential --lr-scheduler-freq 0.424 "
    "--lr-decay 0.97 --loss-scaling 128 --weight-decay 1e-05 --label-smoothing 0.1 "
    "--weight-avg-strategy exponential --weight-avg-exp-decay 0.97"
)
_BATCH_NORM = (
    f"{_RESNET50} {_COMBINED} --lr 2 --momentum 0.9 --warmup-epoch 5 --batch-size 18 "
    f"--norm-type batch --disable-stable-batchnorm {_DEVICE_INPUT} --use-bbox-info"
)
_POD = f"{_GROUP_16} --precision 16.16 --use-bbox-info --norm-eps 0.001 --enable-fast-groupnorm"
_MIXED = (
    f"{_POD} --model efficientnet-b4 --enable-stochastic-rounding --batch-size 4 "
    "--device-iterations 4 --mixup-alpha 0.2 --cutmix-lambda-low 0.65 --cutmix-lambda-high 1 "
    "--cutmix-disable-prob 0.35"
)
_B4_G16 = f"{_MIXED} --pipeline-splits blocks/3/0/bn2 --lr 0.1"

CONFIGS = {
    "resnet50": f"{_GROUP_NORM} {_COMBINED}",
    "resnet50-16ipu-mk1": (
        f"{_GROUP_NORM} --epoch 80 --batch-size 4 --gradient-accumulation 64 --replicas 4 {_STAGES}"
    ),
    "resnet50-16ipu-mk2": f"{_SIXTEEN} --batch-size 6 --gradient-accumulation 11",
    "resnet50-16ipu-mk2-recompute": (
        f"{_SIXTEEN} --optimizer sgd_combined --batch-size 8 --gradient-accumulation 8 "
        "--enable-fast-groupnorm --enable-recompute --recompute-checkpoints conv norm"
    ),
    "resnet50_mk2_pipelined": f"{_PIPELINED} --gradient-accumulation 256 --replicas 4",
    "resnet50_mk2_pipelined_pod64": f"{_PIPELINED} --gradient-accumulation 64 --replicas 16",
    "efficientnet-b0": _B0,
    "efficientnet-b0-16ipu-mk1": (
        f"{_B0} --pipeline-splits _blocks/1/_project_conv _blocks/4/_project_conv _blocks/11/_bn1 "
        "--available-memory-proportion 0.1 --batch-size 2 --gradient-accumulation 128 --replicas 4"
    ),
    "efficientnet-b0-16ipu-mk2": (
        f"{_B0} --pipeline-splits _blocks/1/_project_conv _blocks/4 _blocks/8/_project_conv "
        "--batch-size 16 --gradient-accumulation 128 --replicas 4"
    ),
    "efficientnet-b0-g16-gn-16ipu-mk2": (
        f"{_GROUP_16} --model efficientnet-b0 --precision 16.32 --lr 0.0483 --replicas 8 "
        "--pipeline-splits _blocks/4 --batch-size 12 --gradient-accumulation 8"
    ),
    "resnet50_mk2": f"{_BATCH_NORM} --gradient-accumulation 57 --replicas 16",
    "resnet50_mk2_pod64": f"{_BATCH_NORM} --gradient-accumulation 14 --replicas 64",
    "resnet50-pod4": f"{_BATCH_NORM} --gradient-accumulation 228 --replicas 4",
    "resnet50-pod64": f"{_BATCH_NORM} --gradient-accumulation 14 --replicas 64",
    "efficientnet-b0-g16-gn-pod16": (
        f"{_POD} --model efficientnet-b0 --pipeline-splits blocks/3/0/conv_pw --lr 0.05 "
        "--batch-size 20 --replicas 8 --gradient-accumulation 5 --mixup-alpha 0.1"
    ),
    "efficientnet-b4-g16-gn-pod16": f"{_B4_G16} --replicas 8 --gradient-accumulation 64",
    "efficientnet-b4-g16-gn-pod64": f"{_B4_G16} --replicas 32 --gradient-accumulation 16",
    "efficientnet-b4-g1-gn-pod16": (
        f"{_MIXED} --efficientnet-group-dim 1 --efficientnet-expand-ratio 6 --lr 0.0483 "
        "--pipeline-splits blocks/1/1/conv_pw blocks/3/0/conv_pw blocks/4/5/conv_pw "
        "--replicas 4 --gradient-accumulation 48"
    ),
}
PRESETS = {  # ours, by those names that are a model's too, or were given up
    "resnet50": "pl/resnet50",
    "efficientnet-b0": "pl/efficientnet-b0",
    "resnet50_mk2": "pl-resnet50-bn",
    "resnet50_mk2_pod64": "pl-resnet50-bn",
    "resnet50-pod4": "pl-resnet50-bn",
    "resnet50-pod64": "pl-resnet50-bn",
    "efficientnet-b0-g16-gn-pod16": "pl-efficientnet-b0-800",
    "efficientnet-b4-g16-gn-pod16": "pl-efficientnet-b4-g16",
    "efficientnet-b4-g16-gn-pod64": "pl-efficientnet-b4-g16",
    "efficientnet-b4-g1-gn-pod16": "pl-efficientnet-b4-g1",
}
