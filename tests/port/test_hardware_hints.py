"""Hints for older hardware that have a counterpart here: the new command passes it."""

import pytest
from small_ports import port

TF1 = "python3 train.py --model resnet --model-size 50 --dataset imagenet"
TF2 = "python3 train.py --model-name resnet50 --dataset imagenet --num-epochs 2"
PL = "python3 train_lightning.py --data imagenet --model resnet50"
POPART = "python resnet_main.py"
HOSTS = "poprun --host a,b --num-replicas 4"
WORKSPACE = "CUDNN_CONV_WSCAP_DBG=270 CUBLASLT_WORKSPACE_SIZE=276480"

COUNTERPARTS = {  # an old command: a part of the new one
    f"{TF1} --enable-half-partials --no-validation": "tf1-resnet50-gn",  # which has them
    f"{TF2} --half-partials": "--half-partials",
    f"{PL} --half-partial": "pl/resnet50",
    f"{POPART} --half-partials": "--half-partials",
    f"{PL} --normalization-location ipu": "pl/resnet50",
    f"{TF2} --accelerator-side-preprocess False": "--normalization-location host",
    f"{TF1} --available-memory-proportion 0.1 0.3": WORKSPACE,
    f"{TF2} --available-memory-proportion 10 30": WORKSPACE,
    f"{PL} --available-memory-proportion 0.3 0.3": WORKSPACE,
    f"{HOSTS} {TF1} --available-memory-proportion 0.3": "-x CUDNN_CONV_WSCAP_DBG=270",
    f"{TF1} --batches-per-step 7": "--device-iterations 7",
    f"{PL} --device-iterations 16": "--device-iterations 16",
    f"{POPART} --batches-per-step 100": "--device-iterations 100",
    f"{PL} --model-cache-path C": "--model-cache-path C",
    f"{TF1} --executable-cache-path C": "--model-cache-path C",
    f"poprun --executable-cache-path C --num-replicas 2 {TF1}": "--model-cache-path C",
    f"TF_POPLAR_FLAGS=--executable_cache_path=C {TF1}": "--model-cache-path C",
    f"POPART_CACHE_DIR=C {POPART}": "--model-cache-path C",
    f"gc-profile -d D -- {TF1}": "--profile trace",
    f"gc-profile -d D -- {TF1} --gc-profile DEVICE_PROFILE": "--profile summary",
    f"{TF1} --gc-profile": "--profile trace",
    f"{TF1} --gc-profile NO_PROFILE --seed 3": "--seed 3",
    f"{TF1} --gc-profile IPU_PROFILE": "--profile trace",
    f"{TF1} --gc-profile TILE_PROFILE": "--profile full",
    f"{PL} --profile": "--profile trace",
    f"""POPLAR_ENGINE_OPTIONS='{{"autoReport.all": "true"}}' {PL}""": "--profile trace",
    f"{TF1} --select-ipus 2": "--device cuda:2",
    f"{TF1} --select-ipus 2 5": "--device cuda:2 --validation-device cuda:5",
    f"{PL} --offload-optimizer": "--offload-optimizer",
    f"{TF2} --optimizer-state-offloading": "--offload-optimizer",
    f"{TF1} --synthetic-data": "--data synthetic",
    f"{TF2} --synthetic-data ipu": "--data synthetic",
    f"{PL} --data synthetic": "--data synthetic",
    f"DATA_DIR=D {TF1}": "DATA_DIR=D phalanx train",
    f"{TF1} --data-dir $DATASETS_DIR/imagenet": "--data-dir $DATASETS_DIR/imagenet",
    f"{TF1} --max-cross-replica-buffer-size 52428800": "--bucket-mib 50",
    f"{TF2} --max-cross-replica-buffer-size 52428800": "--bucket-mib 50",
    f"{HOSTS} --mpi-global-args='--mca btl_tcp_if_include eth0' {TF1}": "--interface eth0",
    f"mpirun -H a,b --mca oob_tcp_if_include 10.0.0.0/8 {TF1}": "--interface 10.0.0.0/8",
    f"{PL} --checkpoint-input-dir W": "--init-weights W",
}
ELSEWHERE = {  # a hint that is always followed, and how
    f"{TF1} --prefetch-depth 4": "the next batches are copied while the device works",
    f"{TF2} --prefetch-depth 4": "the next batches are copied while the device works",
    f"{TF1} --disable-variable-offloading": "optimizer state stays on the device",
    f"{TF2} --fused-preprocessing": "the device always normalises in one kernel",
}


@pytest.mark.parametrize("text", COUNTERPARTS)
def test_a_hint_is_passed_on(text, capsys):
    answer = port(capsys, text)
    assert answer["problem"] is None
    assert COUNTERPARTS[text] in answer["line"]


@pytest.mark.parametrize("text", ELSEWHERE)
def test_a_hint_that_is_always_followed_says_so(text, capsys):
    row = [row for row in port(capsys, text)["options"] if row["source"] == "command"][-1]
    assert ELSEWHERE[text] in row["why"]


def test_checkpoints_of_another_folder_are_scored_after_training(capsys):
    answer = port(capsys, f"{TF2} --checkpoint-input-dir C")
    assert answer["then"] == ["phalanx validate C --all"]


def test_presets_have_the_hints_that_are_not_repeated(capsys):
    """What the new command leaves out is what its preset has already."""
    resolved = port(capsys, f"{TF1} --enable-half-partials")["resolved"]
    assert resolved["half-partials"] is True
    resolved = port(capsys, f"{PL} --half-partial --normalization-location ipu")["resolved"]
    assert (resolved["half-partials"], resolved["normalization-location"]) == (True, "device")
    assert port(capsys, f"{TF1} --gc-profile NO_PROFILE")["resolved"]["profile"] == "off"


def test_an_option_that_another_overrules_says_so(capsys):
    text = (
        f"{HOSTS} --vipu-server-timeout=300 --mpi-local-args='-x IPUOF_VIPU_API_TIMEOUT=90' {TF1}"
    )
    answer = port(capsys, text)
    row = next(row for row in answer["options"] if "vipu" in row["old"])
    assert "--rank-timeout 90 counts, which is said elsewhere" in row["why"]
