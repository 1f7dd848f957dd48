"""The audit: certificates are issued, and every kind of attempt is made on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from locallip.audit.attack import attack
from locallip.audit.boundary import boundary
from locallip.audit.claims import Claims, IssuerOf, claims_of, largest_claims
from locallip.audit.judge import Judge
from locallip.audit.paths import Goal, Search
from locallip.audit.report import Break, Report, Tally
from locallip.audit.rounding import rounding
from locallip.audit.sphere import sphere
from locallip.audit.variants import Variant, extreme, scaled

#: Which searches there are, and the share of all attempts that each gets; the last two are certificates of derived networks.
SEARCHES: dict[str, Search] = {"attack": attack, "boundary": boundary, "rounding": rounding, "random": sphere}
SHARES = {"attack": 0.35, "boundary": 0.1, "rounding": 0.25, "random": 0.2, "scaled weights": 0.06, "extreme weights": 0.04}
#: Images that the certificates of a derived network are asked for.
VARIANT_IMAGES = 16
#: At this share of the largest radius certificates of derived networks are asked for: what is searched for in float32, as
#: slopes are, may not be found again for weights of other sizes.
DERIVED_SHARE = 0.75
#: Seconds between two lines about how far a search is.
PATIENCE = 10.0


@dataclass
class Auditor:
    """Tries to break the certificates that `issuer_of` gives for a model and networks derived from it.

    `issuer_of(model)` is a `Certifier` or anything that is called like one. `attempts` is how many there are at least,
    `batch` how many are made at once, `steps` the length of a search path, `probes` the radii tried for an image.
    """

    model: nn.Module
    issuer_of: IssuerOf
    attempts: int = 10_000
    batch: int = 500
    steps: int = 30
    probes: int = 8
    seed: int = 0
    say: Callable[[str], None] = field(default=lambda line: None)

    def issue(self, x: Tensor, y: Tensor, eps: Tensor) -> Claims:
        """The certificates to be attacked, with the largest radius found for each image; x (N, *shape)."""
        index = torch.arange(len(x), device=x.device)
        return largest_claims(self.issuer_of(self.model), x.double(), y, eps, index, self.probes, self.say)

    def run(self, claims: Claims, kinds: Iterable[str] = tuple(SHARES)) -> Report:
        """All kinds of attempts on these certificates and, on their images, on those of derived networks."""
        report = Report()
        for kind in kinds:
            begin, number = time.perf_counter(), -int(-self.attempts * SHARES[kind] // 1)
            if not len(claims):
                tally = Tally()
            elif kind in SEARCHES:
                tally = self._search(
                    kind, SEARCHES[kind], Judge(self.model, claims.x.shape[1:], claims.x.device), claims, number
                )
            else:
                made = scaled(self.model, self.seed) if kind == "scaled weights" else extreme(self.model)
                tally = self._derived(kind, list(made), claims, number)
            tally.seconds = time.perf_counter() - begin
            report.kinds[kind] = tally
            self.say(f"{kind}: {tally.tried} attempts, {tally.broken} broken, {tally.seconds:.1f} s")
        self._fill_up(report, claims)
        return report

    def _fill_up(self, report: Report, claims: Claims) -> None:
        """Random points in place of attempts that were none, such as those that ended outside of their ball."""
        missing = self.attempts - report.tried
        if "random" in report.kinds and missing > 0 and len(claims):
            judge = Judge(self.model, claims.x.shape[1:], claims.x.device)
            report.kinds["random"].join(self._search("random", sphere, judge, claims, missing))

    def _search(self, kind: str, search: Search, judge: Judge, claims: Claims, number: int) -> Tally:
        """At least `number` paths, shared out among the claims and the classes."""
        tally = Tally(certificates=len(claims))
        device, classes = claims.x.device, judge.network.output_shape[0]
        generator = torch.Generator(device).manual_seed(self.seed + 7_000_003)
        begin, told = 0, time.perf_counter()
        while tally.tried < number and begin < 2 * number:  # points outside of their ball do not count
            number_now = min(self.batch, max(number - tally.tried, 1))
            path = torch.arange(begin, begin + number_now, device=device)
            part = claims.take(path % len(claims))
            rival = (part.y + 1 + (path // len(claims)) % (classes - 1)) % classes
            found = search(Goal(judge.network, part, rival, judge.dtype, generator, self.steps))
            tally.add(kind, found, judge(found.claims, found.points))
            begin += number_now
            if time.perf_counter() - told > PATIENCE:
                told = time.perf_counter()
                self.say(f"{kind}: {tally.tried} of {number} attempts, {tally.broken} broken")
        return tally

    def _derived(self, kind: str, variants: list[Variant], claims: Claims, number: int) -> Tally:
        """Certificates of derived networks: asked for anew, and attacked like the others."""
        tally = Tally()
        few = claims.take(torch.arange(min(VARIANT_IMAGES, len(claims)), device=claims.x.device))
        issued: list[tuple[Variant, Claims]] = []
        for variant in variants:
            self.say(f"{kind}: {variant.name}")
            try:
                radius = few.radius * (DERIVED_SHARE * variant.unit)
                asked = claims_of(self.issuer_of(variant.model), few.x * variant.unit, few.y, radius, few.index)
            except ValueError:
                tally.refused.append(variant.name)
                continue
            tally.tried += int(variant.has_no_hope(few.y).sum())  # to ask for what must not be certified is an attempt
            hopeless = variant.has_no_hope(asked.y)
            _note_hopeless(f"{kind}: {variant.name}", asked.take(hopeless.nonzero()[:, 0]), tally)
            if not bool(hopeless.all()):
                issued.append((variant, asked.take((~hopeless).nonzero()[:, 0])))
        for k, (variant, asked) in enumerate(issued):
            left = -(-(number - tally.tried) // (len(issued) - k))
            self._attack_variant(f"{kind}: {variant.name}", variant, asked, max(left, 2), tally)
        return tally

    def _attack_variant(self, kind: str, variant: Variant, claims: Claims, number: int, tally: Tally) -> None:
        judge = Judge(variant.model, claims.x.shape[1:], claims.x.device)
        for search, share in ((attack, number - number // 2), (sphere, number // 2)):
            found = self._search(kind, search, judge, claims, share)
            tally.join(found)
        tally.certificates += len(claims)


def _note_hopeless(kind: str, claims: Claims, tally: Tally) -> None:
    """Certificates that should not have been issued, whatever any search finds."""
    tally.broken += len(claims)
    if len(claims):
        numbers = (int(claims.index[0]), int(claims.y[0]), float(claims.radius[0]))
        tally.breaks.append(Break(kind, *numbers, claims.x[0].cpu(), claims.x[0].cpu()))
