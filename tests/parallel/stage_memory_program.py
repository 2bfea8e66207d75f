"""A rank that counts the bytes of all tensors alive in a step, for each of several runs.

stage_memory_program.py CASES.json OUT: writes, for each case of flags, what the plan predicts for
this rank's stage and the most that there was.
"""

import json
import sys
from pathlib import Path

import torch
from ranked_sessions import TIMEOUT

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.memory import predict_step_memory
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.models.step_memory import LiveBytes
from phalanx.optim.named_state import name_optimizer_state
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import read_world


def measure(flags: dict[str, str], ranks: Ranks) -> dict[str, int]:
    """The memory of this rank's stage: predicted, and at the highest point of the second step."""
    settings, plan, _ = plan_new_run(read_settings(None, flags))
    with Session(settings.config, plan, ranks=ranks) as session:
        state = session.state
        steps = session.feed.batches_from(0)
        session.train_step(next(steps), plan.lr(0))
        passes = next(steps)
        optimizer = name_optimizer_state(state.model, state.optimizer)
        there = sum(t.nbytes for t in (*state.model.state_dict().values(), *optimizer.values()))
        live = LiveBytes()
        for tensor in (*state.model.parameters(), *state.model.buffers(), *optimizer.values()):
            live.ignore(tensor)
        with live:
            session.train_step(passes, plan.lr(1))
        predicted = predict_step_memory(settings.config, plan, stage=session.rank_context.stage)
        return {"predicted": predicted.peak, "measured": there + live.peak}


def main() -> None:
    """Measure all cases as one rank."""
    world = read_world()
    assert world is not None
    ranks = Ranks(world, open_store(world, timeout=TIMEOUT), torch.device("cpu"), timeout=TIMEOUT)
    found = [measure(flags, ranks) for flags in json.loads(Path(sys.argv[1]).read_text())]
    Path(f"{sys.argv[2]}-{world.rank}").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main()
