"""Bad input: every kind has a stated outcome; nothing is certified wrongly and nothing fails with a bare torch error."""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest
import torch
from torch import nn

import locallip as ll
from locallip import Verdict
from locallip.certify.inputs import as_eps

NAN, INF = float("nan"), float("inf")
FUNCTIONS = ["local_lipschitz", "certify", "certified_radius"]


def make_model(activation=nn.ReLU, classes=3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), activation(), nn.Linear(12, 8), activation(), nn.Linear(8, classes)).eval()


def make_batch(model, size=4):
    """Inputs with the labels that the model gives them."""
    x = torch.randn(size, 5, generator=torch.Generator().manual_seed(1))
    return x, model(x).argmax(1)


def call(name, model, x, y, eps=0.05, **options):
    """One of the three functions of a batch, with the arguments that it takes."""
    args = {"local_lipschitz": (x, eps), "certify": (x, y, eps), "certified_radius": (x, y)}[name]
    return getattr(ll, name)(model, *args, **{"seed": 0, **options})


def unless_refused(word, compute):
    """What `compute` returns, or None where it refuses with this word in its message: as good as a bound."""
    try:
        return compute()
    except ValueError as error:
        if word not in str(error):
            raise
        return None


# Values that are not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "value"),
    [(nn.ReLU, NAN), (nn.ReLU, INF), (nn.ReLU, -INF), (nn.Tanh, NAN), (nn.Tanh, -INF), (nn.ELU, INF), (ll.MaxMin, -INF)],
)
def test_one_bad_sample_gets_nothing_and_the_others_all(activation, value):
    model = make_model(activation)
    x, y = make_batch(model)
    bad = x.clone()
    bad[1, 2] = value
    others = [0, 2, 3]
    certificate, clean = ll.certify(model, bad, y, 0.01, seed=0), ll.certify(model, x, y, 0.01, seed=0)
    assert certificate.verdicts[1] is Verdict.UNKNOWN
    assert [certificate.verdicts[i] for i in others] == [clean.verdicts[i] for i in others]
    bound, expected = ll.local_lipschitz(model, bad, 0.05), ll.local_lipschitz(model, x, 0.05)
    assert bound[1] == INF
    torch.testing.assert_close(bound[others], expected[others], rtol=0.01, atol=0)
    radius, expected = ll.certified_radius(model, bad, y), ll.certified_radius(model, x, y)
    assert radius[1] == 0
    torch.testing.assert_close(radius[others], expected[others], rtol=0.05, atol=0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["2.weight", "0.bias"])
def test_weights_that_are_not_finite_are_named(name, value):
    model = make_model()
    x, y = make_batch(model)
    dict(model.named_parameters())[name].data.view(-1)[0] = value
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=name):
            call(function, model, x, y)
    with pytest.raises(ValueError, match=name):
        ll.global_lipschitz(model, (5,))


def test_buffers_that_are_not_finite_are_named():
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    model[0].running_var[1] = NAN
    with pytest.raises(ValueError, match=r"0\.running_var"):
        ll.local_lipschitz(model, torch.zeros(2, 5), 0.1)


# eps ---------------------------------------------------------------------------------------------------------------------

BAD_EPS = [-0.1, NAN, INF, "abc", "1/0", "", "nan", "inf", "-1/255", "1e400", 10**400, None, [0.1, 0.2], [0.1] * 5]
BAD_EPS += [[0.1, 0.1, NAN, 0.1], [0.1, -0.1, 0.1, 0.1], ["a"] * 4, torch.tensor([0.1, 0.2]), torch.full((4,), NAN)]


@pytest.mark.parametrize("eps", BAD_EPS, ids=lambda eps: str(eps)[:20])
def test_bad_eps(eps):
    model = make_model()
    x, y = make_batch(model)
    for function in ("local_lipschitz", "certify"):
        with pytest.raises((ValueError, TypeError), match="eps"):
            call(function, model, x, y, eps)


@pytest.mark.parametrize("text", ["36/255", "0.1", "1/3", "2/255", "1e-3", "72/255", "1/10", "123456789/987654321"])
def test_fractions_are_never_rounded_down(text):
    value = as_eps(text, 2, torch.device("cpu"))
    assert value.dtype == torch.float64
    assert [Fraction(v) >= Fraction(text) for v in value.tolist()] == [True, True]
    assert abs(Fraction(value[0].item()) - Fraction(text)) <= Fraction(text) * Fraction(1, 2**51)


@pytest.mark.parametrize(
    "eps", [Fraction(1, 10), "1/10", 0.1, [0.1] * 4, torch.full((4,), 0.1, dtype=torch.float64), [Fraction(1, 10)] * 4]
)
def test_ways_to_write_eps(eps):
    model = make_model()
    x, y = make_batch(model)
    expected = call("local_lipschitz", model, x, y, 0.1)
    torch.testing.assert_close(call("local_lipschitz", model, x, y, eps), expected, rtol=1e-3, atol=0)


def test_integer_eps():
    model = make_model()
    x, y = make_batch(model)
    assert call("certify", model, x, y, 0).eps.tolist() == [0.0] * 4
    assert call("certify", model, x, y, 2).eps.tolist() == [2.0] * 4


def test_eps_per_sample_equals_separate_calls():
    model = make_model()
    x, y = make_batch(model)
    radii = [0.0, 0.01, 0.2, 3.0]
    options = {"guarantee": "deterministic"}
    together = call("certify", model, x, y, radii, **options)
    bounds = call("local_lipschitz", model, x, y, torch.tensor(radii), **options)
    for i, eps in enumerate(radii):
        alone = call("certify", model, x[i : i + 1], y[i : i + 1], eps, **options)
        assert alone.verdicts[0] is together.verdicts[i]
        bound = call("local_lipschitz", model, x[i : i + 1], y[i : i + 1], eps, **options)
        # float32 values of eps are a little off their decimal text.
        torch.testing.assert_close(bound[0], bounds[i], rtol=1e-5, atol=0)


# x, y and the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_x(function):
    model = make_model()
    x, y = make_batch(model)
    with pytest.raises(ValueError, match="shape"):
        call(function, model, x[:, :4], y)
    with pytest.raises(ValueError, match="shape"):
        call(function, model, x[:, :0], y)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        call(function, model, x[0], y[:1])
    with pytest.raises(TypeError, match="floating-point"):
        call(function, model, x.long(), y)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        call(function, model, x.tolist(), y)
    with pytest.raises(ValueError, match="input_domain"):
        call(function, model, x, y, input_domain=(0.0, 1.0))
    with pytest.raises(ValueError, match="input_domain"):
        call(function, model, x, y, input_domain=(5.0, -5.0))
    with pytest.raises(ValueError, match="input_domain"):
        call(function, model, x, y, input_domain=(NAN, 5.0))


@pytest.mark.parametrize("function", ["certify", "certified_radius"])
def test_bad_labels(function):
    model = make_model()
    x, y = make_batch(model)
    for labels in (y + 3, y - 3, torch.tensor([0, 1, 2, 3])):
        with pytest.raises(ValueError, match=r"0\.\.2"):
            call(function, model, x, labels)
    for labels in (y.float(), y[:3], y[:, None], y > 0, torch.zeros(4, 3)):
        with pytest.raises(ValueError, match="4 integer labels"):
            call(function, model, x, labels)
    for labels in (None, "abcd"):
        with pytest.raises((TypeError, ValueError), match=r"y must be|labels"):
            call(function, model, x, labels)


def test_labels_of_other_integer_types():
    model = make_model()
    x, y = make_batch(model)
    expected = call("certify", model, x, y).verdicts
    for labels in (y.to(torch.uint8), y.int(), y.tolist(), y.numpy()):
        assert call("certify", model, x, labels).verdicts == expected


@pytest.mark.parametrize("function", FUNCTIONS)
def test_model_that_is_no_module(function):
    model = make_model()
    x, y = make_batch(model)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        call(function, lambda z: z, x, y)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        call(function, nn.Linear, x, y)


def test_global_bound_of_no_module():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ll.global_lipschitz(lambda z: z, (5,))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_options(function):
    model = make_model()
    x, y = make_batch(model)
    for guarantee in ("certain", None, 3):
        with pytest.raises(ValueError, match="'high_probability'"):
            call(function, model, x, y, guarantee=guarantee)
    for probability in (0, 1, -0.5, 2.0, NAN, 1e-16, 5e-324):
        with pytest.raises(ValueError, match="failure_prob"):
            call(function, model, x, y, failure_prob=probability)
    with pytest.raises(ValueError, match="seed must be a whole number of 64 bits"):
        call(function, model, x, y, seed=2**64)
    for size in (0, -1):
        with pytest.raises(ValueError, match="batch_size"):
            call(function, model, x, y, batch_size=size)


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic", "estimate"])
def test_empty_batch(guarantee):
    model = make_model()
    x, y = torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)
    for domain in (None, (0.0, 1.0)):
        options = {"guarantee": guarantee, "input_domain": domain}
        certificate = call("certify", model, x, y, **options)
        assert certificate.verdicts == []
        assert certificate.certified.shape == certificate.margin.shape == certificate.eps.shape == (0,)
        assert "0 of 0" in str(certificate)
        assert call("local_lipschitz", model, x, y, **options).shape == (0,)
        assert call("certified_radius", model, x, y, **options).shape == (0,)
        assert call("certify", model, x, y, [], **options).verdicts == []


def test_one_class():
    model = make_model(classes=1)
    x, y = make_batch(model)
    for function in ("certify", "certified_radius"):
        with pytest.raises(ValueError, match="at least 2 classes"):
            call(function, model, x, y)
    assert bool((call("local_lipschitz", model, x, y) > 0).all())


def test_output_that_is_no_vector_of_logits():
    model, x = nn.Sequential(nn.Conv2d(1, 2, 2)), torch.zeros(1, 1, 3, 3)
    with pytest.raises(ValueError, match="classes"):
        ll.certify(model, x, torch.tensor([0]), 0.1)
    assert ll.local_lipschitz(model, x, 0.1).shape == (1,)


def test_layer_too_large_for_a_deterministic_proof():
    model = nn.Sequential(
        nn.Conv2d(3, 160, 3, padding=1), nn.ReLU(), nn.Conv2d(160, 160, 3, padding=1), nn.ReLU(), nn.Flatten()
    )
    model.append(nn.Linear(160 * 16 * 16, 2))
    with pytest.raises(ll.LayerTooLarge, match=r"'2'.*guarantee='high_probability'"):
        ll.certify(model, torch.zeros(1, 3, 16, 16), torch.tensor([0]), 0.1, guarantee="deterministic")


# Degenerate networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic", "estimate"])
def test_all_constant_layer(guarantee):
    """All units of a layer are off on the ball: nothing varies, so the bound is 0 and the clean label is certified."""
    model = make_model()
    model[0].bias.data.fill_(-100.0)
    x, y = make_batch(model)
    assert call("local_lipschitz", model, x, y, 0.5, guarantee=guarantee).tolist() == [0.0] * 4
    assert ll.global_lipschitz(model, (5,), guarantee=guarantee) > 0
    certificate = call("certify", model, x, y, 0.5, guarantee=guarantee)
    assert certificate.verdicts == [Verdict.CERTIFIED] * 4
    wrong = call("certify", model, x, (y + 1) % 3, 0.5, guarantee=guarantee)
    assert wrong.verdicts == [Verdict.MISCLASSIFIED] * 4
    assert bool((call("certified_radius", model, x, y, guarantee=guarantee) > 0.5).all())


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic", "estimate"])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_zero_weights(layer, guarantee):
    model = make_model()
    model[layer].weight.data.zero_()
    x, y = make_batch(model)
    assert call("local_lipschitz", model, x, y, 1.0, guarantee=guarantee).tolist() == [0.0] * 4
    assert ll.global_lipschitz(model, (5,), guarantee=guarantee) == 0
    assert call("certify", model, x, y, 1.0, guarantee=guarantee).verdicts == [Verdict.CERTIFIED] * 4
    assert bool((call("certified_radius", model, x, y, guarantee=guarantee) > 1.0).all())


@pytest.mark.parametrize("eps", [0, 0.1])
@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic", "estimate"])
def test_tie_is_unknown(guarantee, eps):
    """Two equal rows tie everywhere: the label neither leads nor loses."""
    model = make_model()
    model[4].weight.data[1], model[4].bias.data[1] = model[4].weight.data[0], model[4].bias.data[0]
    model[4].bias.data[2] = -100.0
    x, _ = make_batch(model)
    for label in (0, 1):
        y = torch.full((4,), label)
        assert call("certify", model, x, y, eps, guarantee=guarantee).verdicts == [Verdict.UNKNOWN] * 4
        assert call("certified_radius", model, x, y, guarantee=guarantee).tolist() == [0.0] * 4


def test_all_logits_zero():
    model = make_model()
    for parameter in model.parameters():
        parameter.data.zero_()
    x, y = make_batch(model)
    assert call("certify", model, x, y).verdicts == [Verdict.UNKNOWN] * 4


@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic", "estimate"])
def test_eps_zero_certifies_exactly_the_correct(guarantee):
    model = make_model()
    x, y = make_batch(model)
    y[2] = (y[2] + 1) % 3
    expected = [Verdict.CERTIFIED, Verdict.CERTIFIED, Verdict.MISCLASSIFIED, Verdict.CERTIFIED]
    assert call("certify", model, x, y, 0.0, guarantee=guarantee).verdicts == expected
    assert bool((call("local_lipschitz", model, x, y, 0.0, guarantee=guarantee) >= 0).all())


def test_misclassified_inputs_have_radius_zero():
    model = make_model()
    x, y = make_batch(model)
    wrong = (y + 1) % 3
    assert call("certify", model, x, wrong).verdicts == [Verdict.MISCLASSIFIED] * 4
    assert call("certified_radius", model, x, wrong).tolist() == [0.0] * 4


@pytest.mark.parametrize("factor", [1e15, 1e18, 1e30])
def test_huge_weights_are_never_certified_beyond_their_reach(factor):
    """Logits overflow float32, in which the model itself says nothing any more; the ball reaches every class."""
    model = make_model()
    x, y = make_batch(model)
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    certificate = unless_refused("overflow", lambda: call("certify", model, x, y, 100.0))
    assert certificate is None or Verdict.CERTIFIED not in certificate.verdicts
    bound = unless_refused("overflow", lambda: call("local_lipschitz", model, x, y, 100.0))
    assert bound is None or bool((bound > factor**3 / 1e3).all())


def test_weights_beyond_the_range_that_is_accounted_for():
    model = make_model().double()
    model[2].weight.data[0, 0] = 1e-160
    with pytest.raises(ValueError, match="Rescale"):
        ll.local_lipschitz(model, torch.zeros(1, 5), 0.1)
    model[2].weight.data[0, 0] = 1e200
    assert ll.global_lipschitz(model, (5,)) > 1e199


def test_denormal_weights():
    """The smallest float32 numbers count: 1e-45 times 1e38 is a slope of its own."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False))
    model[0].weight.data.fill_(1e-45)
    model[2].weight.data = torch.tensor([[1e38], [-1e38]])
    slope = model[0].weight.double().item() * model[2].weight.double().norm().item()
    for guarantee in ("high_probability", "deterministic"):
        bound = ll.local_lipschitz(model, torch.ones(1, 1), 0.1, guarantee=guarantee).item()
        assert slope <= bound <= 1.01 * slope


def chain_of(small_layers: int, large_layers: int, *, together: bool) -> nn.Sequential:
    """1e-44 many times and then 1e38 many times; `together` leaves the activations between the small ones out."""
    layers: list[nn.Module] = []
    for _ in range(small_layers):
        layers += [nn.Linear(1, 1, bias=False)] if together else [nn.Linear(1, 1, bias=False), nn.ReLU()]
    layers += [nn.ReLU()] if together else []
    for _ in range(large_layers):
        layers += [nn.Linear(1, 1, bias=False), nn.ReLU()]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for index, layer in enumerate(linear):
        layer.weight.data.fill_(1e-44 if index < small_layers else 1e38)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic"])
def test_products_that_underflow_do_not_become_zero(guarantee, together):
    """In real arithmetic the slope is 1e-352 * 1e380 = 1e28; the product on the way is below every float64."""
    model, options = chain_of(8, 10, together=together), {"guarantee": guarantee}
    total = unless_refused("Rescale", lambda: ll.global_lipschitz(model, (1,), **options))
    assert total is None or total > 1e27
    local = unless_refused("Rescale", lambda: ll.local_lipschitz(model, torch.ones(1, 1), 0.1, **options))
    assert local is None or local.item() > 1e27


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic"])
def test_no_certificate_from_an_underflow(guarantee, together):
    """In real arithmetic the logits at 1 are (1, 1e28); float64 sees (1, 0)."""
    model = chain_of(8, 9, together=together).append(nn.Linear(1, 2))
    model[-1].weight.data, model[-1].bias.data = torch.tensor([[0.0], [1e38]]), torch.tensor([1.0, 0.0])
    x, y = torch.ones(1, 1), torch.tensor([0])
    certificate = unless_refused("Rescale", lambda: ll.certify(model, x, y, 0.5, guarantee=guarantee))
    assert certificate is None or certificate.verdicts[0] is not Verdict.CERTIFIED
    radius = unless_refused("Rescale", lambda: ll.certified_radius(model, x, y, guarantee=guarantee))
    assert radius is None or radius.item() == 0


# Surroundings ------------------------------------------------------------------------------------------------------------


def test_train_mode_is_refused_only_where_it_matters():
    model = make_model().train()
    x, y = make_batch(model)
    assert call("certify", model, x, y).verdicts == call("certify", model.eval(), x, y).verdicts
    model.insert(1, nn.BatchNorm1d(12))
    with pytest.raises(ll.UnsupportedLayer, match=r"BatchNorm1d at '1'.*eval\(\)"):
        call("certify", model.train(), x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("guarantee", ["high_probability", "deterministic"])
def test_half_precision_models_count_as_their_stored_weights(dtype, guarantee):
    """The statement is about real arithmetic on the stored weights: the same as for their float64 copy."""
    model = make_model().to(dtype)
    wide = copy.deepcopy(model).double()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = wide(x.double()).argmax(1)
    options = {"guarantee": guarantee}
    half = call("local_lipschitz", model, x, y, **options)
    torch.testing.assert_close(half, call("local_lipschitz", wide, x.double(), y, **options), rtol=1e-2, atol=0)
    assert half.dtype == torch.float64
    assert call("certify", model, x, y, **options).verdicts == call("certify", wide, x.double(), y, **options).verdicts
    torch.testing.assert_close(
        call("certified_radius", model, x, y, **options),
        call("certified_radius", wide, x.double(), y, **options),
        rtol=0.02,
        atol=0,
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_small_batches_give_the_same(function):
    model = make_model()
    x, y = make_batch(model, 7)
    whole = call(function, model, x, y, 0.3, guarantee="deterministic") if function != "certified_radius" else None
    if function == "certify":
        parts = call(function, model, x, y, 0.3, guarantee="deterministic", batch_size=3)
        assert parts.verdicts == whole.verdicts
        torch.testing.assert_close(parts.margin, whole.margin, rtol=1e-6, atol=1e-9, equal_nan=True)
    elif function == "local_lipschitz":
        parts = call(function, model, x, y, 0.3, guarantee="deterministic", batch_size=3)
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=0)
    else:
        whole, parts = call(function, model, x, y), call(function, model, x, y, batch_size=3)
        torch.testing.assert_close(parts, whole, rtol=0.05, atol=0)


@pytest.mark.parametrize("context", ["autocast", "inference_mode", "no_grad", "enable_grad", "float64 default"])
def test_surroundings_change_nothing(context):
    model = make_model()
    x, y = make_batch(model)
    options = {"guarantee": "deterministic"}
    expected = {name: call(name, model, x, y, 1.0, **options) for name in ("local_lipschitz", "certify")}
    inside = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "inference_mode": torch.inference_mode,
        "no_grad": torch.no_grad,
        "enable_grad": torch.enable_grad,
        "float64 default": DefaultDtype,
    }[context]
    with inside():
        bound = call("local_lipschitz", model, x, y, 1.0, **options)
        certificate = call("certify", model, x, y, 1.0, **options)
        radius = call("certified_radius", model, x, y, **options)
    assert torch.equal(bound, expected["local_lipschitz"])
    assert certificate.verdicts == expected["certify"].verdicts
    assert torch.equal(certificate.margin.nan_to_num(), expected["certify"].margin.nan_to_num())
    torch.testing.assert_close(radius, call("certified_radius", model, x, y, **options), rtol=0.02, atol=0)


class DefaultDtype:
    """float64 as torch's default dtype for a while."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)


def test_nothing_of_the_callers_is_changed():
    model = make_model()
    x, y = make_batch(model)
    x = x.double().requires_grad_()
    kept, state, noise = x.detach().clone(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for function in FUNCTIONS:
        result = call(function, model, x, y)
        assert not getattr(result, "requires_grad", False)
    assert torch.equal(x, kept)
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), noise)


def test_extra_state_does_not_disturb_the_fingerprint():
    """A module may keep things that are no tensors in its state_dict."""

    class Remembers(nn.Linear):
        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(Remembers(5, 3))
    x, y = make_batch(model)
    assert len(call("certify", model, x, y).fingerprint) == 64
