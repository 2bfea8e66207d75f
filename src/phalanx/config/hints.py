"""The way out of an option that does not exist: what other programs call ours, else a near one."""

from collections.abc import Collection

from phalanx.errors import suggest

_ELSEWHERE = {  # what other training programs call it: our option, and how that is meant
    "optimiser": ("optimizer", ""),
    "num-epochs": ("epochs", ""),
    "micro-batch-size": ("batch-size", ""),
    "gradient-accumulation-count": ("gradient-accumulation", ""),
    "enable-half-partials": ("half-partials", ""),
    "enable-recomputation": ("enable-recompute", ""),
    "recomputation": ("enable-recompute", ""),
    "log-freq": ("logs-per-epoch", "times an epoch instead of steps apart"),
    "bn-decay": ("batchnorm-momentum", "the share of the new batch: 1 less the decay"),
    "epochs-per-ckpt": ("ckpts-per-epoch", "1/N for every N epochs"),
    "rmsprop-epsilon": ("optimizer-eps", ""),
    "abs-end-learning-rate": ("lr-end-ratio", "as a share of the peak"),
}
_OTHERWISE = {  # what is done here in another way: an option that the command has then, and how
    "restore-path": (
        "init-weights",
        "--resume RUN goes on with a run, --init-weights FILE begins with weights",
    ),
    "shuffle": ("seed", "there is nothing to set: the order is shuffled anew in every epoch"),
}


def suggest_option(word: str, known: Collection[str]) -> str:
    """The way out of an option that is none of the known ones, with or without its dashes.

    >>> suggest_option("--optimiser", ["--optimizer"]), suggest_option("epohcs", ["epochs"])
    ('it is --optimizer here', "did you mean 'epochs'?")
    """
    plain = word.lstrip("-").lower().replace("_", "-")
    table = _OTHERWISE if plain in _OTHERWISE else _ELSEWHERE
    option, meaning = table.get(plain, ("", ""))
    if option not in known and f"--{option}" not in known:
        return suggest(word, known)
    if table is _OTHERWISE:
        return meaning
    return f"it is --{option} here{', ' * bool(meaning)}{meaning}"
