"""A whole run: data, network, steps, checkpoints, metrics, and at the end weights and figures in the run folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from locallip.data import ImageSet, Like, hold_out, load_images
from locallip.data.image_set import checksum
from locallip.data.own_set import NAME as OWN
from locallip.files import write_atomically
from locallip.models import num_parameters
from locallip.processes import ALONE, Processes, goes_on
from locallip.provenance import environment, hardware
from locallip.training.batches import margin_of
from locallip.training.evaluate import evaluate
from locallip.training.progress import Display, Silent, Undeterred, display, duration
from locallip.training.recipe import Recipe, WrongRecipe
from locallip.training.recipe import defaults as recipe_defaults
from locallip.training.run import Run, interrupts
from locallip.training.run_folder import RunFolder, RunFolderError
from locallip.zoo import load_model, save_model


@dataclass(frozen=True)
class Options:
    """How a run is carried out, as opposed to what it computes (Recipe)."""

    out: Path
    data_root: Path | None = None
    download: bool = False
    resume: bool = False
    device: torch.device | None = None
    compiled: bool | None = None  # by torch.compile; on a GPU unless told otherwise
    evaluate: bool = True  # on the test images
    validate: bool = True  # on the images held out, where the recipe holds some out
    limit: int | None = None
    announce: bool = True  # say where the run folder is
    results: Path | None = None  # where the result file goes too, under the recipe's name
    stop_after: float | None = None  # seconds after which a run saves and stops, as Ctrl-C makes it do
    together: Processes = ALONE  # this process among those that train the network together


def fit(recipe: Recipe, options: Options, show: Display | None = None) -> dict[str, Any]:
    """Train as the recipe says; returns what `result.json` in the run folder holds, in the first process."""
    together = options.together
    show = Undeterred(show or display()) if together.first else Silent()
    device = together.device(options.device)
    together.use(device)
    options = dataclasses.replace(options, resume=together.from_first(_resumes(options)))
    with together.one_per_machine_first():
        train, validation, test = _data(recipe, options, show.say)
    data = checksum(train.images, train.labels, train.classes)
    about = {"images": len(train.labels), "data": data, "locallip": environment()["locallip"]}
    together.check_same({**dataclasses.asdict(recipe), **about})
    if not options.resume and together.first:  # before there is a folder
        _check_results(options, recipe, test, data)
    # Refuses what cannot be shared or has no room, so before there is a folder, too.
    run = Run(recipe, train, RunFolder(options.out), device, show, options.compiled, together, data)
    with _folder(recipe, options):
        if together.first:
            _check_results(options, recipe, test, data)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            run.prepare(options.resume, options.announce)
            with interrupts() as asked_to_stop, closing(show):  # a live line hides the cursor until it is closed
                run.train(asked_to_stop, options.stop_after)
        together.part()
        if not together.first:
            return {}
        return _finish(run, validation, test if options.evaluate else None, options)


def _resumes(options: Options) -> bool:
    """Whether there is a run to go on with: torchrun starts the same command again after a process has died."""
    if options.resume or not (options.out / "config.json").is_file():
        return options.resume
    return goes_on(options.together, RunFolder(options.out).launched())


@contextmanager
def _folder(recipe: Recipe, options: Options) -> Iterator[None]:
    """The run folder, kept to this process; one that holds a run is not touched before it is ours."""
    folder, fields = RunFolder(options.out), dataclasses.asdict(recipe)
    if not options.together.first:
        yield
        return
    with ExitStack() as held:
        if options.resume and (options.out / "config.json").is_file():
            held.enter_context(folder.in_use())
        if not options.resume:
            folder.make()
            held.enter_context(folder.in_use())
        RunFolder.create(options.out, fields, options.resume, defaults=recipe_defaults())
        yield


def _data(recipe: Recipe, options: Options, say: Callable[[str], None]) -> tuple[ImageSet, ImageSet | None, ImageSet]:
    """Training, validation and test images; all are read first, so that a missing file does not cost a training."""
    root, fetch, side = options.data_root, options.download, recipe.side
    train = load_images(recipe.data, "train", root, download=fetch, say=say, side=side)
    like = Like(train.shape, train.classes)
    test = load_images(recipe.data, "test", root, download=fetch, say=say, side=side, like=like)
    margin_of(recipe, train.images.shape[2])  # refuses one that the images are too small for
    if recipe.images:
        if recipe.images > len(train.labels):
            raise WrongRecipe(f"images = {recipe.images}: {recipe.data} has {len(train.labels):,} training images")
        train = train.take(torch.arange(recipe.images))
    if not recipe.validation:
        return train, None, test
    try:
        train, validation = hold_out(train, recipe.validation)
    except ValueError as error:
        raise WrongRecipe(f"validation = {recipe.validation}: {error}") from None
    return train, validation, test


def _check_results(options: Options, recipe: Recipe, test: ImageSet, data: str) -> None:
    """See that a result can be written, and that it replaces no better one, before hours are spent on it."""
    if options.results is None:
        return
    folder, target = options.results, _result_path(options.results, recipe)
    try:
        older = json.loads(target.read_text())
        seen = (older.get("evaluation") or {}).get("images", 0)
        there, now = {**recipe_defaults(), **older["recipe"]}, dataclasses.asdict(recipe)
        differ = [
            f"{name} is {there.get(name)!r} there and {now.get(name)!r} now"
            for name in {**there, **now}
            if there.get(name) != now.get(name)
        ]
        if older["training"].get("data_sha256", data) != data:
            differ.append("its training images are others")
        known = (older.get("evaluation") or {}).get("data_sha256")
        if known is not None and known != checksum(test.images, test.labels):
            differ.append("its test images are others")
        if seen > min(options.limit or len(test), len(test)):
            differ.append(f"it looked at {seen:,} images")
        if differ:
            raise RunFolderError(
                f"{target} holds another result, which this run would replace: {'; '.join(differ)}. Name another folder "
                "with --results, or move that file away"
            )
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        pass  # nothing there, or nothing worth keeping
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunFolderError(f"no result can be written to {folder}: {error.strerror or error}") from None


def _finish(run: Run, validation: ImageSet | None, test: ImageSet | None, options: Options) -> dict[str, Any]:
    """Write the weights, evaluate them, and write what was found."""
    model, recipe = run.model, run.recipe
    if run.engine.average:
        with torch.no_grad():
            for p, mean in zip(model.parameters(), run.engine.average, strict=True):
                p.copy_(mean)
    model.eval()
    about = {
        "architecture": recipe.architecture,
        "activation": recipe.activation,
        "input_shape": list(run.shape),
        "classes": run.classes,
        "recipe": recipe.name,
        "eps": recipe.eps,
        "data": recipe.data,
        **({"side": recipe.side, "class_names": list(run.class_names)} if recipe.data == OWN else {}),
    }
    path = run.folder.path / "model.safetensors"
    # What is stored is what is evaluated: 16 bits a weight are enough, and half the size.
    largest = max(float(p.detach().abs().max()) for p in model.parameters())
    dtype = torch.float16 if largest < torch.finfo(torch.float16).max else None
    try:
        save_model(path, model, about, dtype)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}; --resume goes on from here") from None
    plain = load_model(path).to(run.device)
    say = run.show.say
    say(f"trained in {duration(run.seconds)}" + (f"; weights in {path}" if options.announce else ""))
    settings: dict[str, Any] = {"limit": options.limit, "seed": recipe.seed, "say": say}
    found = environment()
    result: dict[str, Any] = {
        "about": {
            **{key: found[key] for key in ("command", "commit", "date", "torch", "python")},
            "hardware": hardware(run.device),
            "processes": run.together.size,
            "seed": recipe.seed,
            "wall_seconds": round(run.seconds, 1),
        },
        "recipe": dataclasses.asdict(recipe),
        "training": {
            "seconds": round(run.seconds, 1),
            "epochs": recipe.epochs,
            "steps": run.total,
            "seconds_per_epoch": round(run.seconds / run.total * run.per_epoch, 3),
            "peak_memory_gb": round(run.peak, 2) or None,  # of the training, whatever process ends it
            "others_gb": round(run.others, 2),
            "starts_gb": round(run.engine.starts.nbytes() / 1e9, 3) if run.engine.starts else 0.0,
            "validation": None,
            "data_sha256": run.data,
        },
        "evaluation": None,
        "model": {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "parameters": num_parameters(model),
            "dtype": "float16" if dtype else "float32",
        },
    }
    run.engine.release()  # the evaluation has the device to itself
    if validation is not None and options.validate:
        say(f"evaluating {len(validation.labels):,} validation images")
        result["training"]["validation"] = evaluate(plain, validation, recipe.eps, **settings)
    if test is not None:
        say(f"evaluating {min(options.limit or 10**9, len(test.labels)):,} test images")
        result["evaluation"] = evaluate(plain, test, recipe.eps, **settings)
    _keep_better(result, run.folder.path / "result.json")
    _write_result(result, run.folder.path / "result.json")
    if options.results is not None and test is not None:  # a result is what was measured
        _write_result(result, _result_path(options.results, recipe))
    return result


def _result_path(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.name}{f'-seed{recipe.seed}' if recipe.seed else ''}.json"


def _keep_better(result: dict[str, Any], path: Path) -> None:
    """Where the run folder has an evaluation of the same weights on more images, it stays."""
    try:
        older = json.loads(path.read_text())
        same = older["model"]["sha256"] == result["model"]["sha256"]
        found, there = result["evaluation"] or {"images": 0}, older["evaluation"] or {"images": 0}
        of_others = {found.get("data_sha256"), there.get("data_sha256")} - {None}
        if same and there["images"] > found["images"] and len(of_others) < 2:
            result["evaluation"] = there
    except (OSError, ValueError, KeyError, TypeError):
        return


def _write_result(result: dict[str, Any], path: Path) -> None:
    try:
        write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}; --resume evaluates again") from None
