"""Compares two runs: their options, where the numbers diverge, and which scores better."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phalanx.report.folder import RunFolder, flatten_facts
from phalanx.report.predictions import read_predictions
from phalanx.report.records import STEP_FIELDS, ScoreRow, read_scores, read_steps
from phalanx.report.scores import paired_test
from phalanx.units import align_columns, format_plural

_ABSENT = "(not set)"
_SURROUNDINGS = ("environment", "chosen")  # the facts about code and machine
_METRICS = ("grad_norm", "top1")  # what --disable-metrics leaves out


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """A value that differs between the two runs."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class _Divergence:
    """The first step at which the recorded numbers differ."""

    step: int
    quantity: str
    a: float
    b: float


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The differences between two runs, and their scores."""

    a: str
    b: str
    options: list[_Difference]
    data: list[_Difference]
    surroundings: list[_Difference]
    steps_a: int
    steps_b: int
    steps_shared: int  # the last step for which both have metrics
    divergence: _Divergence | None  # None: identical in all common steps
    score_a: ScoreRow | None
    score_b: ScoreRow | None
    paired: dict[str, Any] | None  # None if no image was scored by both

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become text."""
        values = _to_json_value(asdict(self))
        return {**values, "parting": values["divergence"]}  # its name in earlier versions


def _to_json_value(value: Any) -> Any:
    """The same value without tuples and numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare_runs(a: RunFolder, b: RunFolder) -> _Comparison:
    """Everything that differs between two runs, from the files in their folders."""
    facts_a, facts_b = a.facts, b.facts
    steps_a, steps_b = read_steps(a.path), read_steps(b.path)
    scores_a, scores_b = read_scores(a.path), read_scores(b.path)
    return _Comparison(
        a=str(a.path),
        b=str(b.path),
        options=_find_differences(a.options, b.options),
        data=_find_differences(*(_read_facts(facts, "data") for facts in (facts_a, facts_b))),
        surroundings=_find_differences(
            *(_read_facts(facts, *_SURROUNDINGS) for facts in (facts_a, facts_b))
        ),
        steps_a=len(steps_a["step"]),
        steps_b=len(steps_b["step"]),
        steps_shared=int(max(set(steps_a["step"]) & set(steps_b["step"]), default=0)),
        divergence=_find_divergence(steps_a, steps_b),
        score_a=scores_a[-1] if scores_a else None,
        score_b=scores_b[-1] if scores_b else None,
        paired=_pair_predictions(a, b),
    )


def _read_facts(facts: dict[str, Any], *sections: str) -> dict[str, str]:
    """Some sections of run.json as dotted names and text."""
    return {n: text for s in sections for n, text in flatten_facts(facts.get(s) or {})}


def _find_differences(a: dict[str, str], b: dict[str, str]) -> list[_Difference]:
    """The names whose values differ, in the order of the first run."""
    names = [*a, *(name for name in b if name not in a)]
    rows = [_Difference(name=n, a=a.get(n, _ABSENT), b=b.get(n, _ABSENT)) for n in names]
    return [row for row in rows if row.a != row.b]


def _find_divergence(a: dict[str, list[float]], b: dict[str, list[float]]) -> _Divergence | None:
    """The first step, and its first quantity, whose bits differ; None if none does.

    Where one of the runs has no metrics, steps are compared by their loss.
    """
    shared, at_a, at_b = np.intersect1d(a["step"], b["step"], return_indices=True)
    lacks_metrics = np.isnan(np.asarray(a["top1"])[at_a]) | np.isnan(np.asarray(b["top1"])[at_b])
    found = None
    for name in STEP_FIELDS:
        x, y = np.asarray(a[name])[at_a], np.asarray(b[name])[at_b]
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | (lacks_metrics & (name in _METRICS))
        differ = np.flatnonzero(~same)
        if len(differ) and (found is None or differ[0] < found[0]):
            found = (int(differ[0]), name)
    if found is None:
        return None
    at, name = found
    return _Divergence(
        step=int(shared[at]), quantity=name, a=a[name][at_a[at]], b=b[name][at_b[at]]
    )


def _pair_predictions(a: RunFolder, b: RunFolder) -> dict[str, Any] | None:
    """The paired test over the images that both scored with the same label; None without any."""
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
            f"  {describe_divergence(c)}",
            "",
            "Scores",
            *(f"  {line}" for line in _score_lines(c)),
        ]
    )


def _difference_lines(title: str, rows: list[_Difference], *, same: str) -> list[str]:
    """The differences in columns, one line per name."""
    if not rows:
        return [title, f"  {same}", ""]
    table = [("", "A", "B"), *((row.name, row.a, row.b) for row in rows)]
    return [title, *(f"  {line}" for line in align_columns(table, left=range(3))), ""]


def describe_divergence(c: _Comparison) -> str:
    """Where the numbers diverge, in words."""
    if c.steps_shared == 0:
        return "there is no step that both runs recorded"
    if c.divergence is None:
        longer = "" if c.steps_a == c.steps_b else f" (A has {c.steps_a:,}, B has {c.steps_b:,})"
        return f"identical to step {c.steps_shared:,}{longer}"
    d = c.divergence
    return f"the runs diverge at step {d.step:,}: {d.quantity} is {d.a!r} in A and {d.b!r} in B"


def _score_lines(c: _Comparison) -> list[str]:
    """Both scores, and the result of the paired test, or else of comparing their intervals."""
    lines = [_describe_score("A", c.score_a), _describe_score("B", c.score_b)]
    if c.paired is not None:
        return [*lines, *_paired_lines(c.paired)]
    if c.score_a and c.score_b:
        (low_a, high_a), (low_b, high_b) = c.score_a.interval95, c.score_b.interval95
        better = "A is better" if low_a > high_b else "B is better" if low_b > high_a else ""
        lines.append(
            "no image was scored by both, so only the intervals can be compared: "
            f"{better or 'they overlap'}"
        )
    return lines


def _describe_score(name: str, row: ScoreRow | None) -> str:
    """The newest score of a run."""
    if row is None:
        return f"{name}  no evaluation"
    low, high = row.interval95
    return (
        f"{name}  top-1 {row.top1:.2%} (95% interval {low:.2%} to {high:.2%}) "
        f"of {format_plural(row.scored, 'image')}, step {row.step:,}"
    )


def _paired_lines(test: dict[str, Any]) -> list[str]:
    """The paired test in words."""
    low, high = (bound * 100 for bound in test["interval95"])
    only_a, only_b = test["only_in_a"], test["only_in_b"]
    unpaired = f" ({only_a:,} only in A, {only_b:,} only in B)" if only_a + only_b else ""
    return [
        f"{test['n']:,} images were scored by both{unpaired}: "
        f"{test['n10']:,} right only in A, {test['n01']:,} right only in B",
        f"A - B = {test['difference'] * 100:+.2f} points "
        f"(95% interval {low:+.2f} to {high:+.2f}), p = {test['p']:.3g}: {test['verdict']}",
    ]
