"""Weights & Biases: one wandb run per run, however often it is resumed."""

import netrc
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from phalanx.trackers.tracker import END, RunFacts, TrackerState

_SERVER = "https://api.wandb.ai"
_ANSWER_S, _CONNECT_S = 5.0, 10.0  # to wait for an answer, and for a run, before going offline
_EXIT_CODES: dict[END, int] = {"finished": 0, "stopped": 1, "failed": 1}


class WeightsAndBiases:
    """A run on a wandb server, or an offline one that `wandb sync` uploads later."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None  # until it is open
        self._facts: dict[str, str] = {}

    def open(self, facts: RunFacts, state: TrackerState) -> str:
        """Start or continue the wandb run; offline if there is no answer."""
        self._facts = state.facts
        state.facts.setdefault("id", secrets.token_hex(4))
        state.save()  # the id is kept even if nothing else is
        mode = self._choose_mode()
        notes = []
        try:
            if mode == "online":
                _check_server()
            self._run = self._init(facts, state, mode)
        except Exception as failure:  # whatever it is, the numbers can be recorded offline
            if mode == "offline":
                raise
            notes.append(f"cannot go online ({_first_line(failure)})")
            _stop_wandb_service()
            self._run = self._init(facts, state, "offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            return self._run.url
        if mode == "disabled":
            return "is switched off by WANDB_MODE"
        # all folders of this run: each process that records offline creates its own
        where = facts.folder / "wandb" / f"offline-run-*-{state.facts['id']}"
        return "; ".join([*notes, f"recorded offline; upload it with: wandb sync {where}"])

    def _choose_mode(self) -> str:
        """The mode that was asked for; by default online only if there is an API key."""
        mode = str(self._options["wandb-mode"])
        if mode != "auto":
            return mode
        return os.environ.get("WANDB_MODE") or ("online" if _has_api_key() else "offline")

    def _init(self, facts: RunFacts, state: TrackerState, mode: str) -> Any:
        # wandb's own error reporting is off unless it is asked for
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ["WANDB_MODE"] = mode  # which wandb reads, too, whatever it is given
        import wandb

        options = self._options
        tags = [tag.strip() for tag in (options["wandb-tags"] or "").split(",")]
        return wandb.init(
            id=state.facts["id"],
            resume="allow",
            mode=mode,
            dir=str(facts.folder),
            project=options["wandb-project"] or os.environ.get("WANDB_PROJECT") or "phalanx",
            name=options["wandb-run-name"] or os.environ.get("WANDB_NAME") or facts.name,
            tags=[tag for tag in tags if tag] or None,
            group=os.environ.get("WANDB_RUN_GROUP") or facts.group,
            config={**facts.options, **facts.describe()},
            allow_val_change=True,  # a resume may change some options
            settings=wandb.Settings(
                console="off",  # this process prints nothing worth recording
                init_timeout=_CONNECT_S,
                login_timeout=_CONNECT_S,
                program="phalanx train",
                save_code=False,
                disable_git=True,
            ),
        )

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Add the numbers of a step.

        The step is an ordinary metric, and the x axis of all others: wandb's own step cannot go
        back, as scores of earlier checkpoints do. wandb's step counts rows instead, over all
        processes of the run, so that files recorded offline can be merged. The epoch has the same
        name in all rows, so that it can be the x axis, too.
        """
        epochs = [value for name, value in values.items() if name.endswith("/epoch")]
        row = max(int(self._facts.get("rows", 0)), self._run.step)
        # commit: otherwise a row waits for the next one, and the newest is never visible
        self._run.log({**values, "epoch": epochs[0], "step": step}, step=row, commit=True)
        self._facts["rows"] = str(row + 1)

    def flush(self) -> None:
        """Nothing to do: wandb's own process uploads continuously."""

    def close(self, end: END, results: Mapping[str, float]) -> None:
        """Add the results, and end the wandb run."""
        self._run.summary.update(dict(results))
        if end == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[end])


def _find_server() -> str:
    """The address of the server."""
    return os.environ.get("WANDB_BASE_URL") or _SERVER


def _check_server() -> None:
    """Raise if the server does not answer: wandb itself would use all of its timeout."""
    with suppress(HTTPError):  # an error status is an answer, too
        urlopen(_find_server(), timeout=_ANSWER_S).close()


def _stop_wandb_service() -> None:
    """End wandb's own process, which still tries to connect and holds the run's id."""
    import wandb

    wandb.teardown(exit_code=1)


def _has_api_key() -> bool:
    """Whether this user has logged in to the server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(urlsplit(_find_server()).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _first_line(failure: Exception) -> str:
    """The first line of a failure's message."""
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]
