"""Values found in output, some left out, the rest reduced: as the older runner did it."""

import json

import pytest

from phalanx.benchmarks.command_line import count_mpi_processes, get_program, is_measurement
from phalanx.benchmarks.metrics import MetricMissing, extract_metrics, read_facts
from phalanx.benchmarks.schema import MetricRule

OUTPUT = "".join(f"throughput: {rate} samples/sec\n" for rate in ("5", "1,000", "30", "20"))
LATENCY = "latency avg: 9 ms\nlatency avg: 2 ms\nlatency avg: 4 ms\n"
RATES = "throughput: *(.*?) samples/sec"


def extract(rule, output=OUTPUT, facts=None, processes=1):
    return extract_metrics([rule], output, facts, processes=processes)[rule.name]


@pytest.mark.parametrize(
    ("skip", "reduction", "expected"),
    [
        (0, "mean", 263.75),
        (1, "mean", 350),  # the worst are left out, not the first
        (2, "mean", 515),
        (2, "final", 20),
        (0, "min", 5),
        (0, "value", 5),
    ],
)
def test_values_are_skipped_and_reduced(skip, reduction, expected):
    rule = MetricRule("throughput", regexp=RATES, skip=skip, reduction_type=reduction)
    assert extract(rule) == expected


def test_the_worst_latencies_are_the_longest():
    rule = MetricRule("latency", regexp="latency avg: *(.*?) ms", skip=1)
    assert extract(rule, LATENCY) == 3


@pytest.mark.parametrize(
    ("rule", "output", "told"),
    [
        (MetricRule("t", regexp="t: (.*)"), "", "t: the output has no value of it"),
        (
            MetricRule("t", regexp="t: (.*)", skip=2),
            "t: 1\nt: 2",
            "t: found 2 values, and skip: 2 ",
        ),
        (MetricRule("t", regexp="t: (.*)", skip=1), "t: 1", "t: found 1 value, and skip: 1 leaves"),
        (MetricRule("t", regexp="t: (.*)"), "t: 1\nt: nan", "t: a value is not finite"),
        (MetricRule("t", regexp="t: (.*)"), "t: many", "could not convert string to float: 'many'"),
        (MetricRule("t", key="n"), "", "t: the command printed no JSON object"),
    ],
)
def test_a_metric_that_is_not_there_says_why(rule, output, told):
    with pytest.raises(MetricMissing, match="t: ") as caught:
        extract(rule, output)
    assert told in str(caught.value)


def test_values_of_an_object_are_found_by_their_place():
    facts = {"rates": [10, 30, 20], "latency_ms": {"p50": 1.5, "p99": None}}
    assert extract(MetricRule("throughput", key="rates", skip=1), "", facts) == 25
    assert extract(MetricRule("latency", key="latency_ms.p50"), "", facts) == 1.5
    with pytest.raises(MetricMissing, match="p99: the output has no value of it"):
        extract(MetricRule("p99", key="latency_ms.p99"), "", facts)
    own = {"images_per_second": 7.0, **facts}
    assert extract_metrics([], "", own, processes=1) == {"throughput": 7.0, "latency_p50": 1.5}


def test_objects_are_read_out_of_what_is_printed_around_them():
    text = f"note: {{\n{json.dumps({'a': 1})}"
    assert read_facts(text) == []  # not ours
    assert read_facts(f"hello\n{json.dumps({'a': 1})}\n{json.dumps({'b': {}}, indent=1)}\n") == [
        {"a": 1},
        {"b": {}},
    ]


def test_mpirun_multiplies_the_throughput_of_one_process():
    rule = MetricRule("throughput", regexp=RATES, reduction_type="final")
    words = ["mpirun", "--tag", "-np", "4", "python", "x.py"]
    assert extract(rule, processes=count_mpi_processes(words)) == 80


def test_mpirun_does_not_multiply_what_one_process_prints_for_all():
    facts = {"images_per_second": 100.0}
    assert extract_metrics([], "", facts, processes=4)["throughput"] == 100
    assert extract(MetricRule("throughput", key="images_per_second"), "", facts, 4) == 100


@pytest.mark.parametrize(
    ("line", "count", "program"),
    [
        ("mpirun -np 4 python x.py -n 20", 4, "python x.py -n 20"),
        ("mpirun --hostfile h python3 train.py -n 20", 1, "python3 train.py -n 20"),
        ("mpirun --mca btl tcp -x A=1 --allow-run-as-root -n 2 phalanx train", 2, "phalanx train"),
        ("/opt/bin/mpiexec --np=3 a", 3, "a"),
        ("mpirun -np", 1, ""),
        ("mpirun x", 1, "x"),
        ("python x.py -np 4", 1, "python x.py -np 4"),
        ("phalanx launch --num-replicas 2 -- bench train demo", 1, "phalanx bench train demo"),
        ("phalanx launch --num-replicas 2", 1, "phalanx launch --num-replicas 2"),
    ],
)
def test_options_of_a_launcher_end_where_the_program_begins(line, count, program):
    words = line.split()
    assert (count_mpi_processes(words), " ".join(get_program(words))) == (count, program)
    assert is_measurement(words) == (program == "phalanx bench train demo")
