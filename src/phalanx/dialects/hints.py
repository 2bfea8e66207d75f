"""Hardware hints that the older programs share, and their counterparts here."""

from collections.abc import Sequence

from phalanx.dialects.numbers import COUNT_OR_NONE, SHARE
from phalanx.dialects.table import Effect, OldOption, OldValues, Outcome, computed, nothing, renamed

_IPU_MIB = 900  # of memory in one IPU of the second generation
PROFILE_LEVELS = {
    "NO_PROFILE": "off",
    "DEVICE_PROFILE": "summary",
    "IPU_PROFILE": "trace",
    "TILE_PROFILE": "full",
}
COMPILER_HINT = nothing("a hint for the IPU's compiler, without effect on numbers")


def _port_workspace(text: str, values: OldValues) -> Effect:
    return size_workspace([float(part) for part in text.split(",") if part])


def size_workspace(shares: Sequence[float]) -> Effect:
    """The memory for convolutions: the workspace that cuDNN and cuBLAS may take."""
    mib = round(max(shares) * _IPU_MIB)
    why = f"{max(shares):g} of an IPU's {_IPU_MIB} MiB as the workspace of cuDNN and cuBLAS"
    if len(shares) > 1:
        why += "; one figure for all stages, the largest"
    variables = {"CUDNN_CONV_WSCAP_DBG": str(mib), "CUBLASLT_WORKSPACE_SIZE": str(mib * 1024)}
    return Effect(variables=variables, why=why)


def _port_buckets(text: str, values: OldValues) -> Effect:
    mib = max(0.01, min(1024.0, int(text) / 2**20))
    return Effect(flags={"bucket-mib": f"{mib:.6g}"}, why="DDP's buckets, in MiB")


def _port_device(text: str, values: OldValues) -> Effect:
    """One device to train on, and perhaps another to score on."""
    ids = [part for part in text.split(",") if part]
    if not ids or not all(part.isdecimal() for part in ids):
        return Effect(why="the device is chosen automatically", kind="elsewhere")
    flags = {"device": f"cuda:{ids[0]}"}
    flags |= {"validation-device": f"cuda:{ids[1]}"} if len(ids) > 1 else {}
    return Effect(flags=flags, why="the second one scores" * (len(ids) > 1))


WORKSPACE = OldOption(
    "available-memory-proportion",
    computed(_port_workspace, "cuDNN's and cuBLAS's workspace, as environment variables"),
    takes="many",
    number=SHARE,
)
BUCKETS = OldOption(
    "max-cross-replica-buffer-size",
    computed(_port_buckets, "--bucket-mib, in MiB"),
    number=COUNT_OR_NONE,
)
DEVICE_CHOICE: Outcome = computed(_port_device, "--device, and --validation-device")
PROFILE: Outcome = renamed("profile", PROFILE_LEVELS, why="into the folder of the run")
