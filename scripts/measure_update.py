"""Times the update after the passes of a step on a GPU: torch's optimizers, and the fused update.

Prints milliseconds of the host (until all is launched) and of the device (the sum of its kernels)
for each update of ResNet-50's weights, the median and the range of several blocks.

    python scripts/measure_update.py [--model resnet50] [--blocks 7] [--tiles]
"""

from argparse import ArgumentParser
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.catalog.models import MODELS
from phalanx.engine.dynamic_loss_scale import DynamicLossScale
from phalanx.engine.fused_update import DeviceLossScale, FusedUpdate
from phalanx.engine.state import TrainState
from phalanx.engine.step import StepOptions, _apply_update
from phalanx.engine.weight_average import WeightAverage
from phalanx.fused.half_copies import attach_half_copies
from phalanx.kernels import update_fused
from phalanx.models.build import build_model
from phalanx.optim.build import OptimSettings, build_optimizer

STEPS = 20  # of a block
WAYS = {  # rule, moving average, 16-bit copies, adaptive loss scale, norm to clip to
    "momentum, copies, dynamic scale": ("momentum", 0.0, True, True, 0.0),
    "momentum, copies": ("momentum", 0.0, True, False, 0.0),
    "rmsprop_tf, copies, average": ("rmsprop_tf", 0.999, True, False, 0.0),
    "momentum, copies, average, clip": ("momentum", 0.999, True, True, 1.0),
    "adamw, copies": ("adamw", 0.0, True, False, 0.0),
}
TILES = [(512, 4), (1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]  # elements, warps


def build_state(name, way, *, fused):
    """A state at step 0, and its 16-bit copies."""
    rule, decay, copied, dynamic, clip = way
    torch.manual_seed(0)
    model = build_model(MODELS[name], num_classes=1000)
    model.to("cuda", memory_format=torch.channels_last)
    decays = {"l2": 1e-4} if rule != "adamw" else {"weight_decay": 1e-2}
    optimizer = build_optimizer(model, OptimSettings(name=rule, **decays))
    state = TrainState(model, optimizer)
    copies = attach_half_copies(model.modules(), torch.float16) if copied else None
    if decay:
        state.average = WeightAverage(model, decay=decay)
    if dynamic:
        state.scaler = DynamicLossScale(128.0)
    if fused:
        if dynamic:
            state.scaler = DeviceLossScale(state.scaler, torch.device("cuda"))
        state.fused_update = FusedUpdate(
            optimizer, clip_norm=clip, scaler=state.scaler, average=state.average
        )
    return state, copies


def build_step(name, way, *, fused):
    """An update of weights whose gradients are always the same."""
    state, copies = build_state(name, way, fused=fused)
    options = StepOptions(label_smoothing=0.0, device_type="cuda", half=None, clip_norm=way[-1])
    weights = [weight for group in state.optimizer.param_groups for weight in group["params"]]
    kept = [torch.randn_like(weight) * 1e-3 for weight in weights]
    gradients = [gradient.clone() for gradient in kept]

    def step():
        state.step += 1
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        if fused:
            return state.fused_update.apply(state.step, 1e-3, 128.0)
        norm = _apply_update(state, 1e-3, 128.0, options, lambda norms: norms)
        if copies is not None:
            torch._foreach_copy_(copies[1], copies[0])
        return norm

    def restore():  # torch's optimizers unscale gradients in place
        torch._foreach_copy_(gradients, kept)

    return step, restore


def time_host(step, restore):
    """Milliseconds until an update is launched, on an idle device."""
    total = 0.0
    for _ in range(STEPS):
        restore()
        torch.cuda.synchronize()
        begin = perf_counter()
        step()
        total += perf_counter() - begin
    return total / STEPS * 1e3


def profile_device(step, restore):
    """Milliseconds and number of the kernels of an update."""
    restore()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    rows = [row for row in profiler.key_averages() if row.self_device_time_total > 0]
    total = sum(row.self_device_time_total for row in rows) / STEPS / 1e3
    return total, sum(row.count for row in rows) / STEPS, rows


def measure(name, blocks):
    """Print a line for each way."""
    for what, way in WAYS.items():
        built = {fused: build_step(name, way, fused=fused) for fused in (False, True)}
        hosts = {fused: [] for fused in built}
        devices = {fused: [] for fused in built}
        counts = {}
        for _ in range(3):
            for step, _ in built.values():
                step()
        for _ in range(blocks):
            for fused, pair in built.items():
                hosts[fused].append(time_host(*pair))
                total, counts[fused], rows = profile_device(*pair)
                devices[fused].append(total)
        for fused in built:
            host, device = hosts[fused], devices[fused]
            print(
                f"{name}, {what}, {'fused' if fused else 'foreach'}: "
                f"host {median(host):.3f} ms ({min(host):.3f} to {max(host):.3f}), "
                f"device {median(device):.3f} ms ({min(device):.3f} to {max(device):.3f}), "
                f"{counts[fused]:.0f} launches, n={blocks}",
                flush=True,
            )
        for row in rows:  # those of the fused update
            print(f"    {row.key[:70]}: {row.self_device_time_total / row.count:.1f} us")


def measure_tiles(name):
    """Print a line for each block size."""
    for block, warps in TILES:
        update_fused._SUM_BLOCK = update_fused._BLOCK = block
        update_fused._WARPS = warps
        step, restore = build_step(name, WAYS["momentum, copies"], fused=True)
        for _ in range(3):
            step()
        _, _, rows = profile_device(step, restore)
        times = ", ".join(
            f"{row.key[:20]} {row.self_device_time_total / row.count:.1f} us" for row in rows
        )
        print(f"block {block}, {warps} warps: {times}", flush=True)


def main():
    """Run it."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--tiles", action="store_true", help="only compare sizes of blocks")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if given.tiles:
        measure_tiles(given.model)
    else:
        measure(given.model, given.blocks)


if __name__ == "__main__":
    main()
