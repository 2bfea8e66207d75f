"""Training sessions on real ranks, or folded in this process, and what they end with.

As a program, with the variables of a launcher, it is one rank: ranked_sessions.py CASES OUT
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.engine.checkpoint import CheckpointSaver, load_checkpoint
from phalanx.optim.named_state import name_optimizer_state
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import read_world

# flags; float64; start: a checkpoint to begin with; stop: the last step; save: a folder to save to
Case = Mapping[str, Any]
TIMEOUT = 60.0


def run_session(case: Case, ranks: Ranks | None = None) -> dict[str, Tensor]:
    """Everything that a few steps leave, by name."""
    settings, plan, _ = plan_new_run(read_settings(None, case["flags"]))
    metrics = []
    with Session(settings.config, plan, ranks=ranks) as session:
        if case.get("float64"):
            session.model.double()
        state = session.state
        if "start" in case:
            load_checkpoint(state, Path(case["start"]))
        for step_passes in session.feed.batches_from(state.step):
            passes = step_passes
            if case.get("float64"):
                passes = [one._replace(images=one.images.double()) for one in passes]
            metrics.append(session.train_step(passes, plan.lr(state.step)))
            if state.step == case.get("stop"):
                break
        state.load_mean_statistics()
        if "save" in case:
            save_session(session, Path(case["save"]))
        left = list_tensors(session)
        if state.scaler is not None:
            left["loss scale"] = torch.tensor(state.scaler.scale)
        left["metrics"] = torch.stack(metrics)
        return {name: tensor.detach().clone() for name, tensor in left.items()}


def list_tensors(session: Session) -> dict[str, Tensor]:
    """The tensors of a state, of all stages, by name."""
    state, links = session.state, session.rank_context.links
    found = {f"weights {name}": t for name, t in state.model.state_dict().items()}
    optimizer = name_optimizer_state(state.model, state.optimizer)
    found |= {f"optimizer {name}": t for name, t in optimizer.items()}
    if state.average is not None:
        found |= {f"average {name}": t for name, t in state.average.tensors().items()}
    if state.replica_statistics is not None:
        found |= {f"replica {name}": t for name, t in state.replica_statistics.tensors().items()}
    parts = [found] if links is None else links.gather(found)
    return {name: tensor for part in parts for name, tensor in part.items()}


def save_session(session: Session, folder: Path) -> None:
    """A checkpoint, which all ranks find there afterwards."""
    context = session.rank_context
    saver = CheckpointSaver(
        folder,
        keep=1,
        run_facts={"norm_layout": "contiguous"},
        writes=context.is_first_rank,
        consensus=context.consensus,
    )
    saver.save(session.state)
    saver.wait()


def run_on_ranks(cases: Sequence[Case], ranks: int, folder: Path) -> list[dict[str, Tensor]]:
    """What rank 0 of so many has in the end, for each case."""
    listed, out = folder / f"cases-{ranks}.json", folder / f"out-{ranks}.pt"
    listed.write_text(json.dumps([dict(case) for case in cases]))
    run_ranks([__file__, listed, out], ranks)
    return torch.load(out, weights_only=True)


def run_ranks(words: Sequence[str | Path], ranks: int) -> None:
    """Run a program as so many ranks to their end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=launcher_variables(rank, ranks, port) | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)


def launcher_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank, as torchrun makes it."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in (own | meeting).items()}}


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The L2 norm of the difference, relative to that of what was expected."""
    apart = torch.linalg.vector_norm((found - expected).double())
    return float(apart / max(float(torch.linalg.vector_norm(expected.double())), 1e-300))


def main() -> None:
    """Run all cases as one rank."""
    world = read_world()
    assert world is not None
    store = open_store(world, timeout=TIMEOUT)
    ranks = Ranks(world, store, torch.device("cpu"), timeout=TIMEOUT)
    results = [run_session(case, ranks) for case in json.loads(Path(sys.argv[1]).read_text())]
    if world.rank == 0:
        torch.save(results, sys.argv[2])
    ranks.close()


if __name__ == "__main__":
    main()
