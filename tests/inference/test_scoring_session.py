"""A session scores by the folded model where there is one, always with the weights of now."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.engine.evaluate import ValidBatch
from phalanx.inference import folded_model
from phalanx.inference.cpu_layers import has_onednn
from phalanx.inference.folded_model import fold_model

pytestmark = pytest.mark.skipif(not has_onednn(), reason="needs oneDNN")


@pytest.fixture
def opened(monkeypatch):
    """Opens a session, and lists the models that it folds."""
    made = []

    def fold(model, half):
        made.append(fold_model(model, half))
        return made[-1]

    def open_session(**options):
        flags = {"data": "synthetic", "model": "resnet8", "image-size": "16", "steps": "2"}
        flags |= {"batch-size": "4", "device": "cpu", "precision": "32.32", **options}
        settings = read_settings(None, flags)
        plan, dataset = plan_run(settings)
        return Session(settings.config, plan, classes=dataset.classes)

    monkeypatch.setattr(folded_model, "fold_model", fold)
    return open_session, made


def batch():
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return ValidBatch(images, torch.arange(4), torch.arange(4))


def plain_losses(session):
    with torch.no_grad():
        logits = session.model.eval()(batch().images)
    return torch.nn.functional.cross_entropy(logits, torch.arange(4), reduction="none").numpy()


def test_scores_are_of_the_weights_as_they_are(opened):
    open_session, made = opened
    with open_session() as session:
        first = session.evaluate([batch()])
        assert len(made) == 1 and np.allclose(first.losses, plain_losses(session), atol=1e-5)
        with torch.no_grad():
            for parameter in session.model.parameters():
                parameter.data.mul_(1.1)  # which torch does not count as a change
        second = session.evaluate([batch()])
        assert len(made) == 1 and np.allclose(second.losses, plain_losses(session), atol=1e-5)
        assert not np.allclose(first.losses, second.losses, atol=1e-3)


def test_predictions_are_of_the_weights_as_they_are(opened):
    open_session, made = opened
    pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    with open_session() as session, torch.inference_mode():
        before = session.compute_logits(pixels)
        with torch.inference_mode(mode=False), torch.no_grad():
            session.model.fc.weight.mul_(2)
        wanted = session.model.eval()(session._pixel_normaliser(pixels))
        assert torch.allclose(session.compute_logits(pixels), wanted, atol=1e-5)
        assert not torch.allclose(before, wanted, atol=1e-3) and len(made) == 1


def test_a_model_with_other_modules_or_hooks_is_folded_again(opened):
    open_session, made = opened
    with open_session() as session:
        session.evaluate([batch()])
        session.model.fc = torch.nn.Linear(session.model.fc.in_features, 10)
        second = session.evaluate([batch()])
        assert len(made) == 2 and np.allclose(second.losses, plain_losses(session), atol=1e-5)
        session.model.fc.register_forward_hook(lambda _module, _args, out: 2 * out)
        third = session.evaluate([batch()])
        assert len(made) == 3 and np.allclose(third.losses, plain_losses(session), atol=1e-5)


def test_strict_runs_are_scored_by_their_modules(opened):
    open_session, made = opened
    with open_session(determinism="strict") as session:
        assert session.find_scoring_model() is session.model
        assert session.evaluate([batch()]) is not None and not made


WITHOUT_COMPILER = """
import sys
from phalanx.cli.main import main

assert main(sys.argv[1:]) == 0
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
"""


@pytest.mark.parametrize("model", ["resnet8", "efficientnet_b0"])
def test_scoring_does_not_wait_for_torchs_compiler_to_be_imported(model):
    flags = {"data": "generated", "image-size": "32", "valid-batch-size": "50"}
    words = [f"--{name}={value}" for name, value in {**flags, "device": "cpu"}.items()]
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER, "validate", model, *words], check=True)
