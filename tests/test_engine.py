"""Training steps on a tiny problem: every method learns, repeats itself bit by bit, and shows figures that are true."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from locallip.attacks import pgd_l2
from locallip.bounds import global_bound, propagate, worst_logits
from locallip.losses import bcp_loss, gloro_loss, lmt_loss, sparsity_loss, trades_loss
from locallip.models import ACTIVATIONS
from locallip.network import in_precision
from locallip.norms import BatchStarts, ExactNorm, NormKey, PowerNorm, WarmStarts
from locallip.norms.rows import Rows
from locallip.training.batches import Batch
from locallip.training.engine import Engine
from locallip.training.muon import Muon, orthogonalized
from locallip.training.objective import DUAL_STEPS, layer_names, places
from locallip.training.recipe import Method, Recipe
from locallip.training.run import make_model
from locallip.training.schedules import Setting

CPU = torch.device("cpu")
SHAPE, CLASSES, COUNT = (1, 8, 8), 4, 24
METHODS = get_args(Method)
#: What each method takes for the worst logits: the best of box and ball, or one of them alone.
FORMS = {"local-b": "box_ball", "local-g": "box_ball", "bcp": "box_ball", "gloro": "ball", "lmt": "lmt", "ibp": "box"}
BOUNDED = tuple(FORMS)
AT = Setting(3e-3, 0.1, 0.7)
FROZEN = Setting(1e-12, 0.1, 0.7)  # weights stay what they are to the last digit that a comparison sees


def recipe(**fields):
    base = {"name": "t", "data": "embedded", "architecture": "small", "method": "local-b", "eps": "0.1", "eps_train": 0.1}
    return Recipe(**{**base, "epochs": 10.0, "batch": 12, "learning_rate": 3e-3, "attack_steps": 2, **fields})


def make_engine(r, **settings):
    torch.manual_seed(r.seed)  # saved vectors begin at random
    return Engine(make_model(r, SHAPE, CLASSES), r, SHAPE, COUNT, CPU, **settings)


def two_batches(dtype=torch.float32):
    """24 images of four classes that noise does not hide; every sample once."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(COUNT) % CLASSES
    x = (torch.rand(CLASSES, *SHAPE, generator=draw)[y] + 0.2 * torch.rand(COUNT, *SHAPE, generator=draw)).clamp(0, 1)
    order = torch.randperm(COUNT, generator=draw)
    return [Batch(x[part].to(dtype), y[part], part) for part in order.split(12)]


def train(engine, steps, at=AT, first=0):
    """As a run does it: methods that draw are seeded step by step."""
    batches = two_batches()
    for number in range(first, first + steps):
        if engine.recipe.draws:
            torch.manual_seed(engine.recipe.seed + 104_729 * number)
        engine.step(batches[number % 2], at)


def loss_of(engine, batch, at=AT):
    """The loss of a batch as the method defines it, from the library's parts and exact norms."""
    r, network, x, y = engine.recipe, engine.network, batch.x, batch.y
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        if r.method == "standard":
            return F.cross_entropy(engine.model(x), y)
        if r.method in ("at", "trades"):
            target = engine.model(x).softmax(1) if r.method == "trades" else None
            eps = torch.full((len(x),), at.eps)
            point = pgd_l2(engine.model, x, y, eps, steps=r.attack_steps, input_domain=(0.0, 1.0), target=target)
            attacked = engine.model(point)
            if r.method == "at":
                return F.cross_entropy(attacked, y)
            return trades_loss(engine.model(x), attacked, y, r.trades_weight)
        trace, logits, _ = exact(engine, batch, at)
        loss = {"local-g": gloro_loss, "gloro": gloro_loss, "lmt": lmt_loss}.get(r.method)
        value = loss(logits, y) if loss else bcp_loss(logits, y, at.mix)
        return value + r.sparsity * sparsity_loss(network, trace, r.theta_weight)


class Unmasked(ExactNorm):
    """The norm of the whole operator under every mask, as BCP, GloRo and LMT have it; not of dense layers if asked."""

    def __init__(self, ceiling, dense_too=True):
        self.ceiling, self.dense_too = ceiling, dense_too

    def norm(self, op, key, like):
        if len(op.out_shape) == 1 and not self.dense_too:
            return super().norm(op, key, like)
        return self.ceiling.norms[key]


def exact(engine, batch, at=AT):
    """Trace, worst logits and global bound of a method with norms by SVD."""
    r, network = engine.recipe, engine.network
    eps = torch.full((len(batch.x),), at.eps)
    with torch.no_grad():
        ceiling = global_bound(network, ExactNorm(), eps)
        trace = propagate(
            network,
            batch.x,
            eps,
            ExactNorm() if r.is_local and r.local_layers == "all" else Unmasked(ceiling, dense_too=not r.is_local),
            ceiling=None if r.method == "ibp" else ceiling,
            box_radii="input" if r.method == "ibp" else r.box_radii,
            intervals=r.intervals,
        )
        return trace, worst_logits(network, trace, batch.y, form=FORMS[r.method], steps=DUAL_STEPS), ceiling


def full_state(engine):
    rows = {f"starts.{place}": rows.clone() for place, rows in engine.starts.rows.items()} if engine.starts else {}
    return engine.state() | rows


def load(engine, state):
    engine.load_state(state)
    if engine.starts is not None:
        for place, rows in engine.starts.rows.items():
            rows.copy_(state[f"starts.{place}"])


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.nan_to_num(-1.0), other[name].nan_to_num(-1.0)), name


# ---------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_a_few_steps_lower_the_loss(method, activation):
    engine = make_engine(recipe(method=method, activation=activation))
    before = sum(loss_of(engine, batch) for batch in two_batches())
    train(engine, 16)
    after = sum(loss_of(engine, batch) for batch in two_batches())
    assert after < before * 0.97
    assert engine.trouble.step < 0


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "muon", "muon_rate": 0.02},
        {"box_radii": "local"},
        {"intervals": False},
        {"starts": "random"},
        {"sparsity": 0.1},
        {"method": "local-g", "optimizer": "muon", "activation": "maxmin"},
        {"init": "orthogonal"},
        {"init": "he"},
        {"method": "bcp", "optimizer": "muon", "probes": 3, "activation": "relu"},
        {"optimizer": "muon", "probes": 3, "local_layers": "dense"},
    ],
    ids=str,
)
def test_a_few_steps_lower_the_loss_with_other_options(fields):
    engine = make_engine(recipe(**fields))
    before = sum(loss_of(engine, batch) for batch in two_batches())
    train(engine, 16)
    assert sum(loss_of(engine, batch) for batch in two_batches()) < before * 0.97


def test_thresholds_learn_too():
    engine = make_engine(recipe(threshold=0.05))  # low enough that units reach it
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    train(engine, 4)
    assert all(not torch.equal(p, before[name]) for name, p in engine.model.named_parameters())
    assert len(before) == 2 * 4 + 3


# ------------------------------------------------------------------------------------------------------- determinism

VARIANTS = [
    *({"method": method} for method in METHODS),
    {"starts": "random"},
    {"optimizer": "muon", "ema": 0.9},
    {"activation": "maxmin", "method": "local-g"},
    {"activation": "clipped_maxmin", "sparsity": 0.01},
    {"method": "gloro", "probes": 3},
    {"local_layers": "dense", "probes": 3},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_the_same_seed_gives_the_same_bits(fields):
    engines = [make_engine(recipe(**fields)) for _ in range(2)]
    for engine in engines:
        train(engine, 5)
    assert_equal_states(*map(full_state, engines))


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_a_loaded_state_goes_on_bit_by_bit(fields):
    whole = make_engine(recipe(**fields))
    train(whole, 3)
    state = full_state(whole)
    kept = {name: value.clone() for name, value in state.items()}
    train(whole, 3, first=3)
    assert_equal_states(state, kept)  # a state is a copy
    torch.manual_seed(99)
    resumed = Engine(make_model(recipe(seed=5), SHAPE, CLASSES), recipe(**fields), SHAPE, COUNT, CPU)
    if fields.get("activation"):
        resumed = make_engine(recipe(**fields))
        train(resumed, 2)
    load(resumed, state)
    train(resumed, 3, first=3)
    assert_equal_states(full_state(whole), full_state(resumed))


@pytest.mark.parametrize("pieces", [2, 3, 12])
@pytest.mark.parametrize(
    "fields", [{}, {"method": "gloro", "optimizer": "muon", "probes": 4}, {"method": "standard"}], ids=str
)
def test_pieces_of_a_batch_come_to_the_whole(fields, pieces):
    """Up to the order of sums. Catches: sums for means, layers' vectors that take a step with every piece, mixed-up rows."""
    whole, cut = make_engine(recipe(**fields)), make_engine(recipe(**fields), pieces=pieces)
    for engine in (whole, cut):
        train(engine, 3)
    theirs = cut.state()
    for name, value in whole.state().items():
        if name == "sums":  # the figures below, with gaps where there is no bound
            continue
        scale = max(float(value.double().abs().max()), 1e-9)
        assert float((value.double() - theirs[name].double()).abs().max()) <= 2e-3 * scale, name
    if whole.starts is not None:
        for place, rows in whole.starts.rows.items():
            assert torch.allclose(rows, cut.starts.rows[place], atol=2e-3)
    figures = zip(whole.read_figures().items(), cut.read_figures().values(), strict=True)
    for (name, value), other in figures:
        assert other == pytest.approx(value, rel=2e-3, nan_ok=True), name


def test_pieces_must_be_equal():
    with pytest.raises(ValueError, match="12 samples cannot be worked on in 5 equal pieces"):
        make_engine(recipe(), pieces=5)


def test_looking_at_the_state_before_the_first_step_changes_nothing():
    looked, plain = (make_engine(recipe(optimizer="muon")) for _ in range(2))
    looked.state()
    for engine in (looked, plain):
        train(engine, 3)
    assert_equal_states(full_state(looked), full_state(plain))


# ----------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("method", "activation"), [*(("local-b", a) for a in ACTIVATIONS), *((m, "relu_theta") for m in BOUNDED[1:])]
)
def test_figures_are_those_of_a_direct_computation(method, activation):
    engine = make_engine(recipe(method=method, activation=activation, power_steps=100))
    train(engine, 4)
    train(engine, 4, FROZEN)  # for the vectors
    engine.read_figures()
    parts = [exact(engine, batch) for batch in two_batches()]
    expected = {
        "clean_loss": [F.cross_entropy(engine.model(b.x), b.y) for b in two_batches()],
        "worst_loss": [F.cross_entropy(z.worst, b.y) for (_, z, _), b in zip(parts, two_batches(), strict=True)],
        "clean": [(engine.model(b.x).argmax(1) == b.y).float().mean() for b in two_batches()],
        "robust": [(z.worst.argmax(1) == b.y).float().mean() for (_, z, _), b in zip(parts, two_batches(), strict=True)],
        "local_bound": [trace.lipschitz.mean() for trace, _, _ in parts],
        "global_bound": [ceiling.total[0] for _, _, ceiling in parts],
        "local_norms": [torch.stack([norm.mean() for norm in trace.norms.values()]) for trace, _, _ in parts],
        "global_norms": [torch.cat(list(ceiling.norms.values())) for _, _, ceiling in parts],
        "varying": [torch.stack([v.outputs.float().mean() for v in trace.varying]) for trace, _, _ in parts],
    }
    train(engine, 2, FROZEN)
    shown = engine.read_figures()
    assert shown.keys() == expected.keys()
    for name, values in expected.items():
        mean = torch.stack([value.detach() for value in values]).mean(0)
        torch.testing.assert_close(torch.tensor(shown[name]), mean, rtol=2e-3, atol=1e-4, check_dtype=False, msg=name)
    assert len(shown["varying"]) == 3
    assert len(shown["local_norms"]) == len(layer_names(engine.network)) == 4


OPTIONS = [
    {"sparsity": 0.3, "theta_weight": 0.2},
    {"box_radii": "local"},
    {"method": "bcp", "probes": 3},
    {"local_layers": "dense"},
    {"local_layers": "dense", "probes": 3},
]


@pytest.mark.parametrize("fields", [*({"method": method} for method in METHODS), *OPTIONS], ids=str)
def test_the_loss_is_the_one_that_the_method_defines(fields):
    engine = make_engine(recipe(power_steps=100, **fields))
    train(engine, 4)
    train(engine, 4, FROZEN)  # for the vectors
    batch = two_batches()[0]
    arguments = (batch.x, batch.y, torch.tensor([AT.eps]), torch.tensor(AT.mix))
    torch.manual_seed(1)
    if engine.has_bound:
        loss = engine.objective.bounded(*arguments, engine._take(batch), engine.shared, engine.probes)[0]
    else:
        loss = engine.objective.attacked(*arguments)[0]
    torch.testing.assert_close(loss.detach(), loss_of(engine, batch), rtol=2e-3, atol=1e-5)


def test_intervals_count_where_asked_for():
    """Low thresholds and a large radius make boxes that interval arithmetic cuts further than the ball."""
    wide, losses = Setting(1e-12, 1.0, 0.7), []
    for intervals in (True, False):
        engine = make_engine(recipe(power_steps=100, threshold=0.02, intervals=intervals))
        train(engine, 4, wide)
        engine.read_figures()
        train(engine, 2, wide)
        shown = engine.read_figures()["worst_loss"]
        exact_loss = [F.cross_entropy(exact(engine, b, wide)[1].worst, b.y) for b in two_batches()]
        assert shown == pytest.approx(float(sum(exact_loss)) / 2, rel=2e-3)
        losses.append(shown)
    assert losses[0] < 0.99 * losses[1]


def test_figures_begin_anew_when_read():
    engine = make_engine(recipe())
    train(engine, 2, FROZEN)
    first = engine.read_figures()
    train(engine, 4, FROZEN)
    second = engine.read_figures()
    assert second["clean_loss"] == pytest.approx(first["clean_loss"], rel=1e-5)
    assert float(engine.done) == 0.0


def test_figures_of_plain_training_have_no_bound():
    engine = make_engine(recipe(method="standard"))
    expected = sum(loss_of(engine, batch) for batch in two_batches()) / 2
    train(engine, 2, FROZEN)
    shown = engine.read_figures()
    assert shown["clean_loss"] == shown["worst_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert shown["local_bound"] != shown["local_bound"]
    assert "local_norms" not in shown


def test_the_first_loss_that_is_not_finite_is_noted_with_its_step():
    engine = make_engine(recipe())
    train(engine, 3)
    assert engine.trouble.step == -1
    with torch.no_grad():
        engine.model[2].weight[0, 0, 0, 0] = float("inf")
    train(engine, 2, first=3)
    assert engine.trouble.step == 3
    engine.read_figures()
    assert engine.trouble.step == 3


# --------------------------------------------------------------------------------------------------- saved vectors


def local_norms(engine):
    return torch.tensor(engine.read_figures()["local_norms"], dtype=torch.float64)


def exact_local_norms(engine):
    parts = [torch.stack([n.mean() for n in exact(engine, batch)[0].norms.values()]) for batch in two_batches()]
    return torch.stack(parts).mean(0).double()


@pytest.mark.parametrize("power_steps", [1, 2])
def test_saved_vectors_bring_the_estimate_to_the_norm_over_epochs(power_steps):
    engine = make_engine(recipe(power_steps=power_steps))
    expected = exact_local_norms(engine)
    errors = []
    for _ in range(25):
        train(engine, 2, FROZEN)
        errors.append((expected - local_norms(engine)) / expected)
    errors = torch.stack(errors)
    assert (errors > -1e-4).all()  # power iteration approaches from below
    assert (errors[0] > 0.1).any()
    assert (errors.diff(dim=0) < 1e-4).all()  # every epoch is as good as the one before or better
    assert (errors[-1] < 0.02).all()


def test_the_same_number_of_random_starts_stays_where_it_is():
    """What the comparison above would show without saved vectors."""
    engine = make_engine(recipe(power_steps=1, starts="random"))
    assert engine.starts is None
    expected = exact_local_norms(engine)
    for number in range(10):
        train(engine, 2, FROZEN, first=2 * number)
        last = (expected - local_norms(engine)) / expected
    assert (last > 0.1).any()


def test_random_starts_are_new_in_every_step_of_length_one_in_the_mean_and_enough_steps_find_the_norm():
    engine = make_engine(recipe(starts="random", power_steps=150))
    batch = two_batches()[0]
    one = {place: rows.clone() for place, rows in engine._take(batch).items()}
    other = engine._take(batch)
    for place, shape in places(engine.network).items():
        assert one[place].shape == (len(batch.x), shape.numel())
        assert not torch.equal(one[place], other[place])
        assert float((one[place] ** 2).sum(1).mean()) == pytest.approx(1.0, abs=0.3)
    train(engine, 2, FROZEN)
    torch.testing.assert_close(local_norms(engine), exact_local_norms(engine), rtol=2e-3, atol=0)


def test_dense_layers_alone_have_saved_vectors_where_norms_are_local_there_alone():
    engine = make_engine(recipe(local_layers="dense", probes=3))
    outputs = {place: engine.network.stages[place[0]].linear_shape for place in places(engine.network)}
    assert set(engine.starts.rows) == {place for place, shape in outputs.items() if len(shape) == 1}
    assert 0 < len(engine.starts.rows) < len(outputs)
    assert set(engine.probes) == set(outputs)
    before = {place: u.clone() for place, u in engine.probes.items()}
    train(engine, 1)
    assert all(not torch.equal(u, before[place]) for place, u in engine.probes.items())


def test_a_step_touches_the_vectors_of_its_samples_alone():
    engine = make_engine(recipe())
    before = {place: rows.clone() for place, rows in engine.starts.rows.items()}
    first, second = two_batches()
    engine.step(first, AT)
    for place, rows in engine.starts.rows.items():
        assert torch.equal(rows[second.index], before[place][second.index])
        assert not (rows[first.index] == before[place][first.index]).all(1).any()
        lengths = rows[first.index].norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-4, atol=0)


@pytest.mark.parametrize("pieces", [1, 3])
def test_following_changes_the_vectors_alone_and_brings_them_to_the_norm(pieces):
    engine = make_engine(recipe(power_steps=1), pieces=pieces)
    layers = BatchStarts(engine.shared, engine.noise)
    global_bound(engine.network, PowerNorm(400, layers, torch.zeros(1, dtype=torch.long)), torch.zeros(1))
    for place, u in layers.vectors.items():  # those of whole layers, which cap all others, are known after a resume
        engine.shared[place].copy_(u)
    expected, before = exact_local_norms(engine), engine.state()
    first, second = two_batches()
    untouched = {place: rows[second.index].clone() for place, rows in engine.starts.rows.items()}
    engine.follow(first, AT, 400)
    assert all(torch.equal(rows[second.index], untouched[place]) for place, rows in engine.starts.rows.items())
    engine.follow(second, AT, 400)
    assert all(torch.equal(value, before[name]) for name, value in engine.state().items())
    train(engine, 2, FROZEN)
    torch.testing.assert_close(local_norms(engine), expected, rtol=2e-3, atol=0)


def test_vectors_wholly_inside_removed_columns_recover():
    engine = make_engine(recipe(power_steps=1))
    expected = exact_local_norms(engine)
    for batch in two_batches():
        trace = exact(engine, batch)[0]
        for place, rows in engine.starts.rows.items():
            if place[1] > 0:
                removed = ~trace.varying[place[1] - 1].outputs.flatten(1).bool()
                assert removed.any(1).all()
                rows[batch.index] = F.normalize(removed.float(), dim=1)
    for _ in range(25):
        train(engine, 2, FROZEN)
        found = local_norms(engine)
    assert ((expected - found) / expected < 0.03).all()


#: What is read may be so far, in shares of its length, from what was kept.
NEAR = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.int8: 0.015, torch.uint8: 0.25}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", NEAR)
def test_warm_starts_give_back_what_was_put_in_either_layout(channels_last, dtype):
    shapes = {(0, 0): torch.Size((3, 4, 5)), (1, 1): torch.Size((7,))}
    starts = WarmStarts(10, dtype, channels_last=channels_last)
    starts.prepare(shapes)
    index = torch.tensor([7, 2, 9])
    for place, shape in shapes.items():
        u = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
        u = u / u.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
        u = u.to(dtype) if dtype.is_floating_point else u
        others = starts.rows[place][[0, 1, 3, 4, 5, 6, 8]].clone()
        starts.put(NormKey(*place, "layer"), index, u)
        into = torch.empty(3, starts.layout.width(shape.numel()), dtype=dtype)
        taken = starts.take(place, index, into)
        assert taken.data_ptr() == into.data_ptr()
        read = starts.layout.vectors(taken, shape)
        assert (read - u).flatten(1).norm(dim=1).max() <= NEAR[dtype]
        assert torch.equal(starts.get(NormKey(*place, "layer"), shape, index), read)
        assert torch.equal(starts.rows[place][[0, 1, 3, 4, 5, 6, 8]], others)
        if channels_last and len(shape) == 3:
            assert read.is_contiguous(memory_format=torch.channels_last)
        starts.put_back(place, index.flip(0), taken)
        assert torch.equal(starts.take(place, index, torch.empty_like(into)), taken.flip(0))
    numbers = 60 * dtype.itemsize + 7 * dtype.itemsize if dtype != torch.uint8 else 30 + 4
    assert starts.nbytes() == 10 * numbers


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_keep_what_they_read(dtype):
    """Keeping what was read changes nothing any more; zeros, huge and tiny vectors stay finite."""
    layout, shape = Rows(dtype), torch.Size((501,))
    u = torch.randn(4, 501, generator=torch.Generator().manual_seed(2)) ** 3
    u[1], u[2], u[3] = 0.0, u[2] * 1e30, u[3] * 1e-35
    rows = layout.lay(u)
    read = layout.vectors(rows, shape)
    assert torch.isfinite(read).all()
    assert not read[1].any()
    torch.testing.assert_close(read[[0, 2, 3]].norm(dim=1), torch.ones(3))
    assert torch.equal(layout.lay(read), rows)
    if dtype == torch.int8:
        small = u[0].abs() < u[0].abs().max() / 300  # equal steps of 1/127 would lose these
        assert (read[0][small] != 0).float().mean() > 0.5


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_few_bits_lead_to_the_norms_of_many(dtype):
    """Norms found epoch after epoch from vectors kept in codes: as good as from numbers."""
    engine = make_engine(recipe(power_steps=2), starts_in=dtype)
    assert engine.starts.nbytes() < make_engine(recipe()).starts.nbytes() / (3.9 if dtype == torch.int8 else 7.8)
    for _ in range(25):
        train(engine, 2, FROZEN)
        found = local_norms(engine)
    expected = exact_local_norms(engine)
    assert ((expected - found) / expected < 0.01).all()


def test_both_layouts_lead_to_the_same_norms():
    engine = make_engine(recipe())
    batch, eps = two_batches()[0], torch.full((12,), 0.1)
    shapes = places(engine.network)
    rules = []
    for channels_last in (False, True):
        starts = WarmStarts(COUNT, torch.float32, channels_last=channels_last)
        starts.prepare(shapes)
        for place in shapes:
            vectors = engine.starts.rows[place].view(COUNT, *shapes[place])
            starts.put_back(place, torch.arange(COUNT), starts.layout.lay(vectors))
        rules.append(PowerNorm(3, starts, batch.index))
    with torch.no_grad():
        plain, other = (propagate(engine.network, batch.x, eps, rule).norms for rule in rules)
    for key, norm in plain.items():
        torch.testing.assert_close(norm, other[key], rtol=1e-5, atol=0)


# -------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("activation", ["relu_theta", "maxmin"])
@pytest.mark.parametrize("method", ["local-b", "bcp", "lmt"])
def test_sixteen_bits_give_nearly_the_same_loss_and_gradient(method, activation):
    engine = make_engine(recipe(method=method, activation=activation, power_steps=10))
    batch = two_batches()[0]
    eps, mix = torch.tensor([0.1]), torch.tensor(0.7)
    found = []
    for network in (engine.network, in_precision(engine.network, torch.bfloat16)):
        engine.objective.network = network
        vectors = {place: u.clone() for place, u in engine._take(batch).items()}
        loss, shown, _, _ = engine.objective.bounded(batch.x, batch.y, eps, mix, vectors, engine.shared, {})
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(engine.model.parameters()))])
        found.append((loss.detach(), shown, gradient))
    (loss, shown, gradient), (rough_loss, rough_shown, rough_gradient) = found
    assert not torch.equal(loss, rough_loss)
    torch.testing.assert_close(rough_loss, loss, rtol=1e-2, atol=0)
    torch.testing.assert_close(rough_shown[4:6], shown[4:6], rtol=2e-2, atol=0)
    assert F.cosine_similarity(gradient, rough_gradient, dim=0) > 0.99


@pytest.mark.parametrize(
    "fields", [{}, {"local_layers": "dense", "probes": 3}, {"method": "gloro"}, {"method": "bcp", "probes": 3}]
)
def test_the_loss_is_one_graph_with_the_same_gradients(fields):
    """Traced as a whole and differentiated ahead of time, as on a GPU, and then computed operation by operation."""
    eager, traced = (make_engine(recipe(**fields)) for _ in range(2))
    traced._bounded = torch.compile(traced.objective.bounded, fullgraph=True, dynamic=False, backend="aot_eager")
    for engine in (eager, traced):
        train(engine, 2)
    torch._dynamo.reset()
    torch.testing.assert_close(traced.sums, eager.sums, rtol=1e-3, atol=1e-4)
    for one, other in zip(eager.model.parameters(), traced.model.parameters(), strict=True):
        # Adam's first steps have the size of the rate whatever the gradient: one that is nearly 0 may take either sign.
        assert ((one - other).abs() < 1e-4).float().mean() > 0.97


# -------------------------------------------------------------------------------------------------- average and Muon


def test_the_average_follows_the_weights():
    engine = make_engine(recipe(ema=0.8))
    expected = [p.detach().clone() for p in engine.model.parameters()]
    for number in range(5):
        train(engine, 1, first=number)
        expected = [0.8 * mean + 0.2 * p.detach() for mean, p in zip(expected, engine.model.parameters(), strict=True)]
    for mean, value in zip(engine.average, expected, strict=True):
        torch.testing.assert_close(mean, value, rtol=1e-5, atol=1e-6)
    assert make_engine(recipe()).average == []


def with_singular_values(values, rows, cols, seed=0):
    draw = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=draw))[0]
    v = torch.linalg.qr(torch.randn(cols, cols, generator=draw))[0]
    return u @ torch.diag(torch.tensor(values)) @ v[: len(values)]


def matrices():
    draw = torch.Generator().manual_seed(0)
    yield "random", torch.randn(12, 40, generator=draw)
    yield "square", torch.linalg.qr(torch.randn(16, 16, generator=draw))[0] + 0.3 * torch.randn(16, 16, generator=draw)
    yield "one row", torch.randn(1, 30, generator=draw)
    yield "ill-conditioned", with_singular_values([1.0, 0.5, 0.1, 0.03, 0.02, 0.01], 6, 20)
    yield "huge", 1e15 * torch.randn(8, 20, generator=draw)
    yield "tiny", 1e-6 * torch.randn(8, 20, generator=draw)


@pytest.mark.parametrize(("name", "matrix"), list(matrices()), ids=lambda value: value if isinstance(value, str) else "")
def test_orthogonalized_matrices_keep_their_singular_vectors_and_lose_their_values(name, matrix):
    found = orthogonalized(matrix[None])[0]
    values = torch.linalg.svdvals(found)
    assert 0.6 < values.min() <= values.max() < 1.3, (name, values)
    u, _, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    inside = u.T @ found @ v.T  # diagonal where the singular vectors are the same
    assert (inside - inside.diag().diag()).abs().max() < 2e-2


def test_a_direction_that_vanishes_stays_small_and_a_zero_matrix_zero():
    nearly_flat = orthogonalized(with_singular_values([1.0, 1e-9], 2, 5)[None])[0]
    values = torch.linalg.svdvals(nearly_flat)
    assert values.isfinite().all()
    assert values[0] < 1.3
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def muon_step(shapes, lr=0.1, together=True, seed=0):
    """How far one step moves parameters of these shapes with random gradients."""
    draw = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw)
    for group in [params] if together else [[p] for p in params]:
        Muon(group, lr).step()
    return [(p.grad, (p.detach() - old)) for p, old in zip(params, before, strict=True)]


SHAPES = [(6, 4), (4, 9), (8, 3, 4, 4), (30, 5), (3, 2100)]


def test_a_muon_step_has_a_spectral_norm_of_about_its_rate_and_goes_down_the_gradient():
    for gradient, moved in muon_step(SHAPES):
        values = torch.linalg.svdvals(moved.flatten(1))
        assert 0.06 < values.min() <= values.max() < 0.13
        assert (gradient * moved).sum() < 0
        u, _, v = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
        assert F.cosine_similarity(moved.flatten(), -(u @ v).flatten(), dim=0) > 0.95


def test_padding_to_a_common_size_changes_nothing():
    for (_, together), (_, alone) in zip(muon_step(SHAPES), muon_step(SHAPES, together=False), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


def test_a_zero_gradient_moves_nothing_and_a_missing_one_neither():
    one, other = (torch.nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    before = one.detach().clone(), other.detach().clone()
    one.grad = torch.zeros(3, 4)
    Muon([one, other], 0.1).step()
    assert torch.equal(one, before[0])
    assert torch.equal(other, before[1])


def test_muon_has_a_memory_that_a_state_carries():
    engine = make_engine(recipe(optimizer="muon"))
    matrices = [name for name, p in engine.model.named_parameters() if p.dim() in (2, 4)]
    assert engine.optimizers[1].param_groups[0]["params"] == [
        dict(engine.model.named_parameters())[n] for n in matrices[:-1]
    ]
    train(engine, 3)
    state = engine.state()
    for name in matrices[:-1]:
        assert state[f"optimizer.{name}.momentum"].abs().max() > 0
    assert f"optimizer.{matrices[-1]}.exp_avg" in state


def test_muons_rate_falls_with_adams():
    engine = make_engine(recipe(optimizer="muon", muon_rate=0.5))
    train(engine, 1, Setting(3e-4, 0.1, 0.7))
    assert float(engine.muon_rate) == pytest.approx(0.05)
    assert engine.optimizers[0].param_groups[0]["lr"] == 3e-4


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_every_parameter_has_exactly_one_optimizer(optimizer):
    engine = make_engine(recipe(optimizer=optimizer))
    held = [p for o in engine.optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, engine.model.parameters()))
