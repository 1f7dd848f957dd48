"""Attack the images of a data set, chunk by chunk, and count what is surely broken."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from locallip.arithmetic import autocast_off, is_out_of_memory
from locallip.attacks import Attempts, attack_in_turn, autoattack_attempts, strong_attempts
from locallip.balls import L2, Ball, as_ball
from locallip.breaking.against import Certified, compared
from locallip.breaking.rows import AttackRow, AttackSettings, contradictions, read_attack_rows, read_settings
from locallip.certify.confirm import Judge
from locallip.certify.inputs import as_eps
from locallip.data import ImageSet, pixels
from locallip.proofs.journal import Say, begin, chunks_of, continued, grow, seed_of, writing
from locallip.proofs.run import chunk_seed, data_checksum
from locallip.proofs.settings import write_about
from locallip.proofs.summary import wilson
from locallip.provenance import environment, hardware

Kind = Literal["pgd", "apgd", "strong", "autoattack"]
PIXELS = (0.0, 1.0)
#: The attacks of each kind, in their order; those of AutoAttack are its own.
KINDS: dict[Kind, tuple[str, ...]] = {
    "pgd": ("pgd",),
    "apgd": ("apgd-ce", "apgd-t"),
    "strong": ("pgd", "apgd-ce", "apgd-t"),
}
#: Images per chunk, in batches: what stands is packed into full batches. Rows are written a chunk at a time, so a chunk of
#: the small batches of a CPU is short.
BATCHES_PER_CHUNK, LARGE_BATCH, BATCHES_PER_LARGE_CHUNK = 2, 200, 8
#: Seconds between two lines of progress.
PATIENCE = 10.0


@dataclass(frozen=True)
class AttackJob:
    """What is attacked, and how; `seed=None` draws one and notes it."""

    model_name: str
    eps: str
    norm: str = L2.norm
    kind: Kind = "strong"
    steps: int = 100
    restarts: int = 1
    pixels: bool = False
    limit: int | None = None
    batch_size: int = 500
    seed: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    out: Path | None = None
    resume: bool = False

    @property
    def chunk(self) -> int:
        """Images whose rows are written together."""
        return self.batch_size * (BATCHES_PER_CHUNK if self.batch_size < LARGE_BATCH else BATCHES_PER_LARGE_CHUNK)

    @property
    def ball(self) -> Ball:
        return as_ball(self.norm)

    @property
    def domain(self) -> tuple[float, float] | None:
        return PIXELS if self.pixels or self.kind == "autoattack" else None


class Attacked(NamedTuple):
    """Rows, settings and summary of an attack; `run` says how many images it took how long for, this time."""

    rows: list[AttackRow]
    settings: AttackSettings
    summary: dict[str, Any]
    run: dict[str, Any]

    def about(self) -> dict[str, Any]:
        """What stands beside the rows."""
        return {"settings": asdict(self.settings), "summary": self.summary, "run": self.run}


def attack_images(
    job: AttackJob,
    model: nn.Module,
    images: ImageSet,
    say: Say = lambda line: None,
    certified: Certified | None = None,
) -> Attacked:
    """Attack the first images of a set; with `job.out` rows, settings and summary also go to disk, chunk by chunk.

    The attack runs on the model itself, in its dtype. What it finds counts as broken once a `Judge` has confirmed it. The
    summary says what that means for rows of `locallip certify`, where there are some.
    """
    with writing(job.out, say):
        return _attack_images(job, model, images, say, certified)


def _attack_images(job: AttackJob, model: nn.Module, images: ImageSet, say: Say, certified: Certified | None) -> Attacked:
    start = time.perf_counter()
    count = len(images) if job.limit is None else min(job.limit, len(images))
    images = images.take(torch.arange(count))
    known = continued(job.out, job.resume, read_settings)
    seed = seed_of(job.seed, known)
    model = model.to(job.device).eval()
    judge = Judge(model, images.shape, job.device, ball=job.ball)
    if job.kind == "autoattack":
        autoattack_attempts(
            model, judge.classes, seed=seed, ball=job.ball
        )  # says what is missing before anything is attacked
    settings = _settings(job, images, judge, seed)
    chunks = chunks_of(count, job.chunk)
    rows = begin(job.out, settings, known, chunks, read_attack_rows, lambda found: contradictions(found, settings, images))
    before = len(rows)
    if before:
        say(f"{before} images were attacked before; {count - before} to go")

    def attacked(chunk: slice) -> list[AttackRow]:
        return _Chunk(job, model, judge, images, chunk, chunk_seed(seed, chunk.start), say).rows()

    grow(job.out, rows, chunks, attacked, lambda found: f"{sum(row.stands for row in found)} not broken", say)
    summary = summarize(rows)
    if certified is not None:
        summary["against"] = compared(certified, rows)
    run = {"images": count - before, "seconds": round(time.perf_counter() - start, 3)}
    if job.out is not None:
        write_about(job.out, settings, summary, run)
    return Attacked(rows, settings, summary, run)


class _Chunk:
    """Some images next to each other, and the attack on those that are right."""

    def __init__(self, job: AttackJob, model: nn.Module, judge: Judge, images: ImageSet, chunk: slice, seed: int, say: Say):
        self.job, self.model, self.judge, self.seed, self.say = job, model, judge, seed, say
        self.first = chunk.start
        stored = next((p.dtype for p in model.parameters()), torch.float32)  # a file of ONNX may have float64
        self.x = pixels(images.images[chunk], job.device).to(stored)
        self.y = images.labels[chunk].to(job.device)
        self._spoken = time.perf_counter()

    def rows(self) -> list[AttackRow]:
        predictions = self.judge.predictions(self.x)
        right = (predictions == self.y).nonzero()[:, 0]
        by, distance = self._attacked(right) if len(right) else ([], [])
        fallen = {i: (name, far) for i, name, far in zip(right.tolist(), by, distance, strict=True) if name}
        return [
            AttackRow(self.first + i, label, best if best >= 0 else None, i in fallen, *fallen.get(i, (None, None)))
            for i, (label, best) in enumerate(zip(self.y.tolist(), predictions.tolist(), strict=True))
        ]

    def _attacked(self, index: Tensor) -> tuple[list[str | None], list[float]]:
        """For every image the attack that broke it, None for none, and how far the point is."""
        x, y = self.x[index], self.y[index]
        eps = as_eps(self.job.eps, len(x), x.device)
        batch_size = self.job.batch_size
        while True:
            attempts = self._attempts(batch_size)
            try:
                with torch.inference_mode(False), autocast_off():
                    outcome = attack_in_turn(attempts, x, y, eps, self._broken, self._told)
                break
            except (RuntimeError, MemoryError) as error:  # smaller batches, where there is no room for those asked for
                if batch_size == 1 or not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()
            batch_size = max(1, batch_size // 2)
        distance = self.judge.look(x, outcome.points, y, eps, self.job.domain).distance
        return [attempts[i].name if i >= 0 else None for i in outcome.by.tolist()], distance.tolist()

    def _attempts(self, batch_size: int) -> Attempts:
        job = self.job
        if job.kind == "autoattack":
            return autoattack_attempts(self.model, self.judge.classes, seed=self.seed, batch_size=batch_size, ball=job.ball)
        return strong_attempts(
            self.model,
            kinds=KINDS[job.kind],
            steps=job.steps,
            restarts=job.restarts,
            input_domain=job.domain,
            ball=job.ball,
            generator=torch.Generator(job.device).manual_seed(self.seed),
            batch_size=batch_size,
            progress=self._progress,
        )

    def _broken(self, x: Tensor, points: Tensor, y: Tensor, eps: Tensor) -> Tensor:
        return self.judge.look(x, points, y, eps, self.job.domain).broken

    def _told(self, name: str, tried: int, fell: int) -> None:
        self.say(f"images {self.first} to {self.first + len(self.x) - 1}: {name} broke {fell} of {tried}")
        self._spoken = time.perf_counter()

    def _progress(self, name: str, done: int, total: int) -> None:
        if time.perf_counter() - self._spoken > PATIENCE:
            self.say(f"  {name}: {100 * done / max(total, 1):.0f} %")
            self._spoken = time.perf_counter()


def summarize(rows: list[AttackRow]) -> dict[str, Any]:
    """Shares in per cent, with the interval of what stands, and who broke how many."""
    count, standing = len(rows), sum(row.stands for row in rows)
    low, high = wilson(standing, count)
    right = sum(row.prediction == row.label for row in rows)
    return {
        "images": count,
        "correct": 100 * right / max(count, 1),
        "robust_at_most": 100 * standing / max(count, 1),
        "robust_at_most_interval": [round(100 * low, 3), round(100 * high, 3)],
        "broken": right - standing,
        "broken_by": dict(Counter(row.by for row in rows if row.by is not None).most_common()),
    }


def describe(summary: dict[str, Any], settings: AttackSettings) -> str:
    """For people."""
    low, high = summary["robust_at_most_interval"]
    shares = "\n".join(f"  {n:6d}  {name}" for name, n in summary["broken_by"].items())
    where = "in [0, 1]" if settings.pixels else "anywhere in the ball"
    return (
        f"broken by\n{shares or '  nothing'}\n"
        f"clean accuracy {summary['correct']:.2f} %, under attack {summary['robust_at_most']:.2f} % of {summary['images']} "
        f"images (95 % interval of the share {low:.2f} to {high:.2f}), eps {settings.shown_eps}, points {where}\n"
        "This is an upper bound of the robust accuracy and no proof: another attack may break more. What is proved, "
        "`locallip certify` says."
    )


def _settings(job: AttackJob, images: ImageSet, judge: Judge, seed: int) -> AttackSettings:
    return AttackSettings(
        model=job.model_name,
        fingerprint=judge.fingerprint,
        data=images.name,
        split=images.split,
        images=len(images),
        data_sha256=data_checksum(images),
        eps=job.eps,
        attack=job.kind,
        steps=job.steps,
        restarts=job.restarts,
        pixels=job.domain is not None,
        batch_size=job.batch_size,
        seed=seed,
        hardware=hardware(job.device),
        environment=environment(),
        norm=job.norm,
    )
