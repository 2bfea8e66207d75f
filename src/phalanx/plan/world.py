"""The world of ranks that a launcher made: what torchrun, or our own supervisor, tells us."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import NetworkError


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of a run."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    local_size: int
    address: str  # where the ranks meet
    port: int
    restart: int = 0  # how often all ranks were started again
    joins_store: bool = False  # the launcher keeps the store that they meet at
    supervised: bool = False  # the launcher is our own, which says what became of other ranks


_RESTART = "PHALANX_RESTART"  # what our own supervisor sets, among others


def read_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """The world this process was started in; None where it is on its own."""
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None

    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default)
        if text is None or not text.isdecimal():
            raise NetworkError(
                f"{name}: expected a whole number in the environment, got {text!r}; a launcher "
                "such as torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
        return int(text)

    rank, size = number("RANK"), number("WORLD_SIZE")
    if rank >= size:
        raise NetworkError(f"RANK {rank}: ranks of WORLD_SIZE {size} are numbered from 0")
    return World(
        rank=rank,
        size=size,
        local_rank=number("LOCAL_RANK", str(rank)),
        local_size=number("LOCAL_WORLD_SIZE", str(size)),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=number("MASTER_PORT"),
        restart=number(_RESTART, environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        supervised=_RESTART in environment,
        joins_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
