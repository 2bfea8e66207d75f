"""Scores on real ranks, or of this process alone, with every answer behind them.

As a program, with the variables of a launcher, it is one rank: ranked_scores.py CASES OUT
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from ranked_sessions import TIMEOUT, run_ranks

from phalanx.assemble.score import open_untrained_model
from phalanx.assemble.scoring_target import read_untrained_settings
from phalanx.engine.evaluate import Score
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import read_world

COLUMNS = ("indices", "labels", "ranked", "confidence", "losses")


def score_model(flags: Mapping[str, str], ranks: Ranks | None = None) -> Score:
    """The score of resnet8 with its first weights, on the demo's images."""
    settings = read_untrained_settings("resnet8", flags)
    assert settings is not None
    with open_untrained_model(settings, ranks) as session:
        found = session.evaluate(session.scoring_feed.validation_batches())
        assert found is not None
        return found


def score_on_ranks(cases: Sequence[Mapping[str, str]], ranks: int, folder: Path) -> list[Score]:
    """What rank 0 of so many has in the end, for the flags of each case."""
    listed, out = folder / "cases.json", folder / "scores.npz"
    listed.write_text(json.dumps(cases))
    run_ranks([__file__, listed, out], ranks)
    with np.load(out) as kept:
        return [
            Score(**{name: kept[f"{name} {number}"] for name in COLUMNS}, classes=10)
            for number in range(len(cases))
        ]


def main() -> None:
    """Score all cases as one rank."""
    world = read_world()
    assert world is not None
    store = open_store(world, timeout=TIMEOUT)
    ranks = Ranks(world, store, torch.device("cpu"), timeout=TIMEOUT)
    scores = [score_model(case, ranks) for case in json.loads(Path(sys.argv[1]).read_text())]
    if world.rank == 0:
        kept = {f"{name} {n}": getattr(s, name) for n, s in enumerate(scores) for name in COLUMNS}
        np.savez(sys.argv[2], **kept)
    ranks.close()


if __name__ == "__main__":
    main()
