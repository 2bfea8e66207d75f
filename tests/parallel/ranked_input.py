"""The files that each of several ranks gives to the decoder in a GPU's place.

As a program, with the variables of a launcher, it is one rank: ranked_input.py DATA OUT
"""

import json
import sys
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import simplejpeg
import torch
from ranked_sessions import TIMEOUT, run_ranks
from torch import Tensor

from phalanx.assemble.build import build_normaliser
from phalanx.assemble.dataset_summary import build_input_spec, build_preprocessing, plan_new_run
from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.rank_context import build_rank_context
from phalanx.config.read import read_settings
from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.loader import Loader
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import read_world

CPU = torch.device("cpu")
FLAGS = {"data": "folder", "model": "resnet8", "image-size": "32", "epochs": "4", "workers": "0"}


def decode_on_ranks(data: Path, ranks: int, folder: Path) -> list[list[str]]:
    """What read_files found on each rank."""
    # the three steps of the first epoch over, GPUs shall decode
    (folder / "decoder.json").write_text('{"3": 1.0}')
    run_ranks([__file__, data, folder], ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def read_files(data: str, folder: Path, ranks: Ranks) -> list[str]:
    """Train on nothing for four epochs: digests of the files that the decoder got."""
    size = {"replicas": str(ranks.size), "batch-size": "4"}
    settings, plan, _ = plan_new_run(read_settings(None, {**FLAGS, **size, "data-dir": data}))
    found: list[str] = []

    def decode(files: list[Tensor]) -> list[Tensor]:
        found.extend(sha256(file.numpy().tobytes()).hexdigest() for file in files)
        images = [simplejpeg.decode_jpeg(file.numpy()) for file in files]
        return [torch.from_numpy(image).permute(2, 0, 1) for image in images]

    spec = replace(build_input_spec(settings.config, plan), gpu_percent=100, checked_since=0)
    loader = Loader(
        spec,
        workers=0,
        max_bad=plan.max_bad,
        backend=lambda reader, rows: GpuDecoder(reader, CPU, open_rows=rows, decode=decode),
    )
    normaliser = build_normaliser(build_preprocessing(settings.config, plan), CPU)
    context = build_rank_context(plan, ranks)
    feed = LoadedFeed(loader, plan, normaliser, context, folder=folder)
    with loader, closing(feed):
        assert len(list(feed.batches_from(0))) == plan.total_steps
    return found


def main() -> None:
    """Read as one rank."""
    world = read_world()
    assert world is not None
    store = open_store(world, timeout=TIMEOUT)
    ranks = Ranks(world, store, CPU, timeout=TIMEOUT)
    folder = Path(sys.argv[2])
    found = read_files(sys.argv[1], folder, ranks)
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main()
