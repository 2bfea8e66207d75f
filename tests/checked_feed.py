"""Input whose images the cores check before a decoder in a GPU's place gets any."""

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.assemble.build import build_normaliser
from phalanx.assemble.dataset_summary import build_input_spec, build_preprocessing, plan_new_run
from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.rank_context import build_rank_context
from phalanx.config.read import read_settings
from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.data.loading.loader import Loader
from phalanx.parallel.ranks import Ranks
from small_jpegs import stand_in

CPU = torch.device("cpu")
FLAGS = {"data": "folder", "model": "resnet8", "image-size": "32", "epochs": "4", "workers": "0"}


@contextmanager
def open_checked_feed(
    data: Path,
    seen: list[bytes],
    *,
    check: ImageCheck,
    percent: int = 100,
    ranks: Ranks | None,
    stages: int = 1,
) -> Generator[LoadedFeed, None, None]:
    """The input of four epochs in batches of 8 images; `seen` gets the files of the decoder."""
    replicas = ranks.size // stages if ranks else 1
    layout = {"replicas": str(replicas), "batch-size": str(8 // replicas), "shards": str(stages)}
    flags = FLAGS | layout | {"data-dir": str(data)}
    settings, plan, _ = plan_new_run(read_settings(None, flags))

    def decode(files: list[Tensor]) -> list[Tensor]:
        seen.extend(file.numpy().tobytes() for file in files)
        images: list[Tensor] = stand_in(files)
        return images

    spec = build_input_spec(settings.config, plan)
    if percent:
        spec = replace(spec, gpu_percent=percent, checked_since=check.since)
    loader = Loader(
        spec,
        workers=0,
        max_bad=plan.max_bad,
        backend=lambda reader, rows: GpuDecoder(reader, CPU, open_rows=rows, decode=decode),
    )
    normaliser = build_normaliser(build_preprocessing(settings.config, plan), CPU)
    context = build_rank_context(plan, ranks)
    with loader, closing(LoadedFeed(loader, plan, normaliser, context, check=check)) as feed:
        yield feed
