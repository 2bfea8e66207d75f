"""The files that each of several ranks gives to the decoder in a GPU's place, and what it knows.

As a program, with the variables of a launcher, it is one rank: ranked_input.py DATA OUT STAGES
"""

import json
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from ranked_sessions import TIMEOUT, run_ranks

from checked_feed import CPU, open_checked_feed
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import read_world


def decode_on_ranks(
    data: Path, ranks: int, folder: Path, *, stages: int = 1
) -> list[dict[str, Any]]:
    """What read_files found on each rank."""
    run_ranks([__file__, data, folder, stages], ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def read_files(data: Path, ranks: Ranks, stages: int) -> dict[str, Any]:
    """Train on nothing for four epochs: digests of the decoder's files, and the check."""
    seen: list[bytes] = []
    # after the first epoch, GPUs shall decode
    waited_long = ImageCheck(since=0, is_decided=True, waited=1.0)
    opened = open_checked_feed(data, seen, check=waited_long, ranks=ranks, stages=stages)
    with opened as feed:
        assert len(list(feed.batches_from(0))) == 12
        check = feed.image_check(12)
    assert check is not None
    return {"seen": [sha256(file).hexdigest() for file in seen], "check": asdict(check)}


def main() -> None:
    """Read as one rank."""
    world = read_world()
    assert world is not None
    store = open_store(world, timeout=TIMEOUT)
    ranks = Ranks(world, store, CPU, timeout=TIMEOUT)
    found = read_files(Path(sys.argv[1]), ranks, int(sys.argv[3]))
    (Path(sys.argv[2]) / f"{world.rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main()
