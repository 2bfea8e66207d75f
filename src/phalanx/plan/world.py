"""The world of ranks that a launcher made: what torchrun, or our own supervisor, tells us."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import NetworkError

_MOST_DIGITS, _HIGHEST_PORT = 9, 65_535


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
        if text is None or not text.isdecimal() or len(text) > _MOST_DIGITS:
            got = "expected a whole number in the environment, got " + repr(text)
            raise NetworkError(
                f"{name}: {'is not set in the environment' if text is None else got}; a launcher "
                "such as torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; to run "
                "alone, unset RANK"
            )
        return int(text)

    rank, size = number("RANK"), number("WORLD_SIZE")
    local = number("LOCAL_RANK", str(rank)), number("LOCAL_WORLD_SIZE", str(size))
    for one, all_of, prefix in ((rank, size, ""), (*local, "LOCAL_")):
        if all_of < 1:
            raise NetworkError(f"{prefix}WORLD_SIZE {all_of}: expected at least one rank")
        if one >= all_of:
            raise NetworkError(
                f"{prefix}RANK {one}: ranks of {prefix}WORLD_SIZE {all_of} are numbered from 0 to "
                f"{all_of - 1}"
            )
    port = number("MASTER_PORT")
    if not 0 < port <= _HIGHEST_PORT:
        raise NetworkError(f"MASTER_PORT {port}: expected a number from 1 to {_HIGHEST_PORT}")
    return World(
        rank=rank,
        size=size,
        local_rank=local[0],
        local_size=local[1],
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=port,
        restart=number(_RESTART, environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        supervised=_RESTART in environment,
        joins_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
