"""What the rows of a data set come to: accuracies with their interval, and which check decided how many."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

import torch

from locallip.balls import L2, said
from locallip.certify import Verdict, certified_accuracy
from locallip.norms import Guarantee
from locallip.proofs.rows import Row

#: Normal quantile of a two-sided interval of 95 %.
_Z = 1.959964


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Shares in per cent, the interval of the certified share, and the failure probability of the whole set."""
    count = len(rows)
    verdicts = Counter(row.verdict for row in rows)
    certified = verdicts[Verdict.CERTIFIED]
    low, high = wilson(certified, count)
    summary = {
        "images": count,
        "correct": _share(sum(row.prediction == row.label for row in rows), count),
        "certified": _share(certified, count),
        "certified_interval": [round(100 * low, 3), round(100 * high, 3)],
        "verdicts": {str(verdict): verdicts[verdict] for verdict in Verdict},
        "decided_by": dict(Counter(row.decided_by for row in rows).most_common()),
        "failure_prob_of_all": min(1.0, math.fsum(row.failure_prob for row in rows)),
        "seconds": round(math.fsum(row.seconds for row in rows), 3),
    }
    if any(row.norm != L2.norm for row in rows):  # summaries from before there were others do not name it
        summary["norm"] = rows[0].norm
    radii = [row.radius for row in rows if row.radius is not None]
    return {**summary, **_radii(radii, rows[0].eps)} if radii and len(radii) == count else summary


def _radii(radii: list[float], eps: float) -> dict[str, Any]:
    """Median and mean of the certified radii, and the certified share in per cent from eps 0 to twice that of the run.

    At the run's own eps it is the share of the verdict CERTIFIED, whose rows are those with a radius of at least eps.
    """
    at = [eps * (tenth / 10) for tenth in range(21)]
    shares = certified_accuracy(torch.tensor(radii, dtype=torch.float64), at)
    return {
        "radius_median": statistics.median(radii),
        "radius_mean": math.fsum(radii) / len(radii),
        "curve": {"eps": at, "certified": [_share(round(share * len(radii)), len(radii)) for share in shares.tolist()]},
    }


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score (1927); [0, 1] for no trials."""
    if not count:
        return 0.0, 1.0
    share, z2 = successes / count, _Z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def describe(summary: dict[str, Any], guarantee: Guarantee) -> str:
    """For people: the cascade's shares as the paper gives them, and the sum of it."""
    count = summary["images"]
    shares = "\n".join(f"  {100 * n / max(count, 1):6.2f} %  {check}" for check, n in summary["decided_by"].items())
    low, high = summary["certified_interval"]
    where = said(summary.get("norm", L2.norm))
    word = "estimated robust (no proof)" if guarantee is Guarantee.ESTIMATE else "certified"
    risk = summary["failure_prob_of_all"]
    rest = f"; a chance of at most {shown(risk, 2, upwards=True)} that any of these is wrong" if risk else ""
    return (
        f"decided by\n{shares}\n"
        f"correct {summary['correct']:.2f} %, {word} {_share_shown(summary['certified'])} % of {count} images{where} "
        f"(95 % interval of the share {low:.2f} to {high:.2f}), guarantee {guarantee.value}{rest}{_curve(summary, word)}"
    )


def _curve(summary: dict[str, Any], word: str) -> str:
    """Some points of the curve, without that at the run's own eps, which stands above; nothing without radii."""
    if "curve" not in summary:
        return ""
    points = list(zip(summary["curve"]["eps"], summary["curve"]["certified"], strict=True))
    chosen = "".join(
        f"\n  {_share_shown(share):>6} %  at eps {shown(eps)}" for eps, share in (points[at] for at in (2, 6, 14, 18))
    )
    median, mean = (shown(summary[key]) for key in ("radius_median", "radius_mean"))
    return f"\nradius: median {median}, mean {mean}; {word} at other radii{chosen}"


def shown(value: float, digits: int = 4, upwards: bool = False) -> str:
    """So many digits, never above the number itself, for what is proved; with `upwards` never below, for what is risked."""
    context = Context(prec=digits, rounding=ROUND_CEILING if upwards else ROUND_FLOOR)
    return f"{float(context.create_decimal(repr(float(value)))):.{digits}g}"  # 0.3 is 0.3, not 0.29999999999999998


def _share_shown(share: float) -> str:
    """Per cent with two digits, never more than there are."""
    return f"{math.floor(round(100 * share, 6)) / 100:.2f}"


def _share(part: int, count: int) -> float:
    return 100 * part / count if count else 0.0
