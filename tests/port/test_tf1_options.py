"""Every option of TensorFlow 1's two READMEs, once each: its effect, or why it has none."""

import pytest
from small_ports import check_effect, port

PIPELINE = "--gradient-accumulation-count 4 --pipeline"
BASE = "python train.py --model resnet --model-size 50 --dataset imagenet"
EFFICIENT = "python train.py --model efficientnet --dataset imagenet"
VALIDATE = "python3 validation.py --model resnet --model-size 50 --dataset imagenet"
RUN = "poprun --num-replicas 4 {} python train.py --model resnet --dataset imagenet"
HOSTS = RUN.format("--host a,b {}")

EFFECTS = {  # old option: a command, and options of the resolved config that it decides
    "BN-span": (f"{BASE} --batch-norm --replicas 4 --BN-span 2", {"bn-span": 2}),
    "base-learning-rate": (f"{BASE} --base-learning-rate -11", {"base-learning-rate": -11.0}),
    "batch-norm": (f"{BASE} --batch-norm", {"norm-type": "batch", "batchnorm-momentum": 0.03}),
    "batch-size": (f"{BASE} --batch-size 16", {"batch-size": 16}),
    "batches-per-step": (f"{BASE} --batches-per-step 7", {"device-iterations": 7}),
    "ckpts-per-epoch": (f"{BASE} --ckpts-per-epoch 2", {"ckpts-per-epoch": "2"}),
    "config": ("python train.py --config mk2_resnet50_bn_16ipus", {"gradient-accumulation": 256}),
    "cutmix-lambda": (f"{BASE} --cutmix-lambda 0.85", {"cutmix-lambda": 0.85}),
    "data-dir": ("python train.py --model resnet --data-dir a/cifar-10", {"data": "cifar10"}),
    "dataset": ("python train.py --model resnet --dataset cifar-100", {"data": "cifar100"}),
    "eight-bit-io": (f"{BASE} --eight-bit-io", {"normalization-location": "device"}),
    "enable-half-partials": (f"{BASE} --enable-half-partials", {"half-partials": True}),
    "enable-recomputation": (f"{BASE} --enable-recomputation", {"enable-recompute": True}),
    "enable-recompute": (f"{BASE} --enable-recompute", {"enable-recompute": True}),
    "epoch": (f"{BASE} --epoch 7", {"epochs": 7.0}),
    "epochs": (f"{BASE} --epochs 65", {"epochs": 65.0}),
    "expand-ratio": (f"{EFFICIENT} --expand-ratio 4", {"efficientnet-expand-ratio": 4}),
    "fp-exceptions": (f"{BASE} --fp-exceptions", {"fp-exceptions": True}),
    "gc-profile": (f"{BASE} --gc-profile", {"profile": "trace"}),
    "generated-data": (f"{BASE} --generated-data", {"data": "generated", "image-size": 224}),
    "gradient-accumulation-count": (
        f"{BASE} --gradient-accumulation-count 8",
        {"gradient-accumulation": 8},
    ),
    "group-dim": (f"{EFFICIENT} --group-dim 16", {"efficientnet-group-dim": 16}),
    "group-norm": (
        "python train.py --model resnet --dataset cifar-10 --group-norm",
        {"norm-type": "group", "norm-num-groups": 16},
    ),
    "groups": (f"{BASE} --groups 8", {"norm-num-groups": 8}),
    "image-size": (f"{BASE} --image-size 128", {"image-size": 128}),
    "iterations": (f"{BASE} --iterations 900", {"steps": 900, "warmup-epoch": "0ep"}),
    "label-smoothing": (
        f"{BASE} --label-smoothing 0.1",
        {"label-smoothing": 0.1, "smoothing-over": "others"},
    ),
    "learning-rate-decay": (f"{BASE} --learning-rate-decay 0.2", {"lr-decay": "0.2"}),
    "learning-rate-schedule": (f"{BASE} --learning-rate-schedule 0.5", {"lr-drop-after": "0.5"}),
    "loss-scaling": (f"{BASE} --loss-scaling 64", {"loss-scaling": 64.0}),
    "lr-schedule": (f"{BASE} --lr-schedule cosine", {"lr-schedule": "cosine"}),
    "max-cross-replica-buffer-size": (
        f"{BASE} --max-cross-replica-buffer-size 52428800",
        {"bucket-mib": 50.0},
    ),
    "mixup-alpha": (f"{BASE} --mixup-alpha 0.2", {"mixup-alpha": 0.2}),
    "model": ("python train.py --model resnext --dataset imagenet", {"model": "resnext14_32x4d"}),
    "model-size": (f"{EFFICIENT} --model-size 4", {"model": "efficientnet_b4"}),
    "momentum": (f"{BASE} --optimiser momentum --momentum 0.8", {"momentum": 0.8}),
    "no-hostside-norm": (f"{BASE} --no-hostside-norm", {"normalization-location": "device"}),
    "no-stochastic-rounding": (
        f"{BASE} --no-stochastic-rounding",
        {"enable-stochastic-rounding": False},
    ),
    "no-validation": (f"{BASE} --no-validation", {"validation": False}),
    "normalise-input": (f"{BASE} --normalise-input", {"normalization": "mean-std"}),
    "optimiser": (
        f"{EFFICIENT} --optimiser RMSProp",
        {"optimizer": "rmsprop_tf", "optimizer-eps": 0.001, "rmsprop-decay": 1 - 2**-12},
    ),
    "pipeline": (f"{BASE} {PIPELINE} --shards 2 --pipeline-splits b3/0/relu", {"pipeline": True}),
    "pipeline-schedule": (
        f"{BASE} {PIPELINE} --shards 2 --pipeline-splits b2/0 --pipeline-schedule Interleaved",
        {"pipeline-schedule": "Interleaved"},
    ),
    "pipeline-split": (f"{BASE} {PIPELINE} --pipeline-split b2/0", {"pipeline-splits": "b2/0"}),
    "pipeline-splits": (
        f"{BASE} {PIPELINE} --pipeline-splits b2/0 b3/0",
        {"pipeline-splits": "b2/0,b3/0"},
    ),
    "precision": (
        f"{BASE} --precision 16.32",
        {"precision": "16.32", "enable-stochastic-rounding": False},
    ),
    "replicas": (f"{BASE} --replicas 16", {"replicas": 16}),
    "seed": (f"{BASE} --seed 5", {"seed": 5}),
    "select-ipus": (
        f"{BASE} --select-ipus 0 1",
        {"device": "cuda:0", "validation-device": "cuda:1"},
    ),
    "sharding-exclude-filter": (
        f"{BASE} --shards 2 --sharding-exclude-filter layer1 layer2",
        {"sharding-exclude-filter": "layer1,layer2"},
    ),
    "sharding-include-filter": (
        f"{BASE} --shards 2 --sharding-include-filter layer3",
        {"sharding-include-filter": "layer3"},
    ),
    "shards": (f"{BASE} --shards 2", {"shards": 2}),
    "synthetic-data": (f"{BASE} --synthetic-data", {"data": "synthetic", "iterations": 320_291}),
    "valid-batch-size": (f"{BASE} --valid-batch-size 25", {"valid-batch-size": 25}),
    "wandb": (f"{BASE} --wandb", {"wandb": True, "wandb-project": "tf-cnn"}),
    "warmup-epochs": (f"{BASE} --warmup-epochs 0", {"warmup-epoch": "0st"}),
    "weight-avg-exp": (
        f"{BASE} --weight-avg-exp 0.97",
        {"weight-avg-strategy": "exponential", "weight-avg-exp-decay": 0.97, "weight-avg-n": -1},
    ),
    "weight-decay": (f"{BASE} --weight-decay 3e-5", {"l2-regularization": 3e-5}),
    "xla-recompute": (f"{BASE} --xla-recompute", {"enable-recompute": True}),
    "num-replicas": (RUN.format(""), {"replicas": 4}),
    "vipu-server-timeout": (RUN.format("--vipu-server-timeout=300"), {"rank-timeout": 300.0}),
}
WORDS = {  # old option: a command, and words of the new one
    "available-memory-proportion": (
        f"{BASE} --available-memory-proportion 0.15",
        "CUDNN_CONV_WSCAP_DBG=135 CUBLASLT_WORKSPACE_SIZE=138240",
    ),
    "distributed": (
        """export TF_CONFIG='{"cluster":{"worker":["a:36","b:36"]},"task":{"index":0}}'\n"""
        f"{BASE} --replicas 4 --distributed",
        "phalanx launch --host a,b --master-port 36 --num-replicas 8",
    ),
    "help": (
        "python train.py --model efficientnet --help",
        "phalanx train --model efficientnet_b0",
    ),
    "repeat": (f"{VALIDATE} --generated-data --repeat 10", "--repeat 10"),
    "restore-path": (f"{VALIDATE} --restore-path logs/R", "phalanx validate logs/R --all"),
    "host": (RUN.format("--host a,b"), "--host a,b"),
    "ipus-per-replica": (HOSTS.format("--ipus-per-replica 2"), "--devices-per-replica 2"),
    "mca": (HOSTS.format("--mpi-global-args='--mca btl_tcp_if_include eth0'"), "--interface eth0"),
    "mpi-global-args": (HOSTS.format("--mpi-global-args=--tag-output"), "--tag-output"),
    "mpi-local-args": (HOSTS.format("--mpi-local-args='-x FOO -x A=1'"), "-x FOO -x A=1"),
    "tag-output": (f"mpirun --tag-output -H a,b {BASE}", "--tag-output"),
    "H": (f"mpirun -H a,b -np 2 {BASE}", "--host a,b"),
    "x": (f"mpirun -H a,b -np 2 -x PATH {BASE}", "-x PATH"),
}
REASONS = {  # old option: a command, and why there is nothing to set
    "disable-variable-offloading": (f"{BASE} --disable-variable-offloading", "--offload-optimizer"),
    "enable-conv-dithering": (f"{BASE} --enable-conv-dithering", "the IPU's compiler"),
    "internal-exchange-optimisation-target": (
        f"{BASE} --internal-exchange-optimisation-target balanced",
        "the IPU's compiler",
    ),
    "no-dataset-cache": (f"{BASE} --no-dataset-cache", "only with --dataset-cache"),
    "pipeline-num-parallel": (f"{BASE} --pipeline-num-parallel 32", "--workers"),
    "stable-norm": (f"{BASE} --stable-norm", "stable way by default"),
    "standard-imagenet": (f"{BASE} --standard-imagenet", "order of images is computed"),
    "allow-run-as-root": (
        RUN.format("--mpi-global-args=--allow-run-as-root"),
        "only mpirun knows it",
    ),
    "num-ilds": (RUN.format("--num-ilds=2"), "no partition"),
    "num-instances": (RUN.format("--num-instances 4"), "every device has a process"),
    "numa-aware": (RUN.format("--numa-aware 1"), "operating system places processes"),
    "reset-partition": (RUN.format("--reset-partition=no"), "no partition"),
    "update-partition": (RUN.format("--update-partition=no"), "no partition"),
    "vipu-cluster": (RUN.format("--vipu-cluster=c"), "no partition"),
    "vipu-partition": (RUN.format("--vipu-partition=p64"), "no partition"),
    "vipu-server-host": (RUN.format("--vipu-server-host=10.1.3.101"), "no partition"),
    "v": (RUN.format("-v"), "nothing more to print"),
    "bind-to": (f"mpirun -bind-to none {BASE}", "operating system places processes"),
    "map-by": (f"mpirun -map-by slot {BASE}", "operating system places processes"),
    "d": (f"gc-profile -d DIR -- {BASE} --gc-profile", "folder of the run"),
}
PLAIN: dict[str, object] = {}  # what a command without the option comes to
COUNT = 94  # options that the two READMEs name, those of launchers included


def test_all_of_them_are_here():
    names = [*EFFECTS, *WORDS, *REASONS]
    assert len(names) == len(set(names)) == COUNT


@pytest.mark.parametrize("name", EFFECTS)
def test_an_option_has_its_effect(name, capsys):
    text, expected = EFFECTS[name]
    answer = port(capsys, text)
    check_effect(answer, expected)
    if not PLAIN:
        PLAIN.update(port(capsys, BASE)["resolved"])
    assert any(PLAIN[key] != value for key, value in expected.items())


@pytest.mark.parametrize("name", WORDS)
def test_an_option_is_in_the_new_command(name, capsys):
    text, expected = WORDS[name]
    assert expected in port(capsys, text)["line"]


@pytest.mark.parametrize("name", REASONS)
def test_an_option_without_an_effect_says_why(name, capsys):
    text, reason = REASONS[name]
    rows = port(capsys, text)["options"]
    assert any(reason in row["why"] and name in row["old"] for row in rows)


@pytest.mark.parametrize(("size", "is_zero"), [("18", False), ("50", True)])
def test_a_row_gives_the_reason_for_either_value(size, is_zero, capsys):
    answer = port(capsys, f"python train.py --dataset imagenet --model-size {size} --batch-norm")
    assert answer["resolved"]["zero-init-residual"] is is_zero
    why = "only the last norms of ImageNet's bottlenecks began at zero"
    rows = [row for row in answer["options"] if "--zero-init-residual" in row["new"]]
    assert [row["why"] for row in rows] == [why] * (not is_zero)


def test_scoring_has_no_use_for_what_is_compiled(capsys):
    variable = "-x TF_POPLAR_FLAGS=--executable_cache_path=/cache"
    old = f"poprun --mpi-local-args='{variable}' --num-replicas 4 python {{}}"
    scores = port(capsys, old.format("train.py --dataset imagenet --restore-path R"))
    trains = port(capsys, old.format("train.py --dataset imagenet --no-validation"))
    whys = [
        next(row["why"] for row in answer["options"] if "executable_cache" in row["old"])
        for answer in (scores, trains)
    ]
    assert whys == [
        "the new command has no use for --model-cache-path",
        "what is compiled is kept there from run to run",
    ]
    assert "--model-cache-path" in trains["command"]
