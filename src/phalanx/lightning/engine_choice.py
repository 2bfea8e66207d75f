"""The loop that trains a run, by the name of its engine."""

from phalanx.config.schema import Config
from phalanx.engine.train import Fit, fit


def choose_fit(config: Config) -> Fit:
    """The loop of --engine; Lightning is imported only if it is chosen."""
    if config.machine.engine == "native":
        return fit
    from phalanx.lightning.trainer_loop import fit_with_trainer

    return fit_with_trainer
