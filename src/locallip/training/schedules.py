"""Learning rate, eps and lambda over the course of training, as the paper's appendix gives them but step by step.

Differs from the paper: the values change with every step instead of every epoch, which makes the ramps smooth.
"""

from __future__ import annotations

from typing import NamedTuple

from locallip.training.recipe import Recipe


class Setting(NamedTuple):
    """What one step is trained with: Adam's rate, the radius, and the weight lambda of the worst logits."""

    learning_rate: float
    eps: float
    mix: float


def setting(recipe: Recipe, epoch: float) -> Setting:
    """The setting at `epoch`, counted from 0 and fractional inside an epoch."""
    share = grown(recipe, epoch)
    return Setting(learning_rate(recipe, epoch), share * recipe.eps_train, share * recipe.mix_target)


def learning_rate(recipe: Recipe, epoch: float) -> float:
    """The initial rate until `decay_epoch`, then a decay that reaches the end rate with the last epoch."""
    if epoch <= recipe.decay_epoch or recipe.decay_epoch >= recipe.epochs:
        return recipe.learning_rate
    share = (epoch - recipe.decay_epoch) / (recipe.epochs - recipe.decay_epoch)
    if recipe.decay == "linear":
        # From the end rate, which may be tiny: a difference of two large numbers would not end there.
        return recipe.end_learning_rate + (1 - share) * (recipe.learning_rate - recipe.end_learning_rate)
    return recipe.learning_rate * (recipe.end_learning_rate / recipe.learning_rate) ** share


def grown(recipe: Recipe, epoch: float) -> float:
    """How far the ramps of eps and lambda are: 0 in the warm-up, then linear, 1 from `ramp_epochs` on and never more."""
    if epoch >= recipe.ramp_epochs:
        return 1.0
    if epoch <= recipe.warmup_epochs:  # which may be all of the ramp
        return 0.0
    return (epoch - recipe.warmup_epochs) / (recipe.ramp_epochs - recipe.warmup_epochs)
