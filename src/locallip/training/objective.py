"""The loss of one batch for every method, and the figures that a person wants to see of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from locallip.attacks import pgd_l2
from locallip.bounds import (
    CeilingNorm,
    GlobalBound,
    PartlyLocal,
    Trace,
    WorstLogits,
    dense_places,
    global_bound,
    norm_keys,
    propagate,
    worst_logits,
)
from locallip.losses import bcp_loss, gloro_loss, lmt_loss, sparsity_loss, trades_loss
from locallip.network import Network
from locallip.norms import BatchStarts, NormRule, PowerNorm, ProbedNorm
from locallip.norms.rows import Rows
from locallip.norms.starts import Place
from locallip.training.recipe import Recipe

#: Steps towards the best multiplier of the last box-and-ball problem; each gives a valid bound, four an almost exact one.
DUAL_STEPS = 4

#: Share of a layer's own vector that is added to the start of every sample's: it is updated with every step and so nearly
#: exact, while a sample's saved vector is an epoch old.
TOWARDS_SHARED = 0.1

#: The margin form of each method that bounds worst logits.
FORMS = {"local-b": "box_ball", "local-g": "box_ball", "bcp": "box_ball", "gloro": "ball", "lmt": "lmt", "ibp": "box"}

Vectors = dict[Place, Tensor]


def places(network: Network) -> dict[Place, torch.Size]:
    """Where a norm is taken, and the shape of the vectors that its power iteration works on (without batch)."""
    return {
        (number, source): op.in_shape
        for number, stage in enumerate(network.stages)
        for source, op in stage.terms.items()
        if not op.disjoint_rows
    }


def local_places(network: Network, recipe: Recipe) -> dict[Place, torch.Size]:
    """Those where the method takes a norm per sample."""
    if not recipe.is_local:
        return {}
    everywhere = places(network)
    if recipe.local_layers == "all":
        return everywhere
    dense = dense_places(network)
    return {place: shape for place, shape in everywhere.items() if place in dense}


def layer_names(network: Network) -> list[str]:
    """The names of the layers whose norms `figures` lists, in its order."""
    return [key.name for number, stage in enumerate(network.stages) for key in norm_keys(stage, number).values()]


class Objective:
    """The loss of a recipe's method on a network, as a function of tensors alone, so that it can be compiled.

    `noise` holds the jitter of every place, (1, *shape); `layout` says how the samples' vectors lie in their rows.
    """

    def __init__(self, network: Network, recipe: Recipe, noise: Mapping[Place, Tensor], layout: Rows):
        self.network, self.recipe, self.noise, self.layout = network, recipe, noise, layout
        self.local = local_places(network, recipe)
        # A tensor, so that recipes that differ in it alone are compiled once.
        here = next((v.device for v in noise.values()), None)
        self.sparsity = torch.tensor(recipe.sparsity, device=here)

    def bounded(
        self, x: Tensor, y: Tensor, eps: Tensor, mix: Tensor, vectors: Vectors, shared: Vectors, probes: Vectors
    ) -> tuple[Tensor, Tensor, Vectors, Vectors]:
        """Loss (), figures (K,), and the vectors after this step's power iterations.

        x (B, C, H, W), y (B,), eps (1,), mix (); rows `vectors` of the samples, each (B, width), where norms are local;
        `shared` of the layers, each (1, *shape); `probes` (P, *shape), random and fresh, empty where the recipe has none.
        """
        recipe, network = self.recipe, self.network
        everyone = BatchStarts(shared, self.noise)
        one = torch.zeros(1, dtype=torch.long, device=x.device)
        general = PowerNorm(recipe.power_steps, everyone, one)
        ceiling = global_bound(network, ProbedNorm(general, probes, self.noise) if probes else general, eps)
        # One step alone would not get rid of what is wrong in that direction for a sample.
        share = TOWARDS_SHARED if recipe.power_steps > 1 else 0.0
        near = {place: noise + share * shared[place] for place, noise in self.noise.items()}
        own = BatchStarts(vectors, near, self.layout)
        trace = propagate(
            network,
            x,
            eps,
            self._rule(own, y, ceiling),
            ceiling=ceiling if recipe.method != "ibp" else None,
            box_radii="input" if recipe.method == "ibp" else recipe.box_radii,
            intervals=recipe.intervals,
        )
        logits = worst_logits(network, trace, y, form=FORMS[recipe.method], steps=DUAL_STEPS)  # type: ignore[arg-type]
        loss = self._loss(logits, y, mix)
        if recipe.sparsity:
            loss = loss + self.sparsity * sparsity_loss(network, trace, recipe.theta_weight)
        return loss, figures(logits, y, trace, ceiling), own.vectors, everyone.vectors

    def _rule(self, own: BatchStarts, y: Tensor, ceiling: GlobalBound) -> NormRule:
        """The norm of each masked operator: per sample where it is local, else that of the whole operator."""
        if not self.local:
            return CeilingNorm(ceiling)
        # `own` is in the order of the batch: any index of its length does.
        return PartlyLocal(PowerNorm(self.recipe.power_steps, own, y), self.local, ceiling)

    def _loss(self, logits: WorstLogits, y: Tensor, mix: Tensor) -> Tensor:
        if self.recipe.method in ("local-b", "bcp", "ibp"):
            return bcp_loss(logits, y, mix)
        return lmt_loss(logits, y) if self.recipe.method == "lmt" else gloro_loss(logits, y)

    def attacked(self, x: Tensor, y: Tensor, eps: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and figures of the methods without a bound: plain cross entropy, adversarial training, TRADES."""
        recipe, network = self.recipe, self.network
        radii = eps.expand(len(x))
        if recipe.method == "standard":
            clean = worst = network(x)
            loss = F.cross_entropy(clean, y)
        elif recipe.method == "at":
            point = pgd_l2(network, x, y, radii, steps=recipe.attack_steps, input_domain=(0.0, 1.0))
            worst = network(point)
            loss = F.cross_entropy(worst, y)
            with torch.no_grad():
                clean = network(x)
        else:
            with torch.no_grad():
                target = network(x).softmax(1)
            point = pgd_l2(network, x, y, radii, steps=recipe.attack_steps, input_domain=(0.0, 1.0), target=target)
            clean, worst = network(x), network(point)
            loss = trades_loss(clean, worst, y, recipe.trades_weight)
        nothing = torch.full((2,), float("nan"), device=x.device)
        return loss, torch.cat([_accuracies(WorstLogits(clean, worst), y), nothing])


#: What the first entries of `figures` are; then follow, per layer, the local norm, the global norm and the share varying.
FIGURES = ("clean_loss", "worst_loss", "clean", "robust", "local_bound", "global_bound")


def figures(logits: WorstLogits, y: Tensor, trace: Trace, ceiling: GlobalBound) -> Tensor:
    """One number per entry of FIGURES, then per layer: mean local norm, global norm, share of varying units; (K,)."""
    with torch.no_grad():
        local = torch.stack([norm.mean() for norm in trace.norms.values()])
        general = torch.cat(list(ceiling.norms.values()))
        varying = torch.stack([v.outputs.float().mean() for v in trace.varying])
        bounds = torch.stack([trace.lipschitz.mean(), ceiling.total[0]])
        return torch.cat([_accuracies(logits, y), bounds, local, general, varying]).detach()


def _accuracies(logits: WorstLogits, y: Tensor) -> Tensor:
    """Cross entropies and accuracies on clean and worst logits, (4,)."""
    with torch.no_grad():
        both = logits.clean, logits.worst
        losses, right = [F.cross_entropy(z, y) for z in both], [(z.argmax(1) == y).float().mean() for z in both]
        return torch.stack([*losses, *right])
