"""Certify the images of a data set, chunk by chunk, into rows that a stopped run can go on from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from locallip.arithmetic import is_out_of_memory
from locallip.balls import L2
from locallip.certify import Certificate, Certifier, RadiusFinder, Verdict
from locallip.certify.inputs import as_eps
from locallip.certify.prover import Method
from locallip.data import ImageSet, pixels
from locallip.norms import Guarantee
from locallip.processes import ALONE, Processes, goes_on, launched
from locallip.proofs.check import contradictions, faults
from locallip.proofs.journal import begin, chunks_of, continued, grow, seed_of, writing
from locallip.proofs.rows import Row, read_rows, replace_rows
from locallip.proofs.settings import Settings, about_file, compared, mark_of, read_about, structure_of, write_about
from locallip.proofs.shared import forget, grow_together, recovered
from locallip.proofs.summary import shown, summarize
from locallip.provenance import environment, hardware, others_gb

#: Images per chunk, in batches: the cascade packs what is undecided of a chunk into full batches. Large batches are for
#: GPUs, which need many images to have work for all stages; small ones for CPUs, where a chunk would take minutes. Radii
#: cost more than verdicts, so their chunks stay small: what is on disk is not lost.
BATCHES_PER_CHUNK, LARGE_BATCH, BATCHES_PER_LARGE_CHUNK = 4, 200, 10

#: Several processes have at least so many chunks each, where there are images enough: the last ones end at different times.
CHUNKS_PER_PROCESS = 4

#: Seconds after which there is a word on how far it is.
PATIENCE = 5.0

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is to be certified, and how; `seed=None` draws one from the operating system and notes it.

    `radii` asks for a certified radius per image as well. The failure probability is then shared by verdict and radius.
    """

    model_name: str
    eps: str
    guarantee: Guarantee = Guarantee.HIGH_PROBABILITY
    failure_prob: float = 1e-9
    attack_steps: int = 20
    power_steps: int = 100
    limit: int | None = None
    batch_size: int = 64
    seed: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    out: Path | None = None
    resume: bool = False
    radii: bool = False
    method: Method = "auto"
    branch_seconds: float = 0.0
    deployed_dtype: str | None = None
    norm: str = L2.norm
    chunk: int | None = None  # images that are worked on and written together
    together: Processes = ALONE  # this process among those that share the work

    @property
    def share(self) -> float:
        """The failure probability of a verdict alone, and of a radius alone."""
        return self.failure_prob / 2 if self.radii else self.failure_prob

    def told(self, rows: Sequence[Row]) -> str:
        """What the rows so far come to, for people who wait."""
        word = "estimated robust" if self.guarantee is Guarantee.ESTIMATE else "certified"
        return f"{sum(row.verdict == Verdict.CERTIFIED for row in rows)} {word}"


def certify_images(
    job: Job, model: nn.Module, images: ImageSet, say: Callable[[str], None] = lambda line: None
) -> tuple[list[Row], Settings, dict[str, Any]]:
    """Rows, settings and summary for the first images of a set; with `job.out` also on disk, chunk by chunk.

    Where several processes share the work, the first one returns and writes what they have come to, the others nothing.
    """
    with writing(job.out if job.together.first else None, say):
        return _certify_images(job, model, images, say)


def _certify_images(
    job: Job, model: nn.Module, images: ImageSet, say: Callable[[str], None]
) -> tuple[list[Row], Settings, dict[str, Any]]:
    start, together = time.perf_counter(), job.together
    images = _first(images, job.limit)
    model = model.to(job.device)
    # What the first process alone would decide, and where the others would leave rows that nobody looks for.
    together.check_same({"seed": job.seed, "chunk": job.chunk, "out": None if job.out is None else job.out.name})
    known = _continued(job)
    seed, chunk = together.from_first((seed_of(job.seed, known), _chunk_size(job, known, len(images))))
    certifier = _certifier(job, model, images, seed)
    finder = _finder(job, certifier, images, seed) if job.radii else None
    settings = _settings(job, images, certifier, seed, chunk)
    together.check_same(compared(settings))
    chunks = chunks_of(len(images), chunk)
    rows, done = _found(job, settings, known, chunks, images)
    before = len(rows) + sum(map(len, done.values()))
    say(f"bound over all inputs: {shown(certifier.global_lipschitz, upwards=True)}; {len(images) - before} images to go")
    certifier.watch = _now_and_then(say)

    def work(chunk: slice) -> list[Row]:
        return _certify_chunk(job, certifier, finder, images, chunk, seed)

    if together.size == 1:
        grow(job.out, rows, chunks, work, job.told, say, done)
    else:
        rows = grow_together(together, job.out, mark_of(settings), rows, chunks, work, say, done)
        together.part()
    if not together.first:
        return [], settings, {}
    summary = summarize(rows)
    if job.out is not None:
        if together.size > 1:
            replace_rows(job.out, rows)
        seconds = round(time.perf_counter() - start, 3)
        run = {"images": len(rows) - before, "seconds": seconds, "others_gb": round(others_gb(job.device), 2)}
        write_about(job.out, settings, summary, {**run, "processes": together.size})
        forget(job.out)
    return rows, settings, summary


def _continued(job: Job) -> Settings | None:
    """The settings of the run that is to go on, in the first process: one that torchrun starts again goes on by itself."""
    if not job.together.first:
        return None
    return continued(job.out, job.resume or _is_own(job), lambda path: read_about(path)[0])


def _is_own(job: Job) -> bool:
    """Whether torchrun has started these processes again, for the rows that are there."""
    if job.out is None or not about_file(job.out).exists() or not (job.together.restarts or launched()):
        return False
    return goes_on(job.together, read_about(job.out)[0].environment.get("torchrun"))


def _found(
    job: Job, settings: Settings, known: Settings | None, chunks: list[slice], images: ImageSet
) -> tuple[list[Row], dict[int, list[Row]]]:
    """The rows of the first images, and whole chunks beyond them, that an earlier start of this run has left."""
    rows: list[Row] = []
    beyond: dict[int, list[Row]] = {}
    if job.together.first:
        read = partial(read_rows, whole=False)
        rows = begin(job.out, settings, known, chunks, read, lambda found: contradictions(found, settings, images))
        if known is None:
            forget(job.out)  # of a run whose rows somebody has removed
        beyond = recovered(job.out, mark_of(settings), chunks, read, lambda found: faults(found, settings, images))
        beyond = {first: found for first, found in beyond.items() if first >= len(rows)}
    job.together.wait()  # nobody writes before that
    return rows, beyond


def _now_and_then(say: Callable[[str], None]) -> Callable[[int], None]:
    """Says how many images of a chunk are undecided, where that takes long."""
    last = time.perf_counter()

    def watch(undecided: int) -> None:
        nonlocal last
        if time.perf_counter() - last > PATIENCE:
            last = time.perf_counter()
            say(f"  {undecided} images of this part are undecided")

    return watch


def _first(images: ImageSet, limit: int | None) -> ImageSet:
    """The first images, as a copy: their checksum stands beside the rows, and a caller may change what was handed over."""
    return images.take(torch.arange(len(images) if limit is None else min(limit, len(images))))


def _certifier(job: Job, model: nn.Module, images: ImageSet, seed: int) -> Certifier:
    return Certifier(
        model,
        images.shape,
        guarantee=job.guarantee,
        failure_prob=job.share,
        attack_steps=job.attack_steps,
        batch_size=job.batch_size,
        power_steps=job.power_steps,
        seed=seed,
        device=job.device,
        method=job.method,
        branch_seconds=job.branch_seconds,
        deployed_dtype=job.deployed_dtype,
        norm=job.norm,
    )


def _finder(job: Job, certifier: Certifier, images: ImageSet, seed: int) -> RadiusFinder:
    """It has norms of its own where they may fail: those of the verdicts are allowed fewer proofs per image."""
    alone = job.guarantee is Guarantee.HIGH_PROBABILITY
    return RadiusFinder(
        certifier.model,
        images.shape,
        guarantee=job.guarantee,
        failure_prob=job.share,
        batch_size=job.batch_size,
        power_steps=job.power_steps,
        seed=chunk_seed(seed, 0, "norms over all inputs for radii"),
        device=job.device,
        prover=None if alone else certifier.prover,
        method=job.method,
        branch_seconds=job.branch_seconds,
        deployed_dtype=job.deployed_dtype,
        norm=job.norm,
    )


def _settings(job: Job, images: ImageSet, certifier: Certifier, seed: int, chunk: int) -> Settings:
    return Settings(
        model=job.model_name,
        fingerprint=certifier.fingerprint,
        data=images.name,
        split=images.split,
        images=len(images),
        data_sha256=data_checksum(images),
        eps=job.eps,
        guarantee=job.guarantee.value,
        failure_prob=job.failure_prob if job.guarantee is Guarantee.HIGH_PROBABILITY else 0.0,
        attack_steps=job.attack_steps,
        power_steps=job.power_steps,
        batch_size=job.batch_size,
        seed=seed,
        hardware=hardware(job.device),
        environment={**environment(), "torchrun": launched()},
        radii=job.radii,
        method=job.method,
        branch_seconds=job.branch_seconds,
        deployed_dtype=job.deployed_dtype,
        structure=structure_of(certifier.model),
        chunk=chunk,
        norm=job.norm,
    )


def data_checksum(images: ImageSet) -> str:
    """SHA-256 of pixels and labels."""
    digest = hashlib.sha256(images.images.contiguous().numpy().tobytes())
    digest.update(images.labels.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _chunk_size(job: Job, known: Settings | None, count: int) -> int:
    """That asked for, else that of the run that goes on; several processes need enough chunks to share.

    The random numbers of a row follow from its chunk, so that rows are the same for any number of processes if chunks are.
    """
    if job.chunk or (known is not None and known.chunk):
        return job.chunk or (0 if known is None else known.chunk)
    large = job.batch_size >= LARGE_BATCH and not job.radii
    usual = job.batch_size * (BATCHES_PER_LARGE_CHUNK if large else BATCHES_PER_CHUNK)
    if job.together.size == 1:
        return usual
    return min(usual, max(job.batch_size, count // (CHUNKS_PER_PROCESS * job.together.size)))


def _certify_chunk(
    job: Job, certifier: Certifier, finder: RadiusFinder | None, images: ImageSet, chunk: slice, seed: int
) -> list[Row]:
    begin = time.perf_counter()
    x, y = pixels(images.images[chunk], job.device), images.labels[chunk]
    certificate = _in_memory(certifier, chunk_seed(seed, chunk.start), lambda: certifier(x, y, job.eps))
    eps = float(as_eps(job.eps, 1, torch.device("cpu")))
    radii = [None] * len(x) if finder is None else _radii(finder, certificate, x, y, chunk_seed(seed, chunk.start, "radii"))
    seconds = (time.perf_counter() - begin) / len(x)
    bound = _finite(certifier.global_lipschitz)
    return [
        Row(
            chunk.start + i,
            int(images.labels[chunk.start + i]),
            certificate.predictions[i],
            str(certificate.verdicts[i]),
            certificate.decided_by[i],
            certificate.guarantee.value,
            job.failure_prob if certificate.guarantee is Guarantee.HIGH_PROBABILITY else 0.0,
            eps,
            _finite(float(certificate.margin[i])),
            _finite(float(certificate.lipschitz[i])),
            bound,
            round(seconds, 6),
            radii[i],
            certificate.norm,
        )
        for i in range(len(x))
    ]


def _radii(finder: RadiusFinder, certificate: Certificate, x: Tensor, y: Tensor, seed: int) -> list[float | None]:
    """Certified radii that agree with the verdicts: at least eps where that is certified, and below it elsewhere.

    So an UNKNOWN image stays UNKNOWN, though other random numbers might just prove it: asking for radii changes no verdict.
    """
    radii = torch.zeros(len(x), dtype=torch.float64)
    # Images that are not surely right themselves have no radius.
    index = torch.tensor([i for i, check in enumerate(certificate.decided_by) if check != "clean logits"], dtype=torch.long)
    if len(index):
        certified, eps = certificate.certified[index], certificate.eps[index]
        least, below = torch.where(certified, eps, 0.0), torch.where(certified, float("inf"), eps)
        some, labels = x[index.to(x.device)], y[index]
        radii[index] = _in_memory(finder, seed, lambda: finder(some, labels, least=least, below=below)).cpu()
    return list(radii.tolist())


def chunk_seed(seed: int, first: int, what: str = "") -> int:
    """The random numbers of a chunk depend on the run's seed and its first image, not on what was certified before.

    Verdicts and radii have different ones: a verdict says where its image's radius is looked for, and the starts of a proof
    must not depend on that.
    """
    digest = hashlib.sha256(f"{seed} {first} {what}".strip().encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _in_memory(worker: Certifier | RadiusFinder, seed: int, work: Callable[[], T]) -> T:
    """Smaller batches, where the device has no room for those asked for."""
    whole = worker.batch_size
    try:
        while True:
            worker.seed_again(seed)
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if worker.batch_size == 1 or not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()
            worker.batch_size = max(1, worker.batch_size // 2)
    finally:
        worker.batch_size = whole


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
