"""A recipe: everything that decides what a training run does, one flat record that a TOML file or a command line fills."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from locallip.models import ACTIVATIONS, ARCHITECTURES

Method = Literal["local-b", "local-g", "bcp", "gloro", "lmt", "ibp", "standard", "at", "trades"]
Starts = Literal["saved", "random"]
Augment = Literal["none", "crop", "crop_flip"]
Precision = Literal["float32", "tf32", "bfloat16"]
DataName = Literal["embedded", "mnist", "cifar10", "tiny-imagenet", "own"]

#: Methods whose loss needs a spectral norm per sample.
LOCAL_METHODS = ("local-b", "local-g")
#: Methods whose loss needs the norm of each whole layer alone.
GLOBAL_METHODS = ("bcp", "gloro", "lmt")
#: Methods without a bound.
PLAIN_METHODS = ("standard", "at", "trades")

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


class WrongRecipe(ValueError):
    """A recipe that is missing, cannot be read, or asks for something impossible; the message is for the user."""


@dataclass(frozen=True)
class Recipe:
    """One training run. Epochs are passes over the training images; fractions of them are allowed in the schedules.

    Args:
        name: Stands in result files.
        about: One line for people.
        data: Which images; "own" are those in the folders train and test of the data root, with a folder per class in each.
        architecture: One of the paper's networks, or the small one of the demo.
        activation: What stands between the layers.
        method: The loss and the bound behind it.
        eps: Radius to certify, exact: a number or a fraction such as 36/255.
        eps_train: Radius to train for; the paper goes a little beyond eps.
        epochs: Passes over the training images.
        batch: Images a step.
        learning_rate: Adam's rate at the start.
        end_learning_rate: Its rate at the end.
        decay_epoch: Epoch from which the rate falls (m in the paper).
        decay: How it falls to end_learning_rate: exponentially as in the paper, or linearly.
        optimizer: Adam, or Muon for the weights of all layers but the last with Adam for the rest.
        muon_rate: Muon's rate at the start; it falls as Adam's does.
        warmup_epochs: Epochs of plain cross entropy before eps and lambda begin to grow.
        ramp_epochs: Epochs over which eps and lambda grow linearly to their targets (n in the paper), warm-up included.
        mix_target: Lambda at the end of its ramp: the weight of the worst logits in the mixed loss.
        power_steps: Power iterations a step, per sample and layer.
        starts: Where power iteration begins: at the vectors saved in the epoch before, or at random.
        vectors: What the saved vectors' numbers are kept in. "auto" takes as many bits as fit the device; 4 bits are enough
            for nearly the same norms.
        probes: Random vectors a step that the gradient of a whole layer's norm is taken from; 0 takes it from one singular
            pair, as published. Muon needs some where norms are not local.
        local_layers: Where the local methods take a norm per sample: in all layers as in the paper, or in the dense ones
            alone, which is faster. Little is lost where nearly all units of the convolutions vary, as on CIFAR-10.
        box_radii: Radii that cut the boxes: the paper's global ones, or the local ones found so far.
        intervals: Whether boxes are also cut with interval arithmetic. The balls are almost always tighter in a network
            trained this way, and without intervals a step needs a third less time.
        sparsity: Weight of the sparsity loss.
        theta_weight: Weight of its term at the upper threshold.
        threshold: Start of the learnable thresholds.
        init: How weights begin: as torch does it, convolutions by He et al. (fan-out, no bias), or orthogonal.
        augment: Changes of the training images: random crops from zero padding, and mirror images.
        crop_margin: Pixels of that padding on each side; 0 for an eighth of the height.
        precision: Arithmetic of training on a GPU; evaluation is in float32 and float64 always.
        ema: Decay per step of an average of the weights that replaces them at the end; 0 for none.
        attack_steps: Steps of the attack inside adversarial training and TRADES.
        trades_weight: Beta of TRADES.
        side: Own images are cropped to a square and resized to so many pixels a side; 0 leaves them as they are.
        images: Train on the first so many training images; 0 for all.
        validation: Hold out so many training images and report on them too; the test images are used at the end only.
        seed: Start of every random draw.
    """

    name: str
    data: DataName
    architecture: str
    method: Method
    eps: str
    eps_train: float
    epochs: float
    about: str = ""
    activation: str = "relu_theta"
    batch: int = 256
    learning_rate: float = 1e-3
    end_learning_rate: float = 1e-6
    decay_epoch: float = 0.0
    decay: Literal["exponential", "linear"] = "exponential"
    optimizer: Literal["adam", "muon"] = "adam"
    muon_rate: float = 0.02
    warmup_epochs: float = 0.0
    ramp_epochs: float = 0.0
    mix_target: float = 1.0
    power_steps: int = 2
    starts: Starts = "saved"
    vectors: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto"
    probes: int = 0
    local_layers: Literal["all", "dense"] = "all"
    box_radii: Literal["local", "global"] = "global"
    intervals: bool = True
    sparsity: float = 0.0
    theta_weight: float = 0.1
    threshold: float = 1.0
    init: Literal["default", "he", "orthogonal"] = "default"
    augment: Augment = "none"
    crop_margin: int = 0
    precision: Precision = "bfloat16"
    ema: float = 0.0
    attack_steps: int = 10
    trades_weight: float = 6.0
    side: int = 0
    images: int = 0
    validation: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_local(self) -> bool:
        return self.method in LOCAL_METHODS

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers of its own."""
        return self.method in ("at", "trades") or self.probes > 0 or (self.is_local and self.starts == "random")


def check(recipe: Recipe) -> None:
    """Refuse what cannot be run, naming the field, what it holds and what it may hold."""
    hints = get_type_hints(Recipe)
    for field in fields(Recipe):
        value, kind = getattr(recipe, field.name), hints[field.name]
        allowed = {"architecture": tuple(ARCHITECTURES), "activation": tuple(ACTIVATIONS)}.get(field.name, get_args(kind))
        if allowed and value not in allowed:
            raise WrongRecipe(
                f"{field.name} = {value!r}: choose one of {', '.join(map(str, allowed))}{_nearest(value, allowed)}"
            )
        if not allowed and not _is(value, kind):
            raise WrongRecipe(f"{field.name} = {value!r}: expected {_KINDS[kind]}")
    for name, least, most in _RANGES:
        value = getattr(recipe, name)
        if not least <= value <= most:
            raise WrongRecipe(f"{name} = {value}: must lie between {_plain(least)} and {_plain(most)}")
    radius(recipe)
    if not _NAME.fullmatch(recipe.name):
        raise WrongRecipe(f"name = {recipe.name!r}: it becomes a file's name, so letters, digits, '.', '_' and '-' only")
    if recipe.epochs == 0:
        raise WrongRecipe("epochs = 0: must be above 0")
    if recipe.end_learning_rate > recipe.learning_rate:
        raise WrongRecipe(
            f"end_learning_rate = {recipe.end_learning_rate} is above learning_rate = {recipe.learning_rate}; "
            "the rate only falls"
        )
    for name in ("decay_epoch", "ramp_epochs", "warmup_epochs"):
        if getattr(recipe, name) > recipe.epochs:
            raise WrongRecipe(f"{name} = {getattr(recipe, name):g} lies behind the last epoch, {recipe.epochs:g}")
    if recipe.method == "ibp" and not recipe.intervals:
        raise WrongRecipe("method 'ibp' is interval arithmetic: intervals = false cannot go with it")
    if recipe.probes and recipe.method not in (*LOCAL_METHODS, *GLOBAL_METHODS):
        raise WrongRecipe(f"probes = {recipe.probes}: method {recipe.method!r} has no norms to take a gradient of")
    if recipe.crop_margin and recipe.augment == "none":
        raise WrongRecipe(f"crop_margin = {recipe.crop_margin}: augment = 'none' takes no crops; try augment = 'crop'")
    if recipe.side and recipe.data != "own":
        raise WrongRecipe(f"side = {recipe.side}: images of {recipe.data} stay as they were published; only own are resized")
    if recipe.local_layers != "all" and not recipe.is_local:
        raise WrongRecipe(f"local_layers = {recipe.local_layers!r}: method {recipe.method!r} has no local norms")
    if recipe.starts != "saved" and not recipe.is_local:
        raise WrongRecipe(f"starts = {recipe.starts!r}: method {recipe.method!r} has no norms per sample to start")
    if recipe.vectors != "auto" and not (recipe.is_local and recipe.starts == "saved"):
        raise WrongRecipe(
            f"vectors = {recipe.vectors!r}: nothing is saved with method {recipe.method!r}, starts {recipe.starts!r}"
        )
    if recipe.sparsity and recipe.method in PLAIN_METHODS:
        raise WrongRecipe(f"sparsity = {recipe.sparsity}: method {recipe.method!r} has no boxes to make sparse")
    if recipe.warmup_epochs > recipe.ramp_epochs:
        raise WrongRecipe(
            f"warmup_epochs = {recipe.warmup_epochs:g} lies behind ramp_epochs = {recipe.ramp_epochs:g}, which includes it"
        )


def defaults() -> dict[str, Any]:
    """The fields that have a default: what a recipe written before they existed means."""
    return {field.name: field.default for field in fields(Recipe) if field.default is not dataclasses.MISSING}


def rescaled(recipe: Recipe, epochs: float) -> Recipe:
    """The same recipe for another number of epochs, its schedules stretched or shortened with them."""
    names = ("decay_epoch", "warmup_epochs", "ramp_epochs")
    ends = {name: min(epochs, getattr(recipe, name) * epochs / recipe.epochs) for name in names}  # never behind by rounding
    return dataclasses.replace(recipe, epochs=float(epochs), **ends)


def radius(recipe: Recipe) -> Fraction:
    """The exact eps."""
    try:
        if not _NUMBER.fullmatch(recipe.eps):  # a long exponent would keep Fraction busy for ever
            raise ValueError
        value = Fraction(recipe.eps)
    except (ValueError, ZeroDivisionError):
        raise WrongRecipe(f"eps = {recipe.eps!r} is neither a number nor a fraction such as 36/255") from None
    if not 0 < value <= 10**6:
        raise WrongRecipe(f"eps = {recipe.eps} must be above 0 and at most 1000000")
    return value


def _plain(number: float) -> str:
    return f"{number:,.0f}".replace(",", "") if 1 <= number < _INF and number == int(number) else f"{number:g}"


_INF = float("inf")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBER = re.compile(r"[+-]?[0-9./]{1,40}(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
#: Field, least and largest value.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("eps_train", 0.0, 1e6),
    ("epochs", 0.0, 1e6),
    ("batch", 1, 1_000_000),
    ("learning_rate", 1e-12, 1e3),
    ("end_learning_rate", 1e-12, 1e3),
    ("muon_rate", 1e-12, 1e3),
    ("decay_epoch", 0.0, _INF),
    ("warmup_epochs", 0.0, _INF),
    ("ramp_epochs", 0.0, _INF),
    ("mix_target", 0.0, 1.0),
    ("power_steps", 1, 1000),
    ("probes", 0, 1000),
    ("sparsity", 0.0, 1e6),
    ("theta_weight", 0.0, 1e6),
    ("threshold", 0.0, 1e6),
    ("ema", 0.0, 0.999999),
    ("crop_margin", 0, 1000),
    ("attack_steps", 1, 1000),
    ("trades_weight", 0.0, 1e6),
    ("side", 0, 10_000),
    ("images", 0, 10_000_000),
    ("validation", 0, 1_000_000),
    ("seed", 0, 2**31 - 1),
)

_KINDS: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _is(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def from_mapping(values: Mapping[str, Any], *, where: str) -> Recipe:
    """A recipe from the fields of a file; `where` names it in messages."""
    known = [field.name for field in fields(Recipe)]
    for name in values:
        if name not in known:
            raise WrongRecipe(f"{where}: unknown field {name!r}{_nearest(name, known)}; the fields are {', '.join(known)}")
    needed = [f.name for f in fields(Recipe) if f.default is dataclasses.MISSING and f.name not in values]
    if needed:
        raise WrongRecipe(f"{where}: missing {', '.join(needed)}")
    if _is(values["eps"], float):  # a file may give the number itself; text keeps fractions exact
        values = {**values, "eps": repr(values["eps"])}
    try:
        return Recipe(**values)
    except WrongRecipe as error:
        raise WrongRecipe(f"{where}: {error}") from None


def read(path: Path) -> Recipe:
    """The recipe in a TOML file; its name is the file's unless it says otherwise."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WrongRecipe(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongRecipe(f"{path} is not valid TOML: {error}") from None
    return from_mapping({"name": path.stem, **values}, where=str(path))


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find(name: str) -> Recipe:
    """A recipe by its name, or by the path of a TOML file of one's own."""
    if name.endswith(".toml"):
        return read(Path(name))
    if name not in names():
        own = f" (did you mean '{name}.toml'?)" if Path(f"{name}.toml").is_file() else _nearest(name, names())
        raise WrongRecipe(
            f"there is no recipe {name!r}{own}; `locallip recipes` lists them, and the path of a .toml "
            "file of your own works too"
        )
    return read(RECIPES / f"{name}.toml")


def _nearest(name: object, known: Any) -> str:
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
