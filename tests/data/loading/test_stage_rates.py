"""What a person is told when data is the limit."""

from phalanx.data.loading.stage_rates import StageRate, describe_bottleneck

STAGES = [
    StageRate("read", 9000.0, ""),
    StageRate("decode", 430.0, ""),
    StageRate("augment", 2000.0, ""),
]


def test_the_gpu_is_named_where_decoding_is_the_limit_and_it_could_help():
    told = describe_bottleneck(430, 3000, model="resnet50", stages=STAGES, gpu_could_decode=True)
    assert "mostly decode; more --workers, --gpu-decode true (in a new run), or `phalanx" in told
    told = describe_bottleneck(430, 3000, model="resnet50", stages=STAGES)
    assert "mostly decode; more --workers, or `phalanx data build" in told
    told = describe_bottleneck(
        430, 3000, model="resnet50", stages=[STAGES[2]], gpu_could_decode=True
    )
    assert told.endswith("mostly augment; more --workers, or fewer augmentations")
    told = describe_bottleneck(4000, 3000, model="resnet50", stages=STAGES, gpu_could_decode=True)
    assert "--gpu-decode" not in told


def test_how_much_faster_data_is_has_as_many_digits_as_it_is_worth():
    told = [describe_bottleneck(n, 20, model="m", stages=STAGES) for n in (30, 24_680)]
    assert told[0].endswith("data is 1.5 times as fast")
    assert told[1].endswith("data is 1,234 times as fast")
