"""What being a rank costs: a ResNet-50 step on one GPU, alone and as the only rank.

    python scripts/lab/ranks_of_one.py --out DIR [--rounds 7]

Ways to sum gradients over ranks, each timed in turns with a step that sums nothing:

    alone      no process group
    ddp        DistributedDataParallel with views into its buckets
    hook       the same with a hook that sums and divides by nothing
    after      one all_reduce for each bucket of 25 MiB, once the backward pass is over
    strict     the same by all_gather and a sum in the order of ranks

With one rank nothing travels, so the difference is what launching and copying costs.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 25 * 2**20
STEPS = 12


def make_model() -> nn.Module:
    """The same network every time."""
    torch.manual_seed(0)
    return (
        timm.create_model("resnet50", num_classes=1000).cuda().to(memory_format=torch.channels_last)
    )


def cut_to_buckets(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parameters whose gradients travel together."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed(parameters):  # gradients come in about this order
        if sum(p.numel() * 4 for p in buckets[-1]) > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def in_memory_order(bucket: list[Tensor]) -> list[Tensor]:
    """The gradients as vectors, whatever their layout: views, no copies."""
    return [p.grad.as_strided((p.numel(),), (1,)) for p in bucket]


def sum_after(buckets: list[list[Tensor]]) -> None:
    """Sum over ranks in whatever order the library adds."""
    for bucket in buckets:
        flat = torch.cat(in_memory_order(bucket))
        dist.all_reduce(flat)
        pieces = flat.split([p.numel() for p in bucket])
        torch._foreach_copy_(in_memory_order(bucket), list(pieces))


def sum_in_order(buckets: list[list[Tensor]]) -> None:
    """Sum over ranks in their order, the same on every one."""
    for bucket in buckets:
        flat = torch.cat(in_memory_order(bucket))
        gathered = torch.empty(dist.get_world_size(), flat.numel(), device=flat.device)
        dist.all_gather_into_tensor(gathered, flat)
        total = gathered[0]
        for row in gathered[1:]:
            total = total + row
        pieces = total.split([p.numel() for p in bucket])
        torch._foreach_copy_(in_memory_order(bucket), list(pieces))


def sum_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """As DDP sums by itself, without its division."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def make_step(way: str, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """A training step that sums gradients in one of the ways."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    buckets = cut_to_buckets(list(model.parameters()))
    run = model
    if way in ("ddp", "hook"):
        run = DistributedDataParallel(
            model, device_ids=[0], gradient_as_bucket_view=True, broadcast_buffers=False
        )
        if way == "hook":
            run.register_comm_hook(None, sum_hook)
    finish = {"after": sum_after, "strict": sum_in_order}.get(way, lambda _buckets: None)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        finish(buckets)
        optimizer.step()
        optimizer.zero_grad(set_to_none=way not in ("ddp", "hook"))

    return step


def time_steps(step: Callable[[], None]) -> float:
    """Milliseconds of a step."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / STEPS


def main() -> None:
    """Measure all ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=256)
    words = parser.parse_args()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    torch.backends.cudnn.benchmark = True
    images = torch.randn(words.batch, 3, 224, 224, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (words.batch,), device="cuda")
    ways = ("alone", "ddp", "hook", "after", "strict")
    steps = {way: make_step(way, images, labels) for way in ways}
    for step in steps.values():
        time_steps(step)
    found = {way: [] for way in ways}
    for number in range(words.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(time_steps(steps[way]))
    rows = {}
    for way in ways:
        ratios = [alone / ms for alone, ms in zip(found["alone"], found[way], strict=True)]
        rows[way] = {
            "ms": round(median(found[way]), 3),
            "speed_of_alone": round(median(ratios), 4),
            "range": [round(min(ratios), 4), round(max(ratios), 4)],
        }
        print(way, rows[way], flush=True)
    (words.out / "ranks_of_one.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
