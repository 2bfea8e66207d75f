"""Two runs side by side: what was asked, where the numbers part, and which scores better."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phalanx.report.folder import RunFolder
from phalanx.report.predictions import read_predictions
from phalanx.report.records import STEP_FIELDS, ScoreRow, read_scores, read_steps
from phalanx.report.scores import paired_test

_ABSENT = "(not set)"
_SURROUNDINGS = ("environment", "chosen")  # the facts about code and machine
_METRICS = ("grad_norm", "top1")  # what --disable-metrics leaves out


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """One thing the two runs do not share."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class _Parting:
    """The first step at which the recorded numbers differ."""

    step: int
    quantity: str
    a: float
    b: float


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """What two runs share and where they differ; `as_json` makes it plain data."""

    a: str
    b: str
    options: list[_Difference]
    data: list[_Difference]
    surroundings: list[_Difference]
    steps_a: int
    steps_b: int
    steps_shared: int  # the last step both have a line of metrics for
    parting: _Parting | None  # None: identical as far as both go
    score_a: ScoreRow | None
    score_b: ScoreRow | None
    paired: dict[str, Any] | None  # None where no image was scored by both

    def as_json(self) -> dict[str, Any]:
        """Plain data that any JSON writer takes; numbers that are not finite become text."""
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    """The same value without tuples and without numbers JSON cannot write."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare_runs(a: RunFolder, b: RunFolder) -> _Comparison:
    """Everything that differs between two runs, from the files in their folders."""
    facts_a, facts_b = a.facts, b.facts
    steps_a, steps_b = read_steps(a.path), read_steps(b.path)
    scores_a, scores_b = read_scores(a.path), read_scores(b.path)
    return _Comparison(
        a=str(a.path),
        b=str(b.path),
        options=_differences(a.options, b.options),
        data=_differences(_flat_facts(facts_a, "data"), _flat_facts(facts_b, "data")),
        surroundings=_differences(
            _flat_facts(facts_a, *_SURROUNDINGS), _flat_facts(facts_b, *_SURROUNDINGS)
        ),
        steps_a=len(steps_a["step"]),
        steps_b=len(steps_b["step"]),
        steps_shared=int(max(set(steps_a["step"]) & set(steps_b["step"]), default=0)),
        parting=_first_parting(steps_a, steps_b),
        score_a=scores_a[-1] if scores_a else None,
        score_b=scores_b[-1] if scores_b else None,
        paired=_pair_predictions(a, b),
    )


def _flat_facts(facts: dict[str, Any], *sections: str) -> dict[str, str]:
    """Some sections of run.json as dotted names and text."""
    flat: dict[str, str] = {}
    for section in sections:
        for name, value in (facts.get(section) or {}).items():
            nested = value if isinstance(value, dict) else {"": value}
            flat |= {f"{name}.{key}".rstrip("."): str(item) for key, item in nested.items()}
    return flat


def _differences(a: dict[str, str], b: dict[str, str]) -> list[_Difference]:
    """The names whose values differ, in the order of the first run."""
    names = [*a, *(name for name in b if name not in a)]
    rows = [_Difference(name=n, a=a.get(n, _ABSENT), b=b.get(n, _ABSENT)) for n in names]
    return [row for row in rows if row.a != row.b]


def _first_parting(a: dict[str, list[float]], b: dict[str, list[float]]) -> _Parting | None:
    """The first step, and its first quantity, whose bits differ; None where none does.

    Steps of which one run keeps no metrics are compared by their loss.
    """
    shared, at_a, at_b = np.intersect1d(a["step"], b["step"], return_indices=True)
    bare = np.isnan(np.asarray(a["top1"])[at_a]) | np.isnan(np.asarray(b["top1"])[at_b])
    found = None
    for name in STEP_FIELDS:
        x, y = np.asarray(a[name])[at_a], np.asarray(b[name])[at_b]
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | (bare & (name in _METRICS))
        differ = np.flatnonzero(~same)
        if len(differ) and (found is None or differ[0] < found[0]):
            found = (int(differ[0]), name)
    if found is None:
        return None
    at, name = found
    return _Parting(step=int(shared[at]), quantity=name, a=a[name][at_a[at]], b=b[name][at_b[at]])


def _pair_predictions(a: RunFolder, b: RunFolder) -> dict[str, Any] | None:
    """The paired test over the images both scored under the same label; None without any."""
    first = {row.id: row for row in read_predictions(a.path)}
    second = {row.id: row for row in read_predictions(b.path)}
    shared = [i for i, row in first.items() if i in second and row.label == second[i].label]
    if not shared:
        return None
    test = paired_test(
        [first[i].correct for i in shared],
        [second[i].correct for i in shared],
    )
    return {**test, "only_in_a": len(first) - len(shared), "only_in_b": len(second) - len(shared)}


def render_comparison(comparison: _Comparison) -> str:
    """The comparison as text for a terminal."""
    c = comparison
    return "\n".join(
        [
            f"A  {c.a}",
            f"B  {c.b}",
            "",
            *_difference_lines("Options", c.options, same="the same"),
            *_difference_lines("Data", c.data, same="the same fingerprints"),
            *_difference_lines("Code and machine", c.surroundings, same="the same"),
            "Numbers",
            f"  {_describe_parting(c)}",
            "",
            "Scores",
            *(f"  {line}" for line in _score_lines(c)),
        ]
    )


def _difference_lines(title: str, rows: list[_Difference], *, same: str) -> list[str]:
    """What differs, one line a name, in columns."""
    if not rows:
        return [title, f"  {same}", ""]
    table = [("", "A", "B"), *((row.name, row.a, row.b) for row in rows)]
    widths = [max(len(line[k]) for line in table) for k in (0, 1)]
    lines = [f"  {n:<{widths[0]}}  {a:<{widths[1]}}  {b}" for n, a, b in table]
    return [title, *lines, ""]


def _describe_parting(c: _Comparison) -> str:
    """Where the numbers part, in words."""
    if c.steps_shared == 0:
        return "there is no step that both runs recorded"
    if c.parting is None:
        longer = "" if c.steps_a == c.steps_b else f" (A has {c.steps_a:,}, B has {c.steps_b:,})"
        return f"identical to step {c.steps_shared:,}{longer}"
    p = c.parting
    return f"part at step {p.step:,}: {p.quantity} is {p.a!r} in A and {p.b!r} in B"


def _score_lines(c: _Comparison) -> list[str]:
    """Both scores, and what the paired test says of them."""
    lines = [_describe_score("A", c.score_a), _describe_score("B", c.score_b)]
    if c.paired is not None:
        return [*lines, *_paired_lines(c.paired)]
    if c.score_a and c.score_b:
        lines.append(_unpaired_verdict(c.score_a, c.score_b))
    return lines


def _describe_score(name: str, row: ScoreRow | None) -> str:
    """The newest score of a run."""
    if row is None:
        return f"{name}  no evaluation yet"
    low, high = row.interval95
    return (
        f"{name}  top-1 {row.top1:.2%} (95% interval {low:.2%} to {high:.2%}) "
        f"of {row.scored:,} images, step {row.step:,}"
    )


def _paired_lines(test: dict[str, Any]) -> list[str]:
    """The paired test in words."""
    low, high = (bound * 100 for bound in test["interval95"])
    alone = test["only_in_a"] + test["only_in_b"]
    apart = f" ({test['only_in_a']:,} only in A, {test['only_in_b']:,} only in B)" if alone else ""
    return [
        f"{test['n']:,} images were scored by both{apart}: "
        f"{test['n10']:,} right only in A, {test['n01']:,} right only in B",
        f"A - B = {test['difference'] * 100:+.2f} points "
        f"(95% interval {low:+.2f} to {high:+.2f}), p = {test['p']:.3g}: {test['verdict']}",
    ]


def _unpaired_verdict(a: ScoreRow, b: ScoreRow) -> str:
    """What the two intervals alone can say."""
    told = "no image was scored by both, so only the intervals speak: "
    if a.interval95[0] > b.interval95[1]:
        return f"{told}A is better"
    if b.interval95[0] > a.interval95[1]:
        return f"{told}B is better"
    return f"{told}they overlap"
