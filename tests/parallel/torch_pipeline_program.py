"""A rank that runs a stage as Phalanx does and as torch.distributed.pipelining does.

torch_pipeline_program.py FLAGS.json OUT: writes how far the gradients of its stage are apart, and
the bytes of the buffers that torch's stage keeps for all micro-batches.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ranked_sessions import TIMEOUT, relative_difference
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.engine.step import MicroBatch
from phalanx.parallel.ranks import Ranks, open_store
from phalanx.plan.world import read_world

SCHEDULES = {"Grouped": ScheduleGPipe, "Interleaved": Schedule1F1B}


class ContiguousStage(nn.Module):
    """A stage whose input and output lie in memory as torch's sends want them."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.contiguous(memory_format=torch.channels_last)).contiguous()


def run_in_torch(session: Session, passes: list[MicroBatch]) -> tuple[nn.Module, int]:
    """The stage with the gradients that torch's own pipeline gives it, and its buffers' bytes."""
    context, plan = session.rank_context, session.plan
    rows, size = plan.micro_batch, plan.image_size
    links, part = context.links, copy.deepcopy(session.model).train()
    example = torch.zeros(rows, 3, size, size)
    whole = Session(session.config, plan).model.eval()
    with torch.no_grad():
        between = example
        for unit in list(whole.units)[: list(whole.units).index(plan.pipeline.starts[0])]:
            between = whole.run_unit(unit, between)
    between = between.contiguous().requires_grad_()
    stage = PipelineStage(
        ContiguousStage(part),
        context.stage,
        2,
        torch.device("cpu"),
        input_args=(example,) if links.is_first else (between,),
        output_args=(torch.zeros(rows, plan.num_classes) if links.is_last else between,),
    )

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum") / plan.global_batch

    schedule = SCHEDULES[plan.pipeline.schedule](
        stage, len(passes), loss_fn=loss, scale_grads=False
    )
    if links.is_first:
        schedule.step(torch.cat([one.images for one in passes]).contiguous())
    else:
        schedule.step(target=torch.cat([one.labels for one in passes]))
    infos = [*stage.args_recv_info.values(), *getattr(stage, "grad_recv_info", {}).values()]
    buffers = [
        info.buffer for row in infos for info in row if getattr(info, "buffer", None) is not None
    ]
    return part, sum(buffer.nbytes for buffer in buffers)


def main() -> None:
    world = read_world()
    assert world is not None
    ranks = Ranks(world, open_store(world, timeout=TIMEOUT), torch.device("cpu"), timeout=TIMEOUT)
    settings, plan, _ = plan_new_run(read_settings(None, json.loads(Path(sys.argv[1]).read_text())))
    with (
        Session(settings.config, plan, ranks=ranks) as session,
        Session(settings.config, plan) as all,
    ):
        with_images = next(all.feed.batches_from(0))
        theirs, buffers = run_in_torch(session, with_images)
        session.model.train()
        session._forward_backward(next(session.feed.batches_from(0)), 1.0)
        expected = dict(theirs.named_parameters())
        apart = {
            name: relative_difference(weight.grad, expected[name].grad)
            for name, weight in session.model.named_parameters()
        }
    Path(f"{sys.argv[2]}-{world.rank}").write_text(json.dumps({"apart": apart, "buffers": buffers}))
    ranks.close()


if __name__ == "__main__":
    main()
