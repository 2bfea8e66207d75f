"""The named configurations of TensorFlow 1's configs.yml, as the options they stand for.

Folders of data are left out: they were those of another machine.
"""

_RESNET50 = (
    "--model resnet --model-size 50 --dataset imagenet --stable-norm "
    "--internal-exchange-optimisation-target balanced --enable-half-partials --normalise-input "
    "--enable-recomputation --ckpts-per-epoch 1 --logs-per-epoch 1 --eight-bit-io "
    "--weight-decay 0.0001 --loss-scaling 128"
)
_GROUP_NORM = (
    f"{_RESNET50} --epochs 65 --batch-size 8 --optimiser momentum --momentum 0.9 "
    "--lr-schedule cosine --label-smoothing 0.1"
)
_BATCH_NORM = (
    f"{_RESNET50} --epochs 100 --batch-size 16 --optimiser momentum --momentum 0.9 "
    "--pipeline-num-parallel 32 --pipeline-schedule Grouped --shards 4 "
    "--pipeline-splits b1/2/relu b2/3/relu b3/3/relu --pipeline --batch-norm "
    "--available-memory-proportion 0.15 --disable-variable-offloading --precision 16.32 "
    "--lr-schedule cosine --base-learning-rate -13 --label-smoothing 0.1"
)
_MLPERF = (
    "--model resnet --model-size 50 --pipeline --shards 1 --enable-recomputation "
    "--optimiser momentum --momentum 0.9 --normalise-input --pipeline-schedule Sequential "
    "--epochs-per-ckpt 4 --batch-norm --dataset imagenet "
    "--internal-exchange-optimisation-target balanced --enable-half-partials --eight-bit-io "
    "--lr-schedule polynomial_decay_lr --warmup-epochs 5 --abs-end-learning-rate 0.0001 "
    "--label-smoothing 0.1 --weight-decay 2.5e-05 --BN-decay 0.9 --BN-span 2 "
    "--disable-variable-offloading --mlperf-logging --standard-imagenet "
    "--max-cross-replica-buffer-size 52428800 --logs-per-epoch 5 --fused-preprocessing"
)
_MLPERF_BS20 = (
    f"{_MLPERF} --batch-size 20 --gather-conv-output "
    "--pipeline-splits b1/0/relu b1/2/relu b2/0/relu b2/2/relu b3/0/relu b3/3/relu"
)
_LATER = (  # of SDK 3.0, whose names of units and of two entries are others
    "--gather-conv-output --available-memory-proportion 0.15 --pipeline-splits stage1/unit1/relu "
    "stage1/unit3/relu stage2/unit1/relu stage2/unit3/relu stage3/unit1/relu stage3/unit4/relu "
    "--internal-exchange-optimisation-target memory"
)
_B4 = (
    "--model efficientnet --model-size 4 --dataset imagenet --precision 16.32 --groups 4 "
    "--enable-recomputation --enable-conv-dithering "
    "--internal-exchange-optimisation-target balanced --pipeline-schedule Grouped "
    "--weight-avg-exp 0.97 --enable-half-partials --cutmix-lambda 0.85 --cutmix-version 1 "
    "--mixup-alpha 0.2 --disable-variable-offloading --shards 4 --pipeline"
)
_B4_RMSPROP = (
    f"{_B4} --optimiser RMSprop --lr-schedule exponential --available-memory-proportion 0.15"
)
_B4_G1 = (
    f"{_B4_RMSPROP} --group-dim 1 --expand-ratio 6 --batch-size 3 "
    "--pipeline-splits block2b block4b block6c"
)
_G16 = "--group-dim 16 --expand-ratio 4 --batch-size 5 --pipeline-splits block2c block4c block6a"

CONFIGS = {
    "mk2_resnet8_test": (
        "--model resnet --model-size 8 --dataset cifar-10 --ckpts-per-epoch 0 --logs-per-epoch 1 "
        "--enable-half-partials --gradient-accumulation-count 1 --replicas 1 --epochs 10 "
        "--no-validation"
    ),
    "mk2_resnet50_mlperf_pod16": (
        f"{_MLPERF} --replicas 16 --batch-size 16 --gradient-accumulation-count 9 --epochs 44 "
        "--pipeline-splits b1/0/relu b1/2/relu b2/3/relu --available-memory-proportion 0.2 "
        "--abs-learning-rate 4.588"
    ),
    "mk2_resnet50_mlperf_pod16_bs20": (
        f"{_MLPERF_BS20} --replicas 16 --gradient-accumulation-count 6 --epochs 44 "
        "--available-memory-proportion 0.15 --abs-learning-rate 3.824"
    ),
    "mk2_resnet50_mlperf_pod4_bs20": (
        f"{_MLPERF_BS20} --replicas 4 --gradient-accumulation-count 24 --epochs 44 "
        "--available-memory-proportion 0.145 --abs-learning-rate 3.824"
    ),
    "mk2_resnet50_mlperf_pod64_bs20": (
        f"{_MLPERF_BS20} --replicas 64 --gradient-accumulation-count 2 --epochs 45 "
        "--available-memory-proportion 0.14 --abs-learning-rate 5.098 --ckpt-epochs-offset 1 "
        "--batches-per-step 100000"
    ),
    "mk2_resnet50_base": f"{_RESNET50} --epochs 100",
    "mk2_resnet50_gn_16ipus": f"{_GROUP_NORM} --gradient-accumulation-count 8 --replicas 16",
    "mk2_resnet50_gn_64ipus": f"{_GROUP_NORM} --gradient-accumulation-count 2 --replicas 64",
    "mk2_resnet50_bn_16ipus": f"{_BATCH_NORM} --gradient-accumulation-count 256 --replicas 4",
    "mk2_resnet50_bn_64ipus": f"{_BATCH_NORM} --gradient-accumulation-count 64 --replicas 16",
    "mk2_resnet50_bn_128ipus": f"{_BATCH_NORM} --gradient-accumulation-count 32 --replicas 32",
    "mk2_resnext101_16ipus": (
        "--model resnext --model-size 101 --dataset imagenet --shards 2 --replicas 8 "
        "--batch-size 6 --gradient-accumulation-count 16 --epochs 120 --enable-recomputation "
        "--pipeline-splits b3/3/relu --pipeline-schedule Grouped --pipeline --optimiser momentum "
        "--momentum 0.9 --ckpts-per-epoch 1 --internal-exchange-optimisation-target balanced "
        "--disable-variable-offloading --normalise-input --stable-norm --base-learning-rate -11 "
        "--enable-half-partials --lr-schedule cosine --label-smoothing 0.1 --eight-bit-io"
    ),
    "mk2_efficientnet_b4_16ipus_base": f"{_B4_RMSPROP} --replicas 4",
    "mk2_efficientnet_b4_g1_16ipus": f"{_B4_G1} --replicas 4 --gradient-accumulation-count 64",
    "mk2_efficientnet_b4_g1_64ipus": f"{_B4_G1} --replicas 16 --gradient-accumulation-count 16",
    "mk2_efficientnet_b4_g16_16ipus": (
        f"{_B4_RMSPROP} {_G16} --replicas 4 --gradient-accumulation-count 40"
    ),
    "mk2_efficientnet_b4_g16_64ipus": (
        f"{_B4_RMSPROP} {_G16} --replicas 16 --gradient-accumulation-count 8"
    ),
    "mk2_efficientnet_b4_g16_64ipus_LARS": (
        f"{_B4} {_G16} --optimiser LARS --lr-schedule polynomial_decay_lr "
        "--available-memory-proportion 0.2 --replicas 16 --gradient-accumulation-count 38 "
        "--base-learning-rate -9.5 --warmup-epochs 50"
    ),
    "resnet8_test": (
        "--model resnet --model-size 8 --dataset cifar-10 --ckpts-per-epoch 1 --logs-per-epoch 1 "
        "--enable-half-partials --gradient-accumulation-count 1 --replicas 1 --epochs 10 "
        "--no-validation"
    ),
    "resnet50_mlperf_pod16_bs20": (
        f"{_MLPERF} {_LATER} --batch-size 20 --replicas 16 --gradient-accumulation-count 6 "
        "--epochs 40 --abs-learning-rate 3.824"
    ),
    "resnet50_mlperf_pod16_lars": (
        f"{_MLPERF} {_LATER} --batch-size 22 --replicas 16 --gradient-accumulation-count 10 "
        "--epochs 38 --abs-learning-rate 10.72 --optimiser LARS --warmup-epochs 2 "
        "--weight-decay 5e-05 --lars-weight-decay 5e-05 --loss-scaling 128 "
        "--max-reduce-many-buffer-size 216"
    ),
    "mk1_resnet50_16ipus": (
        "--model resnet --model-size 50 --dataset imagenet --batch-size 4 --replicas 4 "
        "--gradient-accumulation-count 64 --epochs 65 --shards 4 "
        "--pipeline-splits b1/2/relu b2/3/relu b3/5/relu --pipeline --pipeline-schedule Grouped "
        "--enable-recomputation --optimiser momentum --momentum 0.9 "
        "--available-memory-proportion 0.6 0.6 0.6 0.6 0.6 0.6 0.16 0.2 "
        "--max-cross-replica-buffer-size 100000000 "
        "--internal-exchange-optimisation-target balanced --normalise-input --stable-norm "
        "--enable-half-partials --lr-schedule cosine --label-smoothing 0.1 --ckpts-per-epoch 1"
    ),
}
SHARED_NAMES = (
    "resnet8_test",
    "resnet50_mlperf_pod16_bs20",
    "resnet50_mlperf_pod16_lars",
)  # with TF 2
PRESETS = {name: f"tf1/{name}" if name in SHARED_NAMES else name for name in CONFIGS}
