"""The state of a run and its loop: steps, metrics, checkpoints, and what stops it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from locallip.data import ImageSet
from locallip.models import build_model, num_parameters
from locallip.processes import ALONE, Processes
from locallip.provenance import hardware, others_gb
from locallip.training.batches import Epoch, Images, margin_of, steps_per_epoch
from locallip.training.board import Board
from locallip.training.engine import Engine
from locallip.training.memory import plan_memory
from locallip.training.progress import FOOTNOTE, Display
from locallip.training.recipe import Recipe, WrongRecipe
from locallip.training.run_folder import Checkpoint, RunFolder, RunFolderError
from locallip.training.schedules import setting
from locallip.training.share import share_of

#: Saved vectors above this size are left out of checkpoints: a resumed run then begins with random ones.
LARGEST_SAVED_STARTS = 2 * 10**9
#: Power steps that follow them before it goes on: more than these bring less than the next epochs do
#: (benchmarks/cold_restart.py).
HEALING_STEPS = 8
#: Seconds between checkpoints, which come at the end of an epoch.
CHECKPOINT_SECONDS = 60.0
#: Steps, at most, and about the seconds between two questions of several processes to each other whether somebody wants to
#: stop: whoever starts them may kill them half a minute after having asked.
STEPS_BETWEEN_QUESTIONS, SECONDS_BETWEEN_QUESTIONS = 10, 1.0


class Stopped(KeyboardInterrupt):
    """Training was interrupted; everything is saved and `--resume` goes on."""


class Diverged(RuntimeError):
    """The loss is not finite; the message names the step, the layer and the last good checkpoint."""


def make_model(recipe: Recipe, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network of a recipe with its first weights, which follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        try:
            model = build_model(recipe.architecture, input_shape, classes, recipe.activation, recipe.threshold)
        except ValueError as error:  # images that are too small
            raise WrongRecipe(f"architecture = {recipe.architecture!r}: {error}") from None
        for layer in model:
            if recipe.init == "orthogonal" and isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.orthogonal_(layer.weight)
            if recipe.init == "he" and isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
    return model


class Run:
    """The state of one run between its first and its last step."""

    def __init__(
        self,
        recipe: Recipe,
        train: ImageSet,
        folder: RunFolder,
        device: torch.device,
        show: Display,
        compiled: bool | None = None,
        together: Processes = ALONE,
        data: str = "",
    ):
        self.compiled, self.together = compiled, together
        self.recipe, self.folder, self.device, self.show = recipe, folder, device, show
        self.count, self.shape = len(train.labels), tuple(train.images.shape[1:])
        self.class_names, self.classes = train.classes, len(train.classes)
        self.data = data  # a checksum of the training images
        self.model = make_model(recipe, self.shape, self.classes)
        self.margin = margin_of(recipe, self.shape[1])
        self.per_epoch = steps_per_epoch(self.count, recipe.batch)
        self.total = max(1, round(recipe.epochs * self.per_epoch))
        self.step, self.seconds, self.others, self.peak = 0, 0.0, 0.0, 0.0
        self.is_cold = False  # vectors are random in the middle of a run
        self.share = share_of(recipe.batch, self.count, together)
        self._train = train if together.size == 1 else train.take(self.share.samples(self.count))
        self.plan = plan_memory(recipe, self.model, self._train, device, self.share.part, together)
        self._next_question = 0

    def prepare(self, resume: bool, announce: bool = True) -> None:
        """Say what will be needed, check that it is there, and put images, network and state in place."""
        recipe, say = self.recipe, self.show.say
        size = f"{recipe.architecture.upper()} with {num_parameters(self.model):,} parameters"
        say(f"{recipe.name}: {size}, method {recipe.method}")
        say(f"  {self.count:,} images of {recipe.data}, {self.total:,} steps of {recipe.batch} on {self.machines}")
        plan = self.plan
        say(f"  {plan}" + (" in each process" if self.together.size > 1 else ""))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.images = Images(self._train.images, self._train.labels, self.margin, self.device, resident=plan.resident)
        about = (self.model, recipe, self.shape, self.count, self.device)
        self.engine = Engine(
            *about,
            compiled=self.compiled,
            starts_on=plan.home,
            starts_in=plan.dtype,
            together=self.together,
            share=self.share,
            pieces=plan.pieces,
        )
        kept = 0 if self.engine.starts is None else sum(self.together.all_gathered(self.engine.starts.nbytes()))
        self.saves_starts = 0 < kept <= LARGEST_SAVED_STARTS
        if self.together.first:
            state = sum(t.numel() * t.element_size() for t in self.engine.state().values())
            self.folder.check_space(3 * (state + (kept if self.saves_starts else 0)) + 10**6)
        if resume:
            self._resume()
        if announce:
            say(f"  run folder {self.folder.path}")

    @property
    def machines(self) -> str:
        """What this run computes on, for people."""
        here = hardware(self.device)
        return here if self.together.size == 1 else f"{self.together.size} processes, the first on {here}"

    def _resume(self) -> None:
        found = self._checkpoint()
        if found is None:
            self.show.say("  no checkpoint yet: starting from the beginning")
            if self.together.first:
                self.folder.truncate_metrics(0)
            return
        if found.values.get("data", self.data) != self.data:
            raise RunFolderError(
                f"the training images are others than those that the run in {self.folder.path} began with: put these back, "
                "or start anew with another --out"
            )
        self.engine.load_state(found.tensors)
        starts = self.engine.starts
        places = [] if starts is None else list(starts.rows)
        known = all(_starts_name(place) in found.tensors for place in places)
        mine = self.share.samples(self.count)
        for place in places:
            if known and starts is not None:
                rows = found.tensors[_starts_name(place)]
                starts.load(place, rows if self.together.size == 1 else rows[mine], found.values.get("channels_last"))
        self.step, self.seconds = int(found.values["step"]), float(found.values["seconds"])
        self.others, self.peak = (float(found.values.get(name, 0.0)) for name in ("others", "peak"))
        whole = self.step // self.per_epoch if self.step < self.total else math.ceil(self.total / self.per_epoch)
        if self.together.first:
            self.folder.truncate_metrics(whole)  # the last epoch may be a part of one
        self.show.say(f"  resumed at step {self.step:,} of {self.total:,}")
        self.is_cold = not known and self.step < self.total
        if self.is_cold:
            steps = f"{HEALING_STEPS} power steps on every image come first"
            self.show.say(f"  saved vectors were too large for the checkpoint and begin at random again: {steps}")

    def _heal(self) -> None:
        """Follow the vectors of all images for a while: random ones would make norms, and the loss with them, too small."""
        begin, epoch = time.perf_counter(), self.step // self.per_epoch
        at = setting(self.recipe, self.step / self.per_epoch)
        for batch in Epoch(self.count, self.recipe, self.margin, epoch, self.share).batches(self.images):
            self.engine.follow(batch, at, HEALING_STEPS)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - begin

    def _checkpoint(self) -> Checkpoint | None:
        """What the first process finds in the folder: the others may run where that cannot be read."""
        together = self.together
        found = self.folder.load(self.device if together.size == 1 else "cpu") if together.first else None
        about = together.from_first(None if found is None else (found.step, found.values))
        if about is None or together.size == 1:
            return found
        return Checkpoint(about[0], together.tensors_from_first({} if found is None else found.tensors), about[1])

    def save(self) -> None:
        """Write a checkpoint, which has the same content however many processes there are."""
        starts, sums = self._gathered_starts(), self.engine.mean_sums()
        if self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) / 1e9)
        if self.together.first:
            values: dict[str, Any] = {
                "data": self.data,
                "step": self.step,
                "seconds": self.seconds,
                "epoch": self.step / self.per_epoch,
                "others": self.others,
                "peak": self.peak,
            }
            if starts:
                values["channels_last"] = self.engine.layout.channels_last
            self.folder.save(self.step, self.engine.state() | starts | {"sums": sums}, values)
        self._saved_at, self._saved_step = time.perf_counter(), self.step

    def _gathered_starts(self) -> dict[str, Tensor]:
        """In the first process, the saved vectors of all samples in the order of these; none where they are too large."""
        starts, together = self.engine.starts, self.together
        if starts is None or not self.saves_starts:
            return {}
        self.engine.settle()
        if together.size == 1:
            return {_starts_name(place): rows.contiguous() for place, rows in starts.rows.items()}
        places = torch.arange(self.count) % self.share.batch // self.share.part  # whose each sample is
        gathered = {}
        for place, rows in starts.rows.items():
            parts = together.rows_to_first(rows)
            if parts:
                whole = gathered[_starts_name(place)] = torch.empty(self.count, rows.shape[1], dtype=rows.dtype)
                for rank, part in enumerate(parts):
                    whole[places == rank] = part
        return gathered

    def train(self, asked_to_stop: list[int], stop_after: float | None) -> None:
        """Epoch after epoch; the figures of each go to metrics.jsonl, checkpoints follow the clock."""
        self._saved_at = self._began = time.perf_counter()
        self._saved_step, self._first_step = -1, self.step
        board = Board(self.folder.path) if self.together.first else None
        if self.is_cold:
            self._heal()
        while self.step < self.total:
            epoch, first = divmod(self.step, self.per_epoch)
            order = Epoch(self.count, self.recipe, self.margin, epoch, self.share)
            begin, done = time.perf_counter(), 0
            for batch in order.batches(self.images, first):
                if self.step >= self.total:
                    break
                if self.recipe.draws:
                    torch.manual_seed(self.recipe.seed + 104_729 * self.step)
                at = setting(self.recipe, self.step / self.per_epoch)
                self.engine.step(batch, at)
                self.step += 1
                done += 1
                ends = self.step >= self.total or self.step % self.per_epoch == 0
                if not ends and self._asks() and self._must_stop(asked_to_stop, stop_after):
                    self._stop(begin)
            row = self._end_of_epoch(epoch + 1, at, begin, done)
            if board is not None:
                board.add(row)
            if self._must_stop(asked_to_stop, stop_after):  # only now: the figures of a whole epoch are a row of metrics
                self._stop()
        self.show.close()
        self.show.say(FOOTNOTE)

    def _asks(self) -> bool:
        """Whether it is time to look for a wish to stop: several processes must ask each other, which is not free."""
        return self.together.size == 1 or self.step >= self._next_question

    def _must_stop(self, asked: list[int], stop_after: float | None) -> bool:
        seconds = time.perf_counter() - self._began
        late = stop_after is not None and seconds > stop_after
        # All have the same sums, and so ask again at the same step.
        wishes, pace = self.together.sums(float(bool(asked) or late), seconds / max(1, self.step - self._first_step))
        steps = SECONDS_BETWEEN_QUESTIONS * self.together.size / max(pace, 1e-9)
        self._next_question = self.step + int(min(max(steps, 1), STEPS_BETWEEN_QUESTIONS))
        return wishes > 0

    def _end_of_epoch(self, epoch: int, at: Any, begin: float, done: int) -> dict[str, Any]:
        figures = self.engine.read_figures()  # waits for the device
        now = time.perf_counter()
        seconds = now - begin
        self.seconds += seconds
        self.others = max(self.others, others_gb(self.device))
        self._check_finite()
        # The first steps after a start or a resume take longer than those to come.
        rate = min(seconds / max(1, done), self.seconds / max(1, self.step))
        row = {"epoch": epoch, "step": self.step, **at._asdict(), **figures, "seconds": seconds}
        if self.together.first:
            self.folder.append_metrics(row)
        self.show.epoch({**row, "seconds_left": rate * (self.total - self.step)})
        if self.together.any(now - self._saved_at > CHECKPOINT_SECONDS) or self.step >= self.total:
            self.save()
        return row

    def _stop(self, begin: float | None = None) -> None:
        """Save and raise `Stopped`; `begin` is when the epoch began that this breaks off."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if begin is not None:
            self.seconds += time.perf_counter() - begin
        self._check_finite()
        if self._saved_step != self.step:
            self.save()
        self.show.close()
        self.show.say(f"stopped at step {self.step:,} of {self.total:,}; everything is saved, --resume goes on")
        raise Stopped

    def _check_finite(self) -> None:
        trouble = self._trouble()
        if trouble is None:
            return
        self.show.close()
        found = self.folder.saved_steps()
        last = "no checkpoint yet"
        if found:
            last = f"the last good checkpoint is {self.folder.checkpoints / f'state-{found[0]}.json'}"
        finer = ", or precision tf32" if self.recipe.precision == "bfloat16" and self.device.type == "cuda" else ""
        raise Diverged(f"{trouble}; {last}. Try a smaller learning_rate or a longer ramp_epochs{finer}, with another --out")

    def _trouble(self) -> str | None:
        """What is not finite: the loss of a step since the last look, or weights, which the last update may have spoiled."""
        if self.engine.trouble.step >= 0:
            step = self.step - (self.step - 1) % self.per_epoch + int(self.engine.trouble.step)
            return f"the loss is not finite at step {step:,} ({self._first_bad_layer()})"
        bad = self._first_bad_parameter()
        return None if bad is None else f"weights are not finite behind step {self.step:,} (first those of '{bad}')"

    def _first_bad_parameter(self) -> str | None:
        names, weights = zip(*self.model.named_parameters(), strict=True)
        fine = torch.stack([p.detach().isfinite().all() for p in weights]).tolist()
        return next((name for name, holds in zip(names, fine, strict=True) if not holds), None)

    def _first_bad_layer(self) -> str:
        """The first layer whose norm was not finite in the bad step; the loss alone where all of them were."""
        shown = self.engine.trouble.shown
        assert shown is not None
        begin = len(shown) - 2 * len(self.engine.layers) - len(self.engine.network.stages) + 1
        norms = shown[begin : begin + 2 * len(self.engine.layers)].tolist() if self.engine.has_bound else []
        for name, local, general in zip(self.engine.layers, norms, norms[len(self.engine.layers) :], strict=False):
            if not (math.isfinite(local) and math.isfinite(general)):
                return f"first in layer '{name}'"
        bad = self._first_bad_parameter()
        return "in the logits" if bad is None else f"in the logits; '{bad}' was the first parameter that it reached"


def _starts_name(place: tuple[int, int]) -> str:
    return f"starts.{place[0]}.{place[1]}"


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C, SIGTERM and a closed terminal fill the list instead of breaking a step; a second one breaks it.

    What was ignored before, as under nohup, stays so.
    """
    asked: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    except ValueError:  # not in the main thread: whoever called decides
        before = {}
    try:
        yield asked
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
