"""What `phalanx plan` predicts of memory, and what a run's report makes of it."""

import json

import pytest
import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.memory import predict_step_memory
from phalanx.assemble.session import Session
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.engine.step import MicroBatch
from phalanx.models.step_memory import LiveBytes
from phalanx.report.summary import read_summary
from small_runs import read_result, run_phalanx, small_run

pytestmark = pytest.mark.usefixtures("empty_folder")

COUNT = 78_042  # weights of a ResNet-8 for ten classes
COUNT_OF_NORMS = 672  # of these, which stay 32 bits wide
MIB = 2**20


@pytest.fixture
def plan(capsys):
    """The JSON of a plan of the demo, with options as keywords."""

    def read(**options):
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        assert main(["plan", "demo", "--device=cpu", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return read


@pytest.fixture
def memory(plan):
    return lambda **options: plan(**options)["memory"]


def test_a_plan_in_words_tells_the_peak_and_its_parts(capsys):
    assert main(["plan", "demo", "--device", "cpu", "--ema-decay", "0.9"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    told = row.split(None, 1)[1]
    assert told.startswith("peak 3") and " MiB: weights 3" in told
    names = ("weights", "their average", "gradients", "optimizer state", "activations")
    places = [told.index(f"{name} ") for name in names]
    assert places == sorted(places) and "host memory" not in told


def test_memory_is_left_out_when_it_is_not_wanted(capsys):
    assert main(["plan", "demo", "--no-memory"]) == 0
    assert "\nmemory" not in capsys.readouterr().out
    assert main(["plan", "demo", "--no-memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] is None


@pytest.mark.parametrize(
    ("options", "weight", "gradient", "state"),
    [
        ({}, 4, 4, 4),
        ({"momentum": 0}, 4, 4, 0),
        ({"optimizer": "adamw"}, 4, 4, 8),
        ({"optimizer": "rmsprop"}, 4, 4, 8),
        ({"precision": "16.32"}, 4, 4, 4),
        ({"precision": "16.16"}, 2, 2, 2),
        ({"precision": "16.16", "optimizer": "lamb"}, 2, 2, 4),
    ],
)
def test_bytes_a_weight_follow_rule_and_precision(memory, options, weight, gradient, state):
    found = memory(**options)
    assert found["gradients"] == gradient * COUNT and found["optimizer"] == state * COUNT
    assert 0 < found["weights"] - weight * COUNT < 5000, "norms have some statistics"
    assert found["averages"] == 0


def test_parts_add_up(memory):
    found = memory(ema_decay=0.9)
    assert found["averages"] == 4 * COUNT
    assert found.pop("peak") == sum(found.values())


def test_16_bits_halve_activations_and_leave_or_halve_weights(memory):
    full, mixed, half = (memory(precision=bits) for bits in ("32.32", "16.32", "16.16"))
    assert mixed["weights"] == full["weights"] > half["weights"]
    for found in (mixed, half):
        assert 0.45 < found["activations"] / full["activations"] < 0.6
    assert half["activations"] == mixed["activations"] - 2 * (COUNT - COUNT_OF_NORMS)


def test_batches_recomputation_and_accumulation_count(memory):
    plain = memory()
    double = memory(batch_size=128)["activations"]
    assert double == pytest.approx(2 * plain["activations"], rel=0.01)
    assert memory(enable_recompute="true")["activations"] < plain["activations"] / 3
    assert memory(gradient_accumulation=2)["peak"] > plain["peak"]


def test_state_in_host_memory_is_not_on_the_device(plan, capsys):
    options = {"device": "cuda", "optimizer": "adamw", "batch_size": 64}
    stays, travels = (
        plan(**options, offload_optimizer=asked)["memory"] for asked in ("false", "true")
    )
    assert (stays["optimizer"], travels["optimizer"]) == (8 * COUNT, 0)
    assert stays["peak"] - travels["peak"] == 8 * COUNT, "activations are gone when it is there"
    assert main(["plan", "demo", "--device=cuda", "--offload-optimizer"]) == 0
    out = capsys.readouterr().out
    assert "optimizer state 0 B" in out and "; optimizer state in host memory\n" in out
    assert "no effect" not in out


def test_on_a_cpu_offloading_has_no_effect_and_says_so(memory, capsys, digits, tmp_path):
    assert memory(offload_optimizer="true") == memory()
    note = "--offload-optimizer has no effect on cpu: its memory is the host's own"
    assert main(["plan", "demo", "--device=cpu", "--offload-optimizer"]) == 0
    assert f"\nnote          {note}\n" in capsys.readouterr().out
    for asked in ("true", "false"):
        assert main(small_run(digits, tmp_path / asked, steps=2, offload_optimizer=asked)) == 0
        assert (f"note: {note}\n" in capsys.readouterr().out) == (asked == "true")
    one, two = (read_summary(tmp_path / asked).weights_sha256 for asked in ("true", "false"))
    assert one == two


MODES = {
    "plain": {},
    "adamw": {"optimizer": "adamw"},
    "lamb, averaged": {"optimizer": "lamb", "ema_decay": 0.9},
    "mixed": {"precision": "16.32"},
    "half": {"precision": "16.16"},
    "half adamw, averaged": {"precision": "16.16", "optimizer": "adamw", "ema_decay": 0.9},
    "accumulated": {"gradient_accumulation": 2},
    "recomputed": {"enable_recompute": "true"},
    "folded": {"replicas": 3, "batch_size": 4},
    "folded, averaged": {"replicas": 3, "batch_size": 4, "ema_decay": 0.9},
    "side by side": {"replicas": 4, "batch_size": 4, "bn_span": 2},
    "in order": {"replicas": 3, "batch_size": 4, "determinism": "strict"},
    "moved": {"batch_size": 2, "optimizer": "lamb", "precision": "16.16"},  # updates set the peak
}


@pytest.mark.parametrize("mode", MODES)
def test_a_real_step_takes_what_is_predicted(mode):
    flags = {name.replace("_", "-"): str(value) for name, value in MODES[mode].items()}
    settings = read_settings("demo", {"device": "cpu", **flags})
    plan, config = plan_run(settings)[0], settings.config
    found, session = predict_step_memory(config, plan), Session(config, plan)
    batch = plan.micro_batch
    for _ in range(2):  # the first one makes the optimizer's state
        with LiveBytes() as live:
            passes = [
                MicroBatch(torch.rand(batch, 3, 28, 28), torch.arange(batch) % 9, first)
                for first in range(plan.accumulation * plan.replicas)
            ]
            session.train_step(passes, 0.1)
    # of other passes; those that run side by side are copied
    waiting = (len(passes) - (plan.layout.turn_size == 1)) * passes[0].images.nbytes
    lasting = found.weights + found.averages + found.optimizer + found.sums + found.statistics
    assert found.peak - lasting == pytest.approx(live.peak - waiting, rel=0.05)


PEEKING = """
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant

MODELS["peeking"] = OwnVariant(image_size=28, classes=10, build="peeking:build", head="1")


def build(num_classes):
    from torch import nn

    class Peek(nn.Flatten):
        def forward(self, x):
            return super().forward(x if float(x.sum()) > 0 else -x)

    return nn.Sequential(Peek(), nn.Linear(28 * 28 * 3, num_classes))
"""


def test_a_network_that_looks_at_values_has_no_prediction(tmp_path):
    (tmp_path / "peeking.py").write_text(PEEKING)
    done = run_phalanx("plan", "--plugin=peeking", "--model=peeking", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nmemory        not known: --plugin: its network cannot be counted: " in done.stdout


def test_a_report_sets_measured_beside_predicted(digits, tmp_path, memory, capsys):
    words = small_run(digits, tmp_path / "run", steps=2, batch_size=96)
    done = run_phalanx(*words)
    assert done.returncode == 0, done.stderr
    found = read_summary(tmp_path / "run").memory
    assert main(["plan", *words[1:], "--json"]) == 0
    assert found.predicted == json.loads(capsys.readouterr().out)["memory"]["peak"]
    # what libraries take for themselves is some dozens of MiB
    assert found.predicted / 2 < found.measured < found.predicted + 500 * MIB
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<p>Memory: a step was predicted to take " in page
    assert "; the process grew by " in page and "a rough measure" in page


def test_a_summary_from_before_still_opens(digits, tmp_path):
    run = tmp_path / "run"
    assert main(small_run(digits, run, steps=1)) == 0
    values = read_result(run)
    assert set(values.pop("memory")) == {"predicted", "measured"}
    (run / "summary.json").write_text(json.dumps(values))
    assert read_summary(run).memory is None
    assert main(["report", str(run)]) == 0
    assert "<p>Memory:" not in (run / "report.html").read_text()
