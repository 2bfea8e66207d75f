"""What a plan says of graphs and kernels."""

import pytest

from phalanx.assemble.dataset_summary import plan_run
from phalanx.config.read import read_settings


def accelerate(**options: str):
    given = {"data": "synthetic", "steps": "10", "device": "cuda"}
    settings = read_settings(None, given | {k.replace("_", "-"): v for k, v in options.items()})
    plan, _ = plan_run(settings)
    return plan.acceleration, plan.warnings


def test_a_gpu_has_both_unless_told_otherwise():
    assert accelerate()[0][:3] == (True, True, False)
    assert accelerate()[0].describe() == "kernels of our own, replayed as CUDA graphs"
    assert accelerate(graph="false", kernels="torch")[0][:3] == (False, False, False)
    assert accelerate(precision="32.32")[0][:3] == (True, False, False)
    assert accelerate(compile="true")[0][:3] == (True, False, True)


def test_a_cpu_has_neither_and_an_option_for_it_is_called_useless():
    found, warnings = accelerate(device="cpu", graph="true")
    assert found[:3] == (False, False, False)
    assert "--graph has no effect on cpu: only CUDA devices have graphs" in warnings


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fp_exceptions": "true"}, "graph: off, because --fp-exceptions looks at every module"),
        ({"enable_recompute": "true"}, "kernels: torch's own, because activations are recomputed"),
        (
            {"replicas": "4", "devices": "2", "bn_span": "4"},
            "kernels: torch's own, because norms of several ranks share their statistics",
        ),
        (
            {"pipeline_splits": "layer2/0", "pipeline": "true", "devices": "2"}
            | {"gradient_accumulation": "4"},
            "kernels: torch's own, because the model is cut into stages",
        ),
    ],
)
def test_what_is_impossible_is_said_with_its_reason(options, reason):
    found, warnings = accelerate(**options)
    assert any(note.startswith(reason) for note in warnings)
    assert not (found.graph and found.own_kernels)
    silent = accelerate(**options, graph="false", kernels="torch")[1]
    assert not any(note.startswith(("graph", "kernels")) for note in silent)
