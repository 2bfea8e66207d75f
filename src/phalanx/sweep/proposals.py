"""Decisions by optuna: which values a trial gets, and whether it is pruned."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError, DivergedError
from phalanx.sweep.schema import (
    Dimension,
    Range,
    SweepFile,
    Values,
    WholeRange,
    count_points,
    iterate_points,
)
from phalanx.sweep.state import Trial

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_DRAWS = 50  # attempts to draw a new point; a repeated one would give the same score
_REDUCTION = 3  # of the trials that reach a rung, one in this many continues


def refuse_missing_optuna() -> None:
    """Raise unless optuna, an extra, is installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigError("phalanx sweep needs optuna: pip install 'phalanx[sweep]'") from None


def propose_values(sweep: SweepFile, trials: Sequence[Trial]) -> Values:
    """The values of the next trial, a pure function of the file and the trials before it."""
    tried = [trial.values for trial in trials]
    if sweep.method != "grid":
        for draw in range(_DRAWS):
            values = _draw_values(sweep, trials, draw=draw)
            if values not in tried:
                return values
        if count_points(sweep.search) is None:
            return values
    return next(values for values in iterate_points(sweep.search) if values not in tried)


def _draw_values(sweep: SweepFile, trials: Sequence[Trial], *, draw: int) -> Values:
    """What the sampler draws for the next trial."""
    # a separate seed for every draw, so that a resumed sweep does not repeat its first ones
    numbers = (sweep.seed, len(trials), draw)
    seed = int.from_bytes(sha256(repr(numbers).encode()).digest()[:4])
    study = _build_study(sweep, trials, seed=seed)
    drawn = study.ask(_build_distributions(sweep)).params
    return {
        name: dimension.round_value(drawn[name]) if isinstance(dimension, Range) else drawn[name]
        for name, dimension in sweep.search.items()
    }


def _build_study(sweep: SweepFile, trials: Iterable[Trial], *, seed: int) -> "optuna.Study":
    """An in-memory study with the results of these trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
    if sweep.method == "tpe":
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=sweep.startup)
    study = optuna.create_study(
        direction="maximize" if sweep.wants_highest else "minimize",
        sampler=sampler,
        pruner=_build_pruner(sweep),
    )
    distributions = _build_distributions(sweep)
    for trial in trials:
        study.add_trial(_convert_trial(trial, distributions))
    return study


def _build_pruner(sweep: SweepFile) -> "optuna.pruners.BasePruner":
    """The pruner, which stops trials early."""
    from optuna import pruners

    return {
        "none": pruners.NopPruner,
        "median": lambda: pruners.MedianPruner(
            n_startup_trials=sweep.startup, n_warmup_steps=sweep.grace
        ),
        "halving": lambda: pruners.SuccessiveHalvingPruner(
            min_resource=sweep.grace, reduction_factor=_REDUCTION
        ),
    }[sweep.prune]()


def _build_distributions(sweep: SweepFile) -> dict[str, "BaseDistribution"]:
    """The search space as optuna's distributions."""
    return {name: _build_distribution(dimension) for name, dimension in sweep.search.items()}


def _build_distribution(dimension: Dimension) -> "BaseDistribution":
    """A range or a list as optuna's distribution."""
    from optuna import distributions as kinds

    if not isinstance(dimension, Range):
        return kinds.CategoricalDistribution(dimension.values)
    log, step = dimension.log, dimension.step
    if isinstance(dimension, WholeRange):
        return kinds.IntDistribution(dimension.low, dimension.last, log=log, step=int(step or 1))
    return kinds.FloatDistribution(dimension.low, dimension.last, log=log, step=step)


def _convert_trial(
    trial: Trial, distributions: dict[str, "BaseDistribution"]
) -> "optuna.trial.FrozenTrial":
    """A finished trial as optuna's FrozenTrial."""
    from optuna.trial import TrialState, create_trial

    diverged = trial.state == "failed" and trial.exit_code == DivergedError.exit_code
    # diverging is a result: optuna ignores failed trials, and would try there again
    state = "pruned" if diverged else trial.state
    states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
    scores = {} if diverged else {n: p.score for n, p in enumerate(trial.points, start=1)}
    return create_trial(
        state=states[state],
        value=trial.score if state == "done" else None,
        params=dict(trial.values),
        distributions=distributions,
        intermediate_values=scores,
        system_attrs=dict(trial.rungs or {}),
    )


class TrialPruner:
    """Decides after each validation of a trial whether to prune it."""

    def __init__(self, sweep: SweepFile, earlier: Iterable[Trial], *, values: Values):
        study = _build_study(sweep, earlier, seed=0)
        study.enqueue_trial(values)
        self._study, self._trial = study, study.ask(_build_distributions(sweep))
        self._reported = 0

    def should_prune(self, score: float) -> bool:
        """Whether to stop after this score."""
        self._reported += 1
        self._trial.report(score, self._reported)
        return self._trial.should_prune()

    @property
    def rungs(self) -> dict[str, float]:
        """What the pruner must know about this trial to judge later ones."""
        attributes = self._study.trials[-1].system_attrs
        return {
            key: value for key, value in attributes.items() if key.startswith("completed_rung_")
        }
