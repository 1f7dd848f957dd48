"""A semidefinite bound of the Lipschitz constant on a ball, with proof: LipSDP (Fazlyab et al. 2019) from middle slopes.

Behind some region F(x') - F(x'') is a chain of maps and slopes on t, z(x') - z(x'') = diag(outputs) t. With slopes between
low and high a change y before a unit becomes m y + r s behind it, m the middle, r half of high - low, and |s| <= |y|. So for
any tau the sum of tau^2 (y^2 - s^2) over units is not negative. All y and the change of the outputs are linear in
xi = (t, s): y = Y xi and F(x') - F(x'') = C xi. If the matrix

    B = (C ; diag(tau) Y) diag(1/sigma on t, 1/tau on s)   has   ||B|| <= 1,

then ||C xi||^2 + sum tau^2 y^2 <= sigma^2 ||t||^2 + sum tau^2 s^2, so ||F(x') - F(x'')|| <= sigma ||t||, which is at most
sigma lip ||x' - x''||. That norm is proved like any other, and tau and sigma may come from anywhere. They come from descent:
from the outputs back, the quadratic form of what follows becomes that of what follows a layer earlier by a Schur complement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from locallip.bounds.jacobian import Known, known
from locallip.bounds.region import Trace
from locallip.bounds.slopes import PairSlopes, Slopes, UnitSlopes
from locallip.network import Network
from locallip.norms import matrix_norms
from locallip.ops import LinearOp
from locallip.rounding import floored, gamma, up

#: Numbers of a matrix that is written out; units that bend, and units that are not dead, at most.
ENTRIES, BENDING, LIVE = 2**23, 256, 512
#: Steps of the search, and their length.
STEPS, RATE = 40, 0.2
#: How far tau stays from where the Schur complement is singular.
CLOSEST = -7.0
#: What is added to the sigma of the search, the least that is enough counts.
INFLATIONS = (1e-9, 1e-7, 1e-5, 1e-3, 1e-2, 1e-1)


class Matrix(NamedTuple):
    """A matrix whose entries are off by at most those of `error`."""

    value: Tensor
    error: Tensor

    def rows(self, index: Tensor) -> Matrix:
        return Matrix(self.value[index], self.error[index])

    def columns(self, index: Tensor) -> Matrix:
        return Matrix(self.value[:, index], self.error[:, index])

    def scaled(self, columns: Tensor) -> Matrix:
        value = self.value * columns
        return Matrix(value, up(self.error * columns + gamma(4, value.dtype) * value.abs()))

    def paired(self, dim: int, factor: float) -> Matrix:
        """Sums and differences of the halves along `dim`, times a power of 2."""
        (first, second), (e1, e2) = self.value.chunk(2, dim), self.error.chunk(2, dim)
        lost = up(e1 + e2 + gamma(4, first.dtype) * (first.abs() + second.abs())) * factor
        return Matrix(torch.cat([first + second, first - second], dim) * factor, torch.cat([lost, lost], dim))


class Level(NamedTuple):
    """Units with slopes between low and high, (h,), and the map that leads to them."""

    weight: Matrix
    low: Tensor
    high: Tensor

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    @property
    def reach(self) -> Tensor:
        """At least |slope - middle|."""
        return up(torch.maximum(self.high - self.middle, self.middle - self.low).clamp(min=0))


class Chain(NamedTuple):
    """Levels from a region on, in the order in which they are computed, and the map to the outputs."""

    source: int
    levels: list[Level]
    last: Matrix


def multiplier_bounds(network: Network, trace: Trace, steps: int = STEPS) -> Tensor:
    """Upper bounds of the Lipschitz constant on each ball of a trace with outward rounding, (B,); inf where none is found.

    Each sample is taken by itself, from the region on from which matrices and units that bend are few enough.
    """
    bound = trace.lipschitz.new_full((len(trace.logits),), float("inf"))
    maps = written(network, trace.logits)
    for i in range(len(bound)) if maps else ():
        parts = known(network, trace, slice(i, i + 1))
        chain = chain_of(parts, maps)
        if chain is not None:
            bound[i] = up(proved(chain, searched(chain, steps)) * parts.lipschitz[chain.source][0])
    return bound.nan_to_num(float("inf"), float("inf"))


def written(network: Network, like: Tensor) -> dict[int, Matrix]:
    """The maps at the end of the network that form a chain and are small enough, by stage."""
    readers = [source for stage in network.stages for source in stage.terms]
    found: dict[int, Matrix] = {}
    for index in range(len(network.stages) - 1, -1, -1):
        terms = network.stages[index].terms
        ((source, op), *others) = terms.items()
        if others or source != index or readers.count(source) > 1 or op.in_shape.numel() * op.out_shape.numel() > ENTRIES:
            break
        found[index] = _matrix(op, like)
    return found


def _matrix(op: LinearOp, like: Tensor) -> Matrix:
    value = op.materialize(like)
    rounded = gamma(op.roundings + 8, like.dtype) * up(op.materialize_abs(like), op.fan_in + 8)
    return Matrix(value, rounded)


def chain_of(parts: Known, maps: dict[int, Matrix]) -> Chain | None:
    """That of one sample, as long as it may be; None where it would be no more than the last map."""
    k = len(parts.network.stages) - 1
    levels: list[Level] = []
    last, bending = maps[k], 0
    # The map in front of what was met last: to the outputs, or to the first of the levels so far.
    weight = last
    while k > 0 and k - 1 in maps:
        found = _units(parts.slopes[k], weight, maps[k - 1])
        if found is None:
            break
        steps, weight_of_last = found
        bending += sum(int((step.high > step.low).sum()) for step in steps)
        if bending > BENDING or not all(0 < len(step.low) <= LIVE for step in steps):
            break
        if levels:
            levels[0] = levels[0]._replace(weight=weight_of_last)
        else:
            last = weight_of_last
        levels[:0] = steps
        weight, k = steps[0].weight, k - 1
    outputs = parts.outputs[k]
    if outputs is not None:
        weight = weight.scaled(outputs[0].flatten().to(weight.value.dtype))
        levels[:1] = [level._replace(weight=weight) for level in levels[:1]]
    known_slopes = all(bool(torch.isfinite(level.low + level.high).all()) for level in levels)
    return Chain(k, levels, last) if levels and known_slopes else None


def _units(steps: list[Slopes] | None, after: Matrix, before: Matrix) -> tuple[list[Level], Matrix] | None:
    """The steps of an activation as levels between the maps after and before it, and the map after them, None where not."""
    if not steps:
        return None
    levels: list[Level] = []
    first_after, count = after, before.value.shape[0]
    for place, step in enumerate(steps):
        weight = before if place == len(steps) - 1 else _identity(count, before.value)
        if isinstance(step, UnitSlopes):
            low, high = step.low[0].flatten(), step.high[0].flatten()
        elif isinstance(step, PairSlopes):
            # (y1 + y2, y1 - y2): the first stays, the second has slopes between -1 and 1.
            one = torch.ones_like(step.low[0].flatten())
            low, high = (torch.cat([one, 2 * p[0].flatten() - 1]) for p in (step.low, step.high))
            after, weight = after.paired(1, 0.5), weight.paired(0, 1.0)
        else:
            return None
        live = ~((high == 0) & (low == 0))
        after = after.columns(live)
        if levels:
            levels[0] = levels[0]._replace(weight=after)
        else:
            first_after = after
        levels.insert(0, Level(weight.rows(live), low[live], high[live]))
        after = levels[0].weight
    return levels, first_after


def _identity(count: int, like: Tensor) -> Matrix:
    eye = torch.eye(count, dtype=like.dtype, device=like.device)
    return Matrix(eye, torch.zeros_like(eye))


def searched(chain: Chain, steps: int) -> tuple[list[Tensor], Tensor]:
    """tau for the units that bend of each level, and sigma, for which ||B|| is about 1."""
    bends = [level.high > level.low for level in chain.levels]
    # Weights in proportion to the reach, and not to its square: what bends little costs little on either side.
    logs = [level.reach[bend].log() for level, bend in zip(chain.levels, bends, strict=True)]
    room = [-log.amax() if len(log) else log.new_zeros(()) for log in logs]
    leaves = [leaf.requires_grad_() for leaf in (*logs, *room)]
    root = _root(chain)
    best = [torch.ones_like(log) for log in logs], root.new_full((), float("inf"))
    optimizer = torch.optim.Adam(leaves, lr=RATE)
    for i in range(steps + 1):
        try:
            with torch.enable_grad():
                value, taus = _sigma(chain, bends, logs, room, root)
                loss = value.log()
        except torch.linalg.LinAlgError:  # rounding made a form indefinite, or it is not finite
            break
        if bool(value < best[1]):
            best = [tau.detach() for tau in taus], value.detach()
        if i == steps or not loss.requires_grad or not bool(torch.isfinite(loss)):
            break
        optimizer.param_groups[0]["lr"] = RATE * (1 - 0.9 * i / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for leaf in room:
                leaf.clamp_(min=CLOSEST)
    return best


def _root(chain: Chain) -> Tensor:
    """The square root of W W^T for the first map."""
    weight = chain.levels[0].weight.value
    values, vectors = torch.linalg.eigh(weight @ weight.mT)
    return vectors * values.clamp(min=0).sqrt() @ vectors.mT


def _sigma(
    chain: Chain, bends: Sequence[Tensor], logs: Sequence[Tensor], room: Sequence[Tensor], root: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """sigma for multipliers given by their logarithms, up to a factor per level that `room` says; and tau."""
    form = torch.eye(len(chain.last.value), dtype=root.dtype, device=root.device)
    taus: list[Tensor] = []
    after = chain.last.value
    for level, bend, log, more in zip(*(reversed(list(v)) for v in (chain.levels, bends, logs, room)), strict=True):
        form = after.mT @ form @ after
        middle, reach = level.middle, level.reach[bend]
        column = form[:, bend] * reach
        square = reach[:, None] * column[bend]
        if len(reach):
            half = (0.5 * log).exp()
            largest = torch.linalg.eigvalsh(square / (half[:, None] * half))[-1].clamp(min=1e-300)
            weights = log.exp() * largest * (1 + more.exp())
            lower = torch.linalg.cholesky(torch.diag(weights) - square)
            side = torch.linalg.solve_triangular(lower, (middle[:, None] * column).mT, upper=False)
            form = middle[:, None] * form * middle + side.mT @ side
            form = form + torch.diag(torch.zeros_like(middle).index_put((bend.nonzero()[:, 0],), weights))
            taus.insert(0, weights.sqrt())
        else:
            form = middle[:, None] * form * middle
            taus.insert(0, log)
        after = level.weight.value
    return torch.linalg.eigvalsh(root @ form @ root)[-1].clamp(min=0).sqrt(), taus


def proved(chain: Chain, found: tuple[list[Tensor], Tensor]) -> Tensor:
    """The least inflation of sigma with ||B|| <= 1, rounding included; inf where none is enough."""
    taus, sigma = found
    matrix, inputs = _scaled(chain, taus)
    tiny = torch.finfo(sigma.dtype).tiny
    for inflation in INFLATIONS if bool(torch.isfinite(sigma)) else ():
        larger = up(sigma * (1 + inflation)) + tiny**0.5
        factor = torch.ones_like(matrix.value[0])
        factor[:inputs] = 1 / larger
        b = matrix.scaled(factor)
        size = up(matrix_norms(b.value[None])[0] + up(b.error.norm(), b.error.numel() + 64))
        if bool(size <= 1):
            return larger * (1 + 8 * torch.finfo(sigma.dtype).eps)
    return torch.full_like(sigma, float("inf"))


def _scaled(chain: Chain, taus: Sequence[Tensor]) -> tuple[Matrix, int]:
    """B without 1/sigma, and how many of its columns are those of t."""
    first = chain.levels[0].weight.value
    inputs = first.shape[1]
    states = inputs + sum(len(tau) for tau in taus)
    z = Matrix(torch.eye(inputs, states, dtype=first.dtype, device=first.device), first.new_zeros(inputs, states))
    parts, scale, place = [], [torch.ones_like(z.value[0, :inputs])], inputs
    for level, tau in zip(chain.levels, taus, strict=True):
        y = _times(level.weight, z)
        bend = (level.high > level.low).nonzero()[:, 0]
        parts.append(Matrix(tau[:, None] * y.value[bend], up(tau[:, None] * y.error[bend])))
        scale.append(1 / tau)
        value = level.middle[:, None] * y.value
        error = up(level.middle.abs()[:, None] * y.error + gamma(8, value.dtype) * value.abs())
        value[bend, place + torch.arange(len(bend), device=bend.device)] += level.reach[bend]
        z, place = Matrix(value, error), place + len(tau)
    parts.append(_times(chain.last, z))
    matrix = Matrix(torch.cat([part.value for part in parts]), torch.cat([part.error for part in parts]))
    # tau and 1/tau are off by roundings of themselves: as if every entry were.
    rounded = matrix.error + gamma(16, first.dtype) * matrix.value.abs()
    return Matrix(matrix.value, up(rounded)).scaled(torch.cat(scale)), inputs


def _times(weight: Matrix, z: Matrix) -> Matrix:
    """The product of both, and by how much it may be off."""
    n = weight.value.shape[1] + 8
    # What is not zero is raised to FLOOR, so that no product with weights underflows.
    lost = floored(z.error + gamma(n, z.value.dtype) * z.value.abs(), z.value != 0)
    size = weight.value.abs() @ lost
    return Matrix(weight.value @ z.value, up(size + weight.error @ (z.value.abs() + z.error), 2 * n))
