"""What started the old programs: poprun, mpirun, gc-profile, and TF_CONFIG on every host.

One host needs no launcher here: `phalanx train` starts a process for each device it finds. Lines
that name hosts become `phalanx launch`.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.dialects.numbers import COUNT, POSITIVE, WHOLE
from phalanx.dialects.table import (
    Effect,
    GivenOption,
    LaunchFacts,
    OldOption,
    OldValues,
    computed,
    count_row,
    elsewhere,
    nothing,
    renamed,
)
from phalanx.errors import ConfigError
from phalanx.port.match import MatchedWords, match_words

_PARTITION = "there is no partition of devices to allocate: those of a host are found"
_NO_PRINT = "every rank keeps its own log; only the first one prints"
_EXECUTABLES = re.compile(r"--executable_cache_path=(\S+)")
_CACHE = "model-cache-path"
_CACHE_WHY = "what is compiled is kept there from run to run"
_CACHE_UNUSED = Effect(why=f"the new command has no use for --{_CACHE}")
_TAGGED = Effect(launch={"tag-output": "true"}, why="lines begin with their host")
_TIMEOUT_WHY = "how long a rank is waited for"


def _launch(**words: str) -> dict[str, str]:
    return {name.replace("_", "-"): text for name, text in words.items()}


def _port_replicas(text: str, values: OldValues) -> Effect:
    if values.kind != "train":
        why = "all devices there are share the images, with the same score"
        return Effect(launch=_launch(num_replicas=text), why=why, kind="elsewhere")
    return Effect(
        flags={"replicas": text},
        launch=_launch(num_replicas=text),
        why="copies of the model; with fewer devices they fold",
    )


def _port_devices(text: str, values: OldValues) -> Effect:
    """Devices of a replica: the stages, which the command itself tells."""
    stages = values.launch.devices_per_replica
    launch = _launch(devices_per_replica=str(stages)) if stages else {}
    if text:
        why = "a stage of the model on each; the splits say how many there are"
        return Effect(launch=launch, why=why)
    taken = f"{stages}, as --shards of the command or its config says" if stages else "1"
    return Effect(
        launch=launch,
        why=f"its value is missing: taken as {taken}",
        warnings=(f"--ipus-per-replica: its value is missing; taken as {taken}",),
    )


def _port_mpi_args(text: str, values: OldValues) -> Effect:
    """What poprun handed on to mpirun: variables, the network, how output is shown."""
    effects = _read_mpi_words(shlex.split(text))
    if values.kind != "train":
        effects = [_CACHE_UNUSED if _CACHE in effect.flags else effect for effect in effects]
    return _merge(effects)


def _read_mpi_words(words: Sequence[str]) -> list[Effect]:
    rest, found = list(words), []
    while rest:
        word = rest.pop(0)
        if word in ("-x", "--x") and rest:
            found.append(_read_variable(rest.pop(0)))
        elif word == "--mca" and len(rest) > 1:
            found.append(_read_mca(f"{rest.pop(0)} {rest.pop(0)}"))
        elif word == "--tag-output":
            found.append(_TAGGED)
        else:
            found.append(Effect(why=f"{word}: only mpirun knows it"))
    return found


def _read_mca(text: str) -> Effect:
    key, _, value = text.partition(" ")
    if key.endswith("_if_include"):
        return Effect(launch={"interface": value}, why="NCCL and gloo talk over this network")
    return Effect(why=f"{key}: a setting of Open MPI, which is not used")


def _read_variable(text: str) -> Effect:
    """A variable for the ranks, or what it meant."""
    name, equals, value = text.partition("=")
    if name in VARIABLES:
        return VARIABLES[name](value) if equals else Effect(why=f"{name}: read only by the IPU")
    return Effect(launch={f"x {name}": text}, why="other variables are passed on to other hosts")


def _read_poplar_flags(value: str) -> Effect:
    cache = _EXECUTABLES.search(value)
    if cache is None:
        return Effect(why="TF_POPLAR_FLAGS: settings of the IPU's compiler")
    return Effect(flags={_CACHE: cache[1]}, why=_CACHE_WHY)


def _read_timeout(value: str) -> Effect:
    return Effect(flags={"rank-timeout": value}, why=_TIMEOUT_WHY)


def _read_engine_options(value: str) -> Effect:
    try:
        options = dict(json.loads(value.replace("\\\n", "") or "{}"))
    except (ValueError, TypeError):
        options = {"its settings": ""}
    reports = [
        key for key, on in options.items() if key.startswith("autoReport.") and on in (True, "true")
    ]
    if reports:
        why = f"{', '.join(reports)}: into the folder of the run"
        return Effect(flags={"profile": "trace"}, why=why)
    why = f"{', '.join(options)}: settings of the IPU's runtime, with no effect on numbers"
    return Effect(why=f"POPLAR_ENGINE_OPTIONS: {why}", kind="nothing")


VARIABLES = {  # of the environment: what each becomes; others are kept as they are
    "TF_POPLAR_FLAGS": _read_poplar_flags,
    "POPLAR_ENGINE_OPTIONS": _read_engine_options,
    "IPUOF_VIPU_API_TIMEOUT": _read_timeout,
    "TF_CPP_VMODULE": lambda value: Effect(
        why="TF_CPP_VMODULE: what TensorFlow's compiler prints", kind="nothing"
    ),
    "POPLAR_LOG_LEVEL": lambda value: Effect(why="what the IPU's compiler prints", kind="nothing"),
    "POPART_CACHE_DIR": lambda value: Effect(flags={_CACHE: value}, why=_CACHE_WHY),
    "TF_CONFIG": lambda value: Effect(why="the hosts are those of --host", kind="computed"),
}


def _merge(effects: Sequence[Effect]) -> Effect:
    """Several effects as one, with their reasons in order."""
    merged = Effect()
    for effect in effects:
        merged = replace(
            merged,
            flags={**merged.flags, **effect.flags},
            launch={**merged.launch, **effect.launch},
            warnings=(*merged.warnings, *effect.warnings),
        )
    whys = dict.fromkeys(effect.why for effect in effects if effect.why)
    return replace(merged, why="; ".join(whys))


def _port_hosts(text: str, values: OldValues) -> Effect:
    return Effect(launch={"host": text}, why="phalanx launch reaches them by ssh")


_HOSTS = computed(_port_hosts, "--host of phalanx launch")
_POPRUN = (
    count_row("num-replicas", computed(_port_replicas, "--replicas")),
    OldOption(
        "num-instances",
        elsewhere("every device has a process of its own; workers feed each of them"),
        number=COUNT,
    ),
    OldOption(
        "ipus-per-replica",
        computed(_port_devices, "--devices-per-replica of phalanx launch"),
        number=COUNT,
        lacks_value=True,
    ),
    OldOption("host", _HOSTS, aliases=("hosts", "H")),
    OldOption("numa-aware", elsewhere("the operating system places processes near their memory")),
    OldOption("mpi-local-args", computed(_port_mpi_args, "-x, --tag-output of phalanx launch")),
    OldOption("mpi-global-args", computed(_port_mpi_args, "--interface of phalanx launch")),
    OldOption("executable-cache-path", renamed(_CACHE, why=_CACHE_WHY)),
    OldOption("vipu-server-timeout", renamed("rank-timeout", why=_TIMEOUT_WHY), number=POSITIVE),
    OldOption("only-output-from-instance", elsewhere(_NO_PRINT), number=WHOLE),
    OldOption("offline-mode", nothing("nothing is compiled ahead for a device that is not there")),
    OldOption(
        "print-topology", elsewhere("`phalanx plan` shows who runs what, and --dry-run the lines")
    ),
    OldOption("sync-type", nothing("all ranks take every step together")),
    OldOption("v", nothing("there is nothing more to print"), takes="flag"),
    OldOption("vv", nothing("there is nothing more to print"), takes="flag"),
    *(
        OldOption(name, nothing(_PARTITION))
        for name in (
            "vipu-server-host", "vipu-server-port", "vipu-partition", "vipu-cluster",
            "vipu-allocation", "update-partition", "reset-partition", "remove-partition",
            "num-ilds",
        )
    ),
)  # fmt: skip


def _port_variable(text: str, values: OldValues) -> Effect:
    return _read_variable(text)


def _port_tag(text: str, values: OldValues) -> Effect:
    return _TAGGED


def _port_processes(text: str, values: OldValues) -> Effect:
    return Effect(
        flags={"replicas": text}, launch={"num-replicas": text}, why="a process for each replica"
    )


_PLACED = "the operating system places processes"
_MPIRUN = (
    OldOption("H", _HOSTS, aliases=("host", "hosts")),
    OldOption("np", computed(_port_processes, "--replicas"), aliases=("n", "c"), number=COUNT),
    OldOption("x", computed(_port_variable, "-x of phalanx launch")),
    OldOption("tag-output", computed(_port_tag, "--tag-output of phalanx launch"), takes="flag"),
    OldOption("bind-to", elsewhere(_PLACED)),
    OldOption("map-by", elsewhere(_PLACED)),
    OldOption("mca", computed(lambda text, _: _read_mca(text.replace(",", " ", 1)), "--interface"),
              takes="two"),
    OldOption("allow-run-as-root", nothing("ranks run as whoever starts them"), takes="flag"),
)  # fmt: skip
_GC_PROFILE = (
    OldOption(
        "d", elsewhere("the profile is written into the folder of the run"), aliases=("dir",)
    ),
    OldOption("config", nothing("levels are those of --profile: summary, trace and full")),
)
LAUNCHERS = {"poprun": _POPRUN, "mpirun": _MPIRUN, "mpiexec": _MPIRUN, "gc-profile": _GC_PROFILE}


def match_launcher(name: str, words: Sequence[str]) -> MatchedWords:
    """The options of a launcher, up to the program that it starts."""
    return match_words(words, LAUNCHERS[name], stops=True)


def read_launch_facts(
    name: str, given: Sequence[GivenOption], environment: Mapping[str, str]
) -> LaunchFacts:
    """How many replicas on which hosts, as a launcher or TF_CONFIG says."""
    texts = {one.option.name: one.text for one in given}
    hosts = texts.get("host", texts.get("H", "")).replace(" ", ",").split(",")
    cluster = _read_cluster(_find_cluster_text(given, environment))
    if cluster and name in ("", "mpirun", "mpiexec"):
        return LaunchFacts(name="TF_CONFIG", hosts=cluster)
    replicas = texts.get("num-replicas", texts.get("np", texts.get("num-instances", "")))
    devices = texts.get("ipus-per-replica", "")
    return LaunchFacts(
        name=name,
        replicas=int(replicas) if replicas.isdecimal() else None,
        devices_per_replica=int(devices) if devices.isdecimal() else None,
        hosts=tuple(host for host in hosts if host),
    )


def _find_cluster_text(given: Sequence[GivenOption], environment: Mapping[str, str]) -> str:
    for one in given:
        if one.option.name == "x" and one.text.startswith("TF_CONFIG="):
            return one.text.partition("=")[2]
    return environment.get("TF_CONFIG", "")


def _read_cluster(text: str) -> tuple[str, ...]:
    """The hosts of a TF_CONFIG, in order, with their ports."""
    if not text:
        return ()
    try:
        workers = json.loads(text)["cluster"]["worker"]
        return tuple(str(worker) for worker in workers)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            'TF_CONFIG: expected JSON of the form {"cluster": {"worker": ["host:port", ...]}, '
            f'"task": {{"type": "worker", "index": 0}}}}, got {text!r}'
        ) from None
