"""One training step: eager or compiled on the CPU; on a GPU compiled and captured as one CUDA graph. One code for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from locallip.models import num_parameters
from locallip.network import Network, in_precision, lower
from locallip.norms import WarmStarts
from locallip.norms.rows import Rows
from locallip.norms.starts import Drawn, Place, jitter
from locallip.processes import ALONE, Processes
from locallip.training.batches import Batch
from locallip.training.carrier import Carrier
from locallip.training.muon import Muon
from locallip.training.objective import FIGURES, Objective, Vectors, layer_names, local_places, places
from locallip.training.recipe import Recipe
from locallip.training.schedules import Setting
from locallip.training.share import Share, share_of
from locallip.training.trouble import Trouble

#: Steps before a capture: compilation, choice of convolution algorithms, optimizer state.
WARMUP_STEPS = 3


class Engine:
    """Parameters, optimizer, saved vectors and sums of figures of one run; `step` trains on one batch.

    `compiled=None` compiles on CUDA and runs eagerly elsewhere; a compiled step is also captured as a graph on CUDA.
    The saved vectors live on `starts_on` (the device) as `starts_in` (bfloat16 on CUDA, float32 elsewhere; see `Rows`).
    `num_samples` counts those of all processes; vectors and batches are those of this one's `share` of them. Gradients and
    figures are the means over all processes, so that all of them keep the same weights. A batch is worked on in `pieces`.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        input_shape: tuple[int, ...],
        num_samples: int,
        device: torch.device,
        *,
        compiled: bool | None = None,
        starts_on: torch.device | None = None,
        starts_in: torch.dtype | None = None,
        together: Processes = ALONE,
        share: Share | None = None,
        pieces: int = 1,
    ):
        self.recipe, self.device, self.together = recipe, device, together
        self.share = share or share_of(recipe.batch, num_samples, together)
        if self.share.part % pieces:
            raise ValueError(f"{self.share.part} samples cannot be worked on in {pieces} equal pieces")
        self.pieces = pieces
        self.compiled = device.type == "cuda" if compiled is None else compiled
        self.captured = self.compiled and device.type == "cuda"
        self.model = model.to(device)
        if device.type == "cuda":
            lay_out_channels_last(self.model)
        self.network = lower(self.model, input_shape)
        self.has_bound = recipe.method not in ("standard", "at", "trades")
        self.layers = layer_names(self.network)
        usual = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._prepare_vectors(num_samples, starts_on or device, starts_in or usual)
        training_network = self._in_precision(self.network)
        self.objective = Objective(training_network, recipe, self.noise, self.layout)
        self.rate, self.muon_rate = (torch.tensor(r, device=device) for r in (recipe.learning_rate, recipe.muon_rate))
        self.optimizers = self._optimizers()
        self.average = [p.detach().clone() for p in self.model.parameters()] if recipe.ema else []
        self.eps, self.mix = torch.zeros(1, device=device), torch.zeros((), device=device)
        self.done = torch.zeros((), device=device)
        self.sums, self.trouble = self._empty_sums(), Trouble(device)
        summed = num_parameters(self.model) if together.size > 1 else 0
        self._gradients = torch.zeros(summed, device=device)
        self._buffers: Vectors = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._static: tuple[Batch, Vectors] | None = None
        self._after: Vectors = {}
        self._bounded: Callable[..., tuple[Tensor, Tensor, Vectors, Vectors]] = self.objective.bounded
        if self.compiled and self.has_bound:
            self._bounded = torch.compile(self.objective.bounded, fullgraph=True, dynamic=False)

    def _in_precision(self, network: Network) -> Network:
        if self.device.type == "cuda" and self.recipe.precision == "bfloat16":
            return in_precision(network, torch.bfloat16)
        return network

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for all parameters, or Muon for the matrices of all layers but the last and Adam for the rest."""
        everything = list(self.model.parameters())
        matrices = [p for name, p in self.model.named_parameters() if p.dim() in (2, 4) and name.endswith("weight")][:-1]
        if self.recipe.optimizer == "adam":
            matrices = []
        others = [p for p in everything if all(p is not m for m in matrices)]
        on_gpu = self.device.type == "cuda"
        rate = self.rate if on_gpu else self.recipe.learning_rate
        adam = torch.optim.Adam(others, lr=rate, fused=True if on_gpu else None, capturable=on_gpu)
        return [adam, Muon(matrices, self.muon_rate)] if matrices else [adam]

    def _prepare_vectors(self, num_samples: int, home: torch.device, dtype: torch.dtype) -> None:
        """Start vectors of every layer, and of every sample where the method needs them; `noise` is their jitter."""
        on_gpu = self.device.type == "cuda"
        shapes = places(self.network) if self.has_bound else {}
        lay = _channels_last if on_gpu else _as_is
        self.noise = {place: lay(jitter(place, shape).to(self.device)) for place, shape in shapes.items()}
        self.shared = {
            place: lay(_unit_noise(place, shape, self.recipe.seed).to(self.device)) for place, shape in shapes.items()
        }
        self.starts: WarmStarts | None = None
        self.layout = Rows(torch.float32, channels_last=on_gpu)  # of vectors drawn at random
        if self.recipe.is_local and self.recipe.starts == "saved":
            self.starts = WarmStarts(
                self.share.count(num_samples),
                dtype,
                home,
                channels_last=on_gpu,
                pinned_for=self.device if on_gpu and home.type == "cpu" else None,
                seed=self.recipe.seed,
                drawn=Drawn(self.share.batch, self.share.first, self.share.part),
            )
            self.starts.prepare(local_places(self.network, self.recipe))
            self.layout = self.starts.layout
        self._carrier: Carrier | None = None
        if self.starts is not None and self.starts.whole is not None:
            self._carrier = Carrier(self.starts, self.share.part, self.device)
        self.probes = self._empty_vectors(self.recipe.probes, shapes if self.recipe.probes else {})

    def _empty_sums(self) -> Tensor:
        count = len(FIGURES) + (2 * len(self.layers) + len(self.network.stages) - 1 if self.has_bound else 0)
        return torch.zeros(count, dtype=torch.float64, device=self.device)

    def step(self, batch: Batch, setting: Setting) -> None:
        """Train on one batch; figures are added up on the device, nothing waits for it."""
        self._set(setting)
        _drawn(self.probes)  # the same in all processes, while what is drawn for samples is not
        if self.recipe.draws and self.together.size > 1:
            torch.manual_seed(torch.initial_seed() + 1 + self.together.rank)
        vectors = self._take(batch)
        with arithmetic(self.recipe, self.device):
            if not self.captured:
                after = self._compute(batch, vectors)
            else:
                after = self._replay(batch, vectors)
        self._put_back(batch, after)

    @torch.no_grad()
    def follow(self, batch: Batch, setting: Setting, steps: int) -> None:
        """Take the saved vectors of a batch so many power steps further, and change nothing else; not compiled."""
        self._set(setting)
        vectors = self._take(batch)
        further = replace(self.recipe, power_steps=steps)
        objective = Objective(self.objective.network, further, self.noise, self.layout)
        size, found = len(batch.x) // self.pieces, []
        with arithmetic(self.recipe, self.device):
            for first in range(0, len(batch.x), size):
                piece = slice(first, first + size)
                rows = {place: u[piece] for place, u in vectors.items()}
                found.append(objective.bounded(batch.x[piece], batch.y[piece], self.eps, self.mix, rows, self.shared, {})[2])
        self._put_back(batch, {place: torch.cat([some[place] for some in found]) for place in vectors})

    def _set(self, setting: Setting) -> None:
        self.eps.fill_(setting.eps)
        self.mix.fill_(setting.mix)
        if self.device.type == "cuda":
            self.rate.fill_(setting.learning_rate)
        else:
            self.optimizers[0].param_groups[0]["lr"] = setting.learning_rate
        self.muon_rate.fill_(self.recipe.muon_rate * setting.learning_rate / self.recipe.learning_rate)

    def _take(self, batch: Batch) -> Vectors:
        """The rows (B, width) of the batch's samples where norms are local."""
        if self.recipe.is_local and not self._buffers:
            self._buffers = {
                place: torch.empty(
                    len(batch.x), self.layout.width(shape.numel()), dtype=self.layout.dtype, device=self.device
                )
                for place, shape in self.objective.local.items()
            }
        if self.starts is None:
            return _drawn(self._buffers)
        if self._carrier is not None:
            self._carrier.take(_in_host_memory(batch), self._buffers)
            if batch.coming is not None:
                self._carrier.fetch(batch.coming)
            return self._buffers
        return {place: self.starts.take(place, batch.index, into) for place, into in self._buffers.items()}

    def _empty_vectors(self, count: int, shapes: Mapping[Place, torch.Size]) -> Vectors:
        """Memory for vectors (count, *shape)."""
        lay = _channels_last if self.device.type == "cuda" else _as_is
        return {place: lay(torch.empty(count, *shape, device=self.device)) for place, shape in shapes.items()}

    def _put_back(self, batch: Batch, vectors: Vectors) -> None:
        if self._carrier is not None:
            self._carrier.put_back(_in_host_memory(batch), vectors)
            return
        if self.starts is None:
            return
        for place, u in vectors.items():
            self.starts.put_back(place, batch.index, u)

    def _compute(self, batch: Batch, vectors: Vectors) -> Vectors:
        """Loss, gradients, optimizer, figures; returns the batch's vectors after its power iterations."""
        loss, shown, after = self._differentiate(batch, vectors)
        self.together.add(self._gradients)
        self._update(loss, shown)
        return after

    def _differentiate(self, batch: Batch, vectors: Vectors) -> tuple[Tensor, Tensor, Vectors]:
        """Loss, figures and vectors; the gradients are left with the parameters, or in one tensor where they are summed.

        A batch that is too large for the device is worked on in `pieces`, one after the other: the means over equal pieces
        are those over the batch, and what one of them needed is free for the next.
        """
        for p in self.model.parameters():
            p.grad = None
        size = len(batch.x) // self.pieces
        found = []
        for first in range(0, len(batch.x), size):
            piece = slice(first, first + size)
            rows = {place: u[piece] for place, u in vectors.items()}
            loss, *rest = self._loss(batch.x[piece], batch.y[piece], rows)
            (loss / self.pieces).backward()
            found.append((loss.detach(), *rest))
        losses, shown, after, shared = zip(*found, strict=True)
        with torch.no_grad():
            for place, u in shared[-1].items():  # every piece began with the same
                self.shared[place].copy_(u)
            if self.together.size > 1:
                torch.cat([_gradient(p).reshape(-1) for p in self.model.parameters()], out=self._gradients)
            if self.pieces == 1:
                return losses[0], shown[0], after[0]
            whole = {place: torch.cat([some[place] for some in after]) for place in after[0]}
            return torch.stack(losses).mean(), torch.stack(shown).mean(0), whole

    def _loss(self, x: Tensor, y: Tensor, vectors: Vectors) -> tuple[Tensor, Tensor, Vectors, Vectors]:
        """Loss, figures, and the vectors of samples and layers after their power iterations."""
        if self.has_bound:
            return self._bounded(x, y, self.eps, self.mix, vectors, self.shared, self.probes)
        return *self.objective.attacked(x, y, self.eps, self.mix), {}, {}

    def _update(self, loss: Tensor, shown: Tensor) -> None:
        """Optimizers, figures and averages, once the gradients are there."""
        if self.together.size > 1:
            everything = list(self.model.parameters())
            means = (self._gradients / self.together.size).split([p.numel() for p in everything])
            for p, mean in zip(everything, means, strict=True):
                if p.grad is not None:
                    p.grad.copy_(mean.view_as(p))
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            self.trouble.watch(loss, shown, self.done)
            self.sums.add_(shown)
            self.done.add_(1)
            if self.average:
                torch._foreach_lerp_(self.average, list(self.model.parameters()), 1 - self.recipe.ema)

    def _replay(self, batch: Batch, vectors: Vectors) -> Vectors:
        """The same through CUDA graphs, captured with the first batch and fed through the buffers of that batch."""
        if not self._graphs:
            self._static = _copies(batch, vectors)
            self._capture()
        assert self._static is not None
        static, buffers = self._static
        for name in ("x", "y"):
            getattr(static, name).copy_(getattr(batch, name))
        for place, u in vectors.items():
            if buffers[place].data_ptr() != u.data_ptr():
                buffers[place].copy_(u)
        self._graphs[0].replay()
        if self.together.size > 1:
            self.together.add(self._gradients)
            self._graphs[1].replay()
        return self._after

    def _capture(self) -> None:
        """Warm up, capture, and put everything back as it was before; sums over processes stay outside of the graphs."""
        assert self._static is not None
        kept = self.state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                self._compute(*self._static)
        torch.cuda.current_stream().wait_stream(side)
        first = torch.cuda.CUDAGraph()
        if self.together.size == 1:
            with torch.cuda.graph(first):
                self._after = self._compute(*self._static)
            self._graphs = [first]
        else:
            second = torch.cuda.CUDAGraph()
            with torch.cuda.graph(first):
                loss, shown, self._after = self._differentiate(*self._static)
            with torch.cuda.graph(second, pool=first.pool()):
                self._update(loss, shown)
            self._graphs = [first, second]
        self.load_state(kept)

    def settle(self) -> None:
        """Wait until the samples' vectors are where they are kept."""
        if self._carrier is not None:
            self._carrier.settle()

    def release(self) -> None:
        """Give back the memory that steps alone need: the samples' vectors and the captured graph."""
        self._graphs, self._static, self._after, self._buffers, self.starts = [], None, {}, {}, None
        self._carrier = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def read_figures(self) -> dict[str, float | list[float]]:
        """Means since the last call, by name; empties the sums. Waits for the device."""
        count = max(1.0, float(self.done))
        self.together.add(self.sums)
        self.trouble.merge(self.together)
        values = (self.sums / (count * self.together.size)).tolist()
        self.sums.zero_()
        self.done.zero_()
        shown: dict[str, float | list[float]] = dict(zip(FIGURES, values, strict=False))
        if self.has_bound:
            rest, n = values[len(FIGURES) :], len(self.layers)
            shown |= {"local_norms": rest[:n], "global_norms": rest[n : 2 * n], "varying": rest[2 * n :]}
        return shown

    def mean_sums(self) -> Tensor:
        """The sums of figures so far, in the mean over all processes: any number of them can go on with that."""
        sums = self.sums.clone()
        self.together.add(sums)
        return sums / self.together.size

    def state(self) -> dict[str, Tensor]:
        """Everything that a run needs to go on exactly, as named tensors (the samples' vectors apart, see `starts`)."""
        tensors = {f"model.{name}": p.detach().clone() for name, p in self.model.state_dict().items()}
        for name, moments in self._moments():
            tensors |= {f"optimizer.{name}.{key}": value.detach().clone() for key, value in moments.items()}
        tensors |= {f"shared.{a}.{b}": u.clone() for (a, b), u in self.shared.items()}
        tensors |= {f"average.{i}": p.clone() for i, p in enumerate(self.average)}
        return tensors | {"sums": self.sums.clone(), "done": self.done.clone()}

    def _moments(self) -> list[tuple[str, dict[str, Tensor]]]:
        """The optimizers' state per parameter, made (as zeros) where no step has been taken yet."""
        names = {p: name for name, p in self.model.named_parameters()}
        made = []
        for optimizer in self.optimizers:
            for p in optimizer.param_groups[0]["params"]:
                state = optimizer.state[p]
                if not state and isinstance(optimizer, Muon):
                    state["momentum"] = torch.zeros_like(p)
                elif not state:
                    home = p.device if self.device.type == "cuda" else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=home)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                made.append((names[p], state))
        return made

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy a state in place: a captured graph goes on reading and writing the same memory."""
        for name, p in self.model.state_dict().items():
            p.copy_(tensors[f"model.{name}"])
        for name, moments in self._moments():
            for key, value in moments.items():
                value.copy_(tensors[f"optimizer.{name}.{key}"])
        for (a, b), u in self.shared.items():
            u.copy_(tensors[f"shared.{a}.{b}"])
        for i, p in enumerate(self.average):
            p.copy_(tensors[f"average.{i}"])
        self.sums.copy_(tensors["sums"])
        self.done.copy_(tensors["done"])


def lay_out_channels_last(model: nn.Module) -> None:
    """Keep weights and thresholds in the order (height, width, channels), in which GPU convolutions are fastest."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for p in model.parameters():
        if p.dim() == 3:
            p.data = p.data.permute(1, 2, 0).contiguous().permute(2, 0, 1)


@contextmanager
def arithmetic(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """TF32 products where the recipe allows them, for the time of a step."""
    if device.type != "cuda":
        yield
        return
    allowed = recipe.precision != "float32"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


def _in_host_memory(batch: Batch) -> Tensor:
    return batch.index.cpu() if batch.here is None else batch.here


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _copies(batch: Batch, vectors: Vectors) -> tuple[Batch, Vectors]:
    static = Batch(_channels_last(batch.x.clone()), batch.y.clone(), batch.index.clone())
    return static, dict(vectors)


def _unit_noise(place: tuple[int, int], shape: torch.Size, seed: int) -> Tensor:
    """A random direction, (1, *shape), the same on every device."""
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed + 7919 * place[0] + place[1]))
    return noise / noise.norm()


def _drawn(vectors: Vectors) -> Vectors:
    """Fill with fresh directions of length 1 in the mean."""
    for u in vectors.values():
        u.normal_(std=u[0].numel() ** -0.5)
    return vectors


def _channels_last(v: Tensor) -> Tensor:
    return v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v


def _as_is(v: Tensor) -> Tensor:
    return v
