"""The benchmarks that come with Phalanx: all of the guide's and of the older runner's are there."""

import pytest

from phalanx.benchmarks.file import builtin_spec, read_specs
from phalanx.benchmarks.schema import Selection, build_variants
from phalanx.cli.bench_spec import check_command

GUIDE = """
resnet50-train-pod4
resnet50-train-pod16
resnext101-train-pod4
resnext101-train-pod16
efficientnet-b4-standard-train-pod4 expandratio=4,6 groupdim=16,1
efficientnet-b4-standard-train-pod16 expandratio=4,6 groupdim=16,1
efficientnet-b4-modified-train-pod4
efficientnet-b4-modified-train-pod16
resnet50-infer-synthetic batchsize=1,4,16,32,64,90
resnext101-infer-synthetic batchsize=1,2,4,8,16
efficientnet-b0-infer-synthetic batchsize=1,8,16,32
resnet50-infer-generated-pod4 batchsize=1,4,16,32,64,80
resnext101-infer-generated-pod4 batchsize=1,2,4,8,16
efficientnet-b0-infer-generated-pod4 batchsize=1,8,16,32
"""
# without the requests that wait and those that do not: there is no server here
RUNNER = """
tf2_resnet50_train_real_pod4
tf2_resnet50_train_real_pod16
tf2_resnet50_train_real_pod16_conv
tf2_resnet50_serving_throughput batchsize=1,32
tf2_resnet50_serving_latency
pytorch_resnet50_train_real_pod4
pytorch_resnet50_train_real_pod16
pytorch_resnet50_train_real_pod16_conv
pytorch_resnet50_train_real_1host_pod64_conv
pytorch_resnet50_train_real_pod64_conv
pytorch_efficientnet_b0_train_real_pod16
pytorch_efficientnet_b4_g16_train_real_pod16
pytorch_resnet50_infer_gen_pod4 batchsize=1,64
pytorch_resnet50_minlatency_infer_gen_pod4 batchsize=1,4
pytorch_efficientnet_b0_infer_gen_pod4 batchsize=1,48
pytorch_efficientnet_b0_minlatency_infer_gen_pod4 batchsize=1,4
pytorch_efficientnet_b0_gn_infer_gen_pod4 batchsize=1,100
pytorch_efficientnet_b4_infer_gen_pod4 batchsize=1,12
pytorch_efficientnet_b4_minlatency_infer_gen_pod4 batchsize=1,4
pytorch_efficientnet_b4_gn_infer_gen_pod4 batchsize=1,21
pytorch_resnet50_tritonserver_infer_real_pod4 parallel_processes=1,8
pytorch_efficientnet_b0_tritonserver_infer_real_pod4 parallel_processes=1,8
pytorch_efficientnet_b4_tritonserver_infer_real_pod4 parallel_processes=1,8
lightning_pytorch_resnet50_train_real_pod16
tf1_resnet50_train_synth_1ipu
tf1_resnet50_train_real_pod4
tf1_resnet50_train_real_pod16_conv
tf1_resnet50_train_real_pod64_conv
tf1_resnet50_train_real_pod256_conv
tf1_resnext101_train_real_pod4
tf1_resnet50_serving_infer_real_1ipu batchsize=1,8,16
tf1_resnext101_train_real_pod16
tf1_efficientnet_b4_train_real_pod16
tf1_efficientnet_b4_g16_train_real_pod16
tf1_efficientnet_b4_g16_train_real_pod64_conv
tf1_efficientnet_b4_g16_train_real_pod256_conv
tf1_efficientnet_b4_g16_validation_real_pod16_conv
G16_EfficientNet_B4_pipelined_validation_convergence
tf1_resnet50_infer_synth_1ipu batchsize=1,4,16,32,64,90
tf1_resnet50_infer_gen_pod4 batchsize=1,4,16,32,64,80 replicas=1,4
tf1_resnet50_low_latency_infer_gen_pod4 batchsize=1,2,4,8,16,32,64
tf1_resnext101_infer_gen_1ipu batchsize=1,16
tf1_resnext101_long_infer_synth_1ipu batchsize=1,2,4,8,16
tf1_resnext101_long_infer_gen_pod4 batchsize=1,2,4,8,16 replicas=1,4
tf1_resnext101_low_latency_infer_gen_pod4 batchsize=1,2,4,8,16
tf1_efficientnet_b0_infer_synth_1ipu batchsize=1,36
tf1_efficientnet_b0_long_infer_synth_1ipu batchsize=1,8,16,32
tf1_efficientnet_b0_g16_infer_synth_1ipu batchsize=1,8,16,32,64,88
tf1_efficientnet_b0_long_infer_gen_pod4 batchsize=1,8,16,32 replicas=1,4
tf1_efficientnet_b0_infer_gen_pod4 batchsize=1,8,16,32,64,88 replicas=1,4
tf1_efficientnet_b0_g16_low_latency_infer_gen_pod4 batchsize=1,2,4,8,16,32,64,88
tf1_efficientnet_b0_low_latency_infer_gen_pod4 batchsize=1,2,4,8,16,32,40,42
tf1_efficientnet_b4_infer_synth_1ipu batchsize=1,2,4,5
tf1_efficientnet_b4_g16_infer_synth_1ipu batchsize=1,2,8,16,20 replicas=1,4
tf1_efficientnet_b4_infer_gen_pod4 batchsize=1,2,4,5 replicas=1,4
tf1_efficientnet_b4_low_latency_infer_gen_pod4 batchsize=1,2,4,5
tf1_efficientnet_b4_g16_low_latency_infer_gen_pod4 batchsize=1,2,4,8,16,20
tf1_efficientnet_b7_infer_gen_pod4 batchsize=1,2
tf1_efficientnet_b4_batchnorm_train_real_pod16
tf1_efficientnet_b4_batchnorm_train_real_pod64_conv
tf1_efficientnet_b4_batchnorm_infer_real_pod16
"""
OURS = ("resnet50-train-synthetic", "resnet50-train-generated")
TABLES = ("efficientnet-b4-standard-train-pod4", "efficientnet-b4-standard-train-pod16")


def read_table(text):
    """The names of benchmarks with the values that each parameter takes."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith(" ")]
    return {
        name: {key: values.split(",") for key, _, values in (word.partition("=") for word in words)}
        for name, *words in rows
    }


@pytest.fixture(scope="module")
def own():
    """Our benchmarks by name."""
    return read_specs([builtin_spec()])


def test_every_benchmark_of_the_guide_and_the_runner_is_there_with_its_sweep(own):
    expected = read_table(GUIDE) | read_table(RUNNER)
    assert len(read_table(RUNNER)) == 61
    assert set(own) == set(expected) | set(OURS)
    for name, sweep in expected.items():
        rows = [dict(row) for row in own[name].rows]
        found = {key: list(dict.fromkeys(row[key] for row in rows)) for key in rows[0]}
        assert found == sweep, name
        combined = 1
        for values in sweep.values():
            combined *= len(values)
        assert len(rows) == (2 if name in TABLES else combined), name


def test_group_dim_1_is_measured_as_the_line_passes_it_and_as_the_title_says(own):
    for name in TABLES:
        lines = [
            v.command for v in build_variants(own[name], Selection(), known=lambda _: frozenset())
        ]
        flags = ("--efficientnet-group-dim {} --efficientnet-expand-ratio {}",) * 2
        assert all(
            flag.format(*pair) in line
            for flag, pair, line in zip(flags, ((16, 4), (1, 6)), lines, strict=True)
        )


def test_every_command_can_be_planned_here(own):
    found = [
        build_variants(benchmark, Selection(), known=lambda _: frozenset())
        for benchmark in own.values()
    ]
    assert sum(map(len, found)) > 200
    variants = [variant for some in found for variant in (some[0], some[-1])]
    wrong = {v.name: check_command(v.words) for v in variants}
    assert {name: problem for name, problem in wrong.items() if problem} == {}


def test_every_benchmark_says_what_it_measures(own):
    assert [name for name, benchmark in own.items() if not benchmark.description] == []
