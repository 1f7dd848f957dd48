"""Lowering: the network computes what the module computes, and whatever has no sound rule is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import locallip as ll
from locallip.network.stages import PassThrough
from locallip.ops import Sum


class Calls(nn.Module):
    """A module whose forward is a given function of itself and x; tensors become buffers."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


class PostActivation(nn.Module):
    """relu(shortcut(x) + conv(relu(conv(x)))), the block of the first residual networks."""

    def __init__(self, channels, out=None, stride=1):
        super().__init__()
        out = out or channels
        self.first = nn.Conv2d(channels, out, 3, stride, 1)
        self.second = nn.Conv2d(out, out, 3, 1, 1)
        self.shortcut = nn.Identity() if out == channels else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class PreActivation(nn.Module):
    """x + conv(relu(norm(x))): the sum is read by the next block's norm and by its shortcut."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


class PlainSubclass(nn.Conv2d):
    """Another name, the same forward."""


class ScaledSubclass(nn.Conv2d):
    """A convolution whose forward was changed in plain sight: looked into, not taken for a Conv2d."""

    def forward(self, x):
        return 3 * super().forward(x)


class WithDefault(nn.Module):
    """A second argument with a default is a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x, scale: float = 2.0):
        return self.linear(x) * scale


def settled(module: nn.Module) -> nn.Module:
    """In eval mode, with running statistics that are not 0 and 1."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            if layer.affine:
                layer.weight.data.normal_()
                layer.bias.data.normal_()
    return module.eval()


def functional(self, x):
    y = F.relu(self.conv(x))
    return self.linear(torch.flatten(F.max_pool2d(y, 2), 1))


def flat(layer, n=6, shape=(6,), **members):
    """A module with a linear layer of n inputs, and the shape of its samples."""
    return Calls(layer, linear=nn.Linear(n, 3), **members), shape


image = (3, 6, 6)
MODULES = {
    "sequential": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), image),
    "nested": lambda: (
        nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.ReLU())), nn.ModuleList([nn.Linear(5, 3)])[0]),
        (6,),
    ),
    "functional": lambda: (Calls(functional, conv=nn.Conv2d(3, 4, 3), linear=nn.Linear(16, 3)), image),
    "view of size": lambda: flat(lambda m, x: m.linear(x.view(x.size(0), -1)), 108, image),
    "view of shape": lambda: flat(lambda m, x: m.linear(x.view(x.shape[0], -1)), 108, image),
    "reshape and unsqueeze": lambda: flat(lambda m, x: m.linear(x.unsqueeze(1).squeeze(1).reshape(-1, 2, 3).flatten(1))),
    "flatten from 2": lambda: flat(lambda m, x: m.linear(torch.flatten(x, start_dim=2)), 36, image),
    "flatten negative": lambda: (nn.Sequential(nn.Flatten(-2, -1), nn.Linear(36, 3)), image),
    "unflatten": lambda: (nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 4), nn.Flatten(), nn.Linear(8, 3)), (6,)),
    "mean": lambda: flat(lambda m, x: m.linear(x.mean((2, 3))), 3, image),
    "mean negative, kept": lambda: flat(lambda m, x: m.linear(x.mean(dim=[-1, -2], keepdim=True).flatten(1)), 3, image),
    "mean function": lambda: flat(lambda m, x: m.linear(torch.mean(x, dim=2)), 4, (4, 5)),
    "sum of branches": lambda: flat(lambda m, x: m.linear(x) + m.other(F.relu(x)), other=nn.Linear(6, 3)),
    "difference": lambda: flat(lambda m, x: m.linear(x) - F.relu(m.other(x)), other=nn.Linear(6, 3)),
    "add alpha": lambda: flat(lambda m, x: torch.add(m.linear(x), F.relu(m.other(x)), alpha=2.5), other=nn.Linear(6, 3)),
    "sub alpha": lambda: flat(lambda m, x: torch.sub(m.linear(x), m.b, alpha=-3), b=torch.randn(3)),
    "other by keyword": lambda: flat(lambda m, x: torch.add(m.linear(x), other=m.b), b=torch.randn(1, 3)),
    "negation": lambda: flat(lambda m, x: -F.relu(-m.linear(x))),
    "scalars": lambda: flat(lambda m, x: 1 - 2 * F.relu(m.linear(x) * 0.5 - 1) / 3),
    "integer factor": lambda: flat(lambda m, x: m.linear(x) * m.k + m.k, k=torch.tensor([2, 0, -3])),
    "buffer": lambda: flat(lambda m, x: m.linear(x * m.w + m.w), w=torch.randn(6)),
    "buffer of channels": lambda: flat(lambda m, x: m.linear((x + m.w).flatten(1)), 108, image, w=torch.randn(3, 1, 1)),
    "buffer of pixels": lambda: flat(lambda m, x: m.linear((m.w * x).flatten(1)), 108, image, w=torch.randn(6, 6)),
    "normalisation": lambda: flat(
        lambda m, x: m.linear(((x - m.mean) / m.std).flatten(1)),
        *(108, image),
        mean=torch.randn(1, 3, 1, 1),
        std=torch.rand(1, 3, 1, 1) + 0.5,
    ),
    "Normalize": lambda: (
        nn.Sequential(ll.Normalize([0.1, 0.2, 0.3], [0.5, 1.0, 2.0]), nn.Flatten(), nn.Linear(108, 3)),
        image,
    ),
    "post-activation": lambda: (nn.Sequential(PostActivation(3), PostActivation(3), nn.Flatten(), nn.Linear(108, 3)), image),
    "projection": lambda: (nn.Sequential(PostActivation(3, 5, 2), nn.Flatten(), nn.Linear(45, 3)), image),
    "pre-activation": lambda: (
        nn.Sequential(*[PreActivation(3) for _ in range(3)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)),
        image,
    ),
    "z + conv(z)": lambda: flat(
        lambda m, x: m.linear(F.relu(x + m.conv(x)).flatten(1)), 108, image, conv=nn.Conv2d(3, 3, 3, padding=1)
    ),
    "batch norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3)),
        image,
    ),
    "batch norm of sequences": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)),
        (2, 7),
    ),
    "dropout": lambda: (nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3), nn.AlphaDropout()), (6,)),
    "dropout function": lambda: flat(lambda m, x: F.dropout(m.linear(x), training=m.training)),
    "average pools": lambda: (
        nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), nn.Flatten()),
        image,
    ),
    "pools by function": lambda: (
        Calls(
            lambda m, x: F.adaptive_avg_pool2d(F.avg_pool2d(x, kernel_size=2, stride=1, divisor_override=3), (5, 1)).flatten(
                1
            )
        ),
        image,
    ),
    "adaptive": lambda: (nn.Sequential(nn.AdaptiveAvgPool2d((2, None)), nn.Flatten(), nn.Linear(36, 3)), image),
    "max pool": lambda: (nn.Sequential(nn.MaxPool2d(2, 3, 1, ceil_mode=True), nn.Flatten()), (3, 7, 5)),
    "conv1d": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 3, stride=2, dilation=2), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(4, 3)),
        (2, 10),
    ),
    "groups, dilation, uneven": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 0), (2, 1), 2), nn.Flatten()),
        (4, 8, 7),
    ),
    "same, even kernel": lambda: (nn.Sequential(nn.Conv2d(3, 2, (2, 4), padding="same"), nn.Flatten()), image),
    "conv function": lambda: (
        Calls(
            lambda m, x: F.conv2d(x, m.w, padding="valid", stride=(2, 1)).flatten(1), w=nn.Parameter(torch.randn(4, 3, 3, 3))
        ),
        image,
    ),
    "used twice": lambda: flat(lambda m, x: m.linear(F.relu(m.same(F.relu(m.same(x))))), same=nn.Linear(6, 6)),
    "orthogonal": lambda: (nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3)), (6,)),
    "weight norm": lambda: (nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 2, 3)), nn.ReLU(), nn.Flatten()), image),
    "plain subclass": lambda: (nn.Sequential(PlainSubclass(3, 2, 3), nn.Flatten()), image),
    "changed subclass": lambda: (nn.Sequential(ScaledSubclass(3, 2, 3), nn.Flatten()), image),
    "in-place": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (6,)),
    "in-place on the input": lambda: (nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(6, 3)), (6,)),
    "in-place arithmetic": lambda: flat(lambda m, x: m.linear(x).mul_(2).add_(1)),
    "augmented": lambda: (Calls(augmented, linear=nn.Linear(6, 3)), (6,)),
    "ends with activation": lambda: (nn.Sequential(nn.Linear(6, 3), nn.ReLU()), (6,)),
    "one layer": lambda: (nn.Linear(6, 3), (6,)),
    "no bias": lambda: (nn.Linear(6, 3, bias=False), (6,)),
    "linear on matrices": lambda: (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3)), (5, 4)),
    "double": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double(), (6,)),
    "no parameters": lambda: (nn.Sequential(nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()), image),
    "clips": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU6(), nn.Linear(5, 3), nn.Hardtanh(-0.3, 0.2)), (6,)),
    "clips by function": lambda: flat(lambda m, x: F.hardtanh(F.relu6(5 * m.linear(x)), max_val=2.0, min_val=0.5)),
    "slopes by function": lambda: flat(
        lambda m, x: F.softplus(F.elu(F.leaky_relu(m.linear(x), negative_slope=0.4), alpha=0.7), beta=2.0)
    ),
    "smooth": lambda: (
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3), nn.ELU()),
        (6,),
    ),
    "own activations": lambda: (
        nn.Sequential(nn.Linear(6, 4), ll.ReLUTheta(4), nn.Linear(4, 4), ll.MaxMin(), nn.Linear(4, 4), ll.ClippedMaxMin(2)),
        (6,),
    ),
    "default argument": lambda: (WithDefault(), (6,)),
    "clone": lambda: flat(lambda m, x: m.linear(x.clone().contiguous())),
}


def augmented(self, x):
    y = self.linear(x)
    y += 1.5
    y *= 2
    return y


@pytest.mark.parametrize("name", MODULES)
def test_network_equals_module(name):
    """Also far from the origin, where a misplaced threshold would show, and for the gradient."""
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    module = settled(module)
    network = ll.lower(module, shape)
    module = copy.deepcopy(module).double()
    for spread in (0.1, 1.0, 30.0):
        x = (torch.randn(5, *shape, dtype=torch.float64) * spread).requires_grad_()
        ours = network(x)
        theirs = module(x.clone())
        # Normalised weights were rounded to the module's own dtype before they were widened.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * spread)
        direction = torch.randn_like(ours)
        slopes = [torch.autograd.grad((out * direction).sum(), x, retain_graph=True)[0] for out in (ours, theirs)]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_lowering_leaves_the_module_alone(name):
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    module = settled(module)
    before = copy.deepcopy(module.state_dict())
    ll.lower(module, shape)
    assert not module.training
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


def stages_of(name):
    module, shape = MODULES[name]()
    return ll.lower(settled(module), shape).stages


def test_containers_vanish():
    stages = stages_of("nested")
    assert [stage.name for stage in stages] == ["0.1.0", "output"]
    assert all(list(stage.terms) == [index] for index, stage in enumerate(stages))


def test_linear_layers_compose_into_one_stage():
    module = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Identity(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
    ).eval()
    assert len(ll.lower(module, (6,)).stages) == 2


def test_sum_with_its_own_convolution_is_one_operator():
    first = stages_of("z + conv(z)")[0]
    assert list(first.terms) == [0]
    assert isinstance(first.terms[0], Sum)
    assert len(first.terms[0].parts) == 2


def test_skip_over_an_activation_is_two_terms():
    stages = stages_of("post-activation")
    assert [sorted(stage.terms) for stage in stages] == [[0], [0, 1], [2], [2, 3], [4]]


def test_sum_that_is_read_twice_becomes_a_stage():
    stages = stages_of("pre-activation")
    closed = [isinstance(stage.activation, PassThrough) for stage in stages]
    assert closed == [False, True, False, True, False, False]
    assert sorted(stages[1].terms) == [0, 1]
    assert sorted(stages[3].terms) == [2, 3]
    assert sorted(stages[5].terms) == [4, 5]


def test_norms_are_one_per_term():
    module, shape = MODULES["post-activation"]()
    assert ll.lower(module, shape).num_norms == 7


def test_pooling_after_an_activation_is_a_stage_of_its_own():
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    assert [stage.linear_shape for stage in ll.lower(module, image).stages] == [(2, 4, 4), (2, 4, 4), (3,)]


def one_parameter_each():
    linear = nn.Linear(6, 3)
    return {
        "linear weight": (linear, "weight"),
        "linear bias": (linear, "bias"),
        "conv weight": (nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten()), "0.weight"),
        "batch norm weight": (nn.Sequential(nn.BatchNorm1d(6)).eval(), "0.weight"),
        "running variance": (nn.Sequential(nn.BatchNorm1d(6)).eval(), "0.running_var"),
        "thresholds": (nn.Sequential(ll.ReLUTheta(6, init=0.5)), "0.raw_theta"),
        "factor": (Calls(lambda m, x: x * m.w, w=nn.Parameter(torch.ones(6))), "w"),
        "factor with a batch dimension": (Calls(lambda m, x: x * m.w, w=nn.Parameter(torch.ones(1, 6))), "w"),
        "divisor": (Calls(lambda m, x: x / m.w, w=nn.Parameter(torch.ones(6))), "w"),
        "summand": (Calls(lambda m, x: x - m.w, w=nn.Parameter(torch.ones(6))), "w"),
        "weight of a function": (Calls(lambda m, x: F.linear(x, m.w), w=nn.Parameter(torch.randn(3, 6))), "w"),
        "original of weight norm": (parametrizations.weight_norm(nn.Linear(6, 3)), "parametrizations.weight.original0"),
        "original of orthogonal": (parametrizations.orthogonal(nn.Linear(6, 3)), "parametrizations.weight.original"),
    }


@pytest.mark.parametrize("name", one_parameter_each())
def test_parameters_are_read_through(name):
    """A change after lowering changes the network, and gradients reach the user's parameter."""
    torch.manual_seed(0)
    module, path = one_parameter_each()[name]
    shape = image if "conv" in name else (6,)
    network, x = ll.lower(module, shape), torch.randn(4, *shape)
    stored = dict((*module.named_parameters(), *module.named_buffers()))[path]
    before = network(x).detach()
    with torch.no_grad():
        stored.add_(0.3 * torch.rand_like(stored))
    torch.testing.assert_close(network(x), module(x))
    assert not torch.allclose(network(x), before)
    if stored.requires_grad:
        network(x).square().sum().backward()
        ours = stored.grad.clone()
        stored.grad = None
        module(x).square().sum().backward()
        torch.testing.assert_close(ours, stored.grad)


def test_tensors_computed_from_parameters_in_forward_are_refused():
    """A copy of today's value would go stale with the next training step, in silence."""
    module = Calls(lambda m, x: m.linear(x) * torch.exp(m.a), linear=nn.Linear(6, 3), a=nn.Parameter(torch.zeros(3)))
    with pytest.raises(ll.UnsupportedLayer, match="mul"):
        ll.lower(module, (6,))


# What has no sound rule --------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + y


def branch_on_data(self, x):
    return F.relu(x) if x.sum() > 0 else x


def overwritten(self, x):
    y = self.linear(x)
    return F.relu_(y) + y


def overwritten_by_layer(self, x):
    y = self.linear(x)
    return self.relu(y) + y


def overwritten_by_position(self, x):
    y = self.linear(x)
    return F.relu(y, True) + y


def overwritten_in_a_view(self, x):
    y = self.linear(x)
    F.relu_(y.view(-1, 3))
    return y


def input_overwritten_in_a_view(self, x):
    x.flatten(1).mul_(10)
    return self.linear(x.flatten(1))


def keeps_batch(layer, shape=(6,), **members):
    return Calls(layer, **members), shape


def with_linear(layer):
    return Calls(layer, linear=nn.Linear(6, 3), relu=nn.ReLU(inplace=True)), (6,)


def inside(layer, shape=(6,)):
    """The layer where its qualified path is worth something."""
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), layer)), shape


REFUSED = {
    # layers, by path
    "GELU": (lambda: inside(nn.GELU()), ["GELU", "'1.1'"]),
    "Softmax": (lambda: inside(nn.Softmax(1)), ["Softmax", "'1.1'"]),
    "LayerNorm": (lambda: inside(nn.LayerNorm(6)), ["LayerNorm", "'1.1'"]),
    "GroupNorm": (lambda: inside(nn.GroupNorm(1, 3), image), ["GroupNorm", "'1.1'"]),
    "InstanceNorm2d": (lambda: inside(nn.InstanceNorm2d(3), image), ["InstanceNorm2d", "'1.1'"]),
    "PReLU": (lambda: inside(nn.PReLU()), ["PReLU", "'1.1'"]),
    "SiLU": (lambda: inside(nn.SiLU()), ["SiLU", "'1.1'"]),
    "ConvTranspose2d": (lambda: inside(nn.ConvTranspose2d(3, 3, 3), image), ["ConvTranspose2d", "'1.1'"]),
    "LSTM": (lambda: inside(nn.LSTM(6, 2), (4, 6)), ["LSTM", "'1.1'"]),
    "Upsample": (lambda: inside(nn.Upsample(scale_factor=2), image), ["Upsample", "'1.1'"]),
    "ZeroPad2d": (lambda: inside(nn.ZeroPad2d(1), image), ["ZeroPad2d", "'1.1'"]),
    "overlapping max pool": (lambda: inside(nn.MaxPool2d(3, 2), image), ["MaxPool2d", "'1.1'", "overlap"]),
    "max pool with indices": (lambda: inside(nn.MaxPool2d(2, return_indices=True), image), ["MaxPool2d", "'1.1'"]),
    "dilated max pool": (lambda: inside(nn.MaxPool2d(2, 3, dilation=2), image), ["MaxPool2d", "dilation"]),
    "circular padding": (
        lambda: inside(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), image),
        ["Conv2d", "'1.1'", "circular"],
    ),
    "unequal windows": (lambda: inside(nn.AdaptiveAvgPool2d(4), image), ["AdaptiveAvgPool2d", "'1.1'", "unequal"]),
    "batch norm in training": (lambda: inside(nn.BatchNorm1d(6)), ["BatchNorm1d", "'1.1'", "eval()"]),
    "dropout in training": (lambda: inside(nn.Dropout()), ["Dropout", "'1.1'", "eval()"]),
    "batch norm without statistics": (
        lambda: inside(nn.BatchNorm1d(6, track_running_stats=False).eval()),
        ["BatchNorm1d", "'1.1'", "statistics"],
    ),
    "falling LeakyReLU": (lambda: inside(nn.LeakyReLU(-0.5)), ["LeakyReLU", "'1.1'"]),
    "jumping Softplus": (lambda: inside(nn.Softplus(threshold=1)), ["Softplus", "'1.1'", "threshold"]),
    "flatten with the batch": (lambda: inside(nn.Flatten(0)), ["Flatten", "'1.1'", "batch"]),
    # operations, by name
    "x * x": (lambda: keeps_batch(lambda m, x: x * x), ["mul"]),
    "x / x": (lambda: keeps_batch(lambda m, x: x / (x + 9)), ["div"]),
    "2 / x": (lambda: keeps_batch(lambda m, x: 2 / x), ["div"]),
    "x // 3": (lambda: keeps_batch(lambda m, x: x // 3), ["floordiv"]),
    "rounded division": (lambda: keeps_batch(lambda m, x: torch.div(x, 3, rounding_mode="floor")), ["div", "rounding_mode"]),
    "abs": (lambda: keeps_batch(lambda m, x: x.abs()), ["abs"]),
    "power": (lambda: keeps_batch(lambda m, x: x**2), ["pow"]),
    "clamp": (lambda: keeps_batch(lambda m, x: x.clamp(min=0)), ["clamp"]),
    "max": (lambda: keeps_batch(lambda m, x: torch.maximum(x, -x)), ["maximum"]),
    "cat": (lambda: keeps_batch(lambda m, x: torch.cat([x, x], 1)), ["cat"]),
    "matmul": (lambda: keeps_batch(lambda m, x: torch.matmul(x, x), (4, 4)), ["matmul"]),
    "permute": (lambda: keeps_batch(lambda m, x: x.permute(0, 2, 1), (4, 4)), ["permute"]),
    "transpose": (lambda: keeps_batch(lambda m, x: x.transpose(1, 2), (4, 4)), ["transpose"]),
    "T": (lambda: keeps_batch(lambda m, x: x.T), ["getattr"]),
    "slice": (lambda: keeps_batch(lambda m, x: x[:, :3]), ["getitem"]),
    "chunk": (lambda: keeps_batch(lambda m, x: x.chunk(2, 1)[0]), ["chunk"]),
    "where": (lambda: keeps_batch(lambda m, x: torch.where(m.b, x, -x), b=torch.arange(6) > 2), ["where"]),
    "masked_fill": (lambda: keeps_batch(lambda m, x: x.masked_fill(m.b, 0.0), b=torch.arange(6) > 2), ["masked_fill"]),
    "sum": (lambda: keeps_batch(lambda m, x: x.sum(1, keepdim=True)), ["sum"]),
    "mean of everything": (lambda: keeps_batch(lambda m, x: x - x.mean()), ["mean"]),
    "mean of channels": (lambda: keeps_batch(lambda m, x: x.mean(1), image), ["mean", "spatial"]),
    "mean of the batch": (lambda: keeps_batch(lambda m, x: x - x.mean(0, keepdim=True)), ["mean"]),
    "dropout by default": (lambda: keeps_batch(lambda m, x: F.dropout(x)), ["dropout", "eval()"]),
    "normalize": (lambda: keeps_batch(lambda m, x: F.normalize(x)), ["norm"]),
    "softmax": (lambda: keeps_batch(lambda m, x: x.softmax(1)), ["softmax"]),
    "cast to integers": (lambda: keeps_batch(lambda m, x: x.to(torch.int32)), ["to"]),
    "broadcast of samples": (
        lambda: keeps_batch(lambda m, x: x + F.adaptive_avg_pool2d(x, 1), image),
        ["add", "broadcast"],
    ),
    "broadcast to more": (lambda: keeps_batch(lambda m, x: x + m.w, (1, 6), w=torch.ones(3, 6)), ["add"]),
    "one summand per sample": (lambda: keeps_batch(lambda m, x: x + m.w, w=torch.ones(2, 6)), ["add"]),
    "batch into features": (lambda: keeps_batch(lambda m, x: x.reshape(-1, 3)), ["reshape", "batch"]),
    "item": (lambda: keeps_batch(lambda m, x: x * x.sum().item()), ["sum"]),
    "two inputs": (lambda: (TwoInputs(), (6,)), ["more than one input"]),
    "tuple": (lambda: keeps_batch(lambda m, x: (x, x)), ["output", "one tensor"]),
    "constant": (lambda: keeps_batch(lambda m, x: m.w, w=torch.ones(1, 6)), ["output", "depends on its input"]),
    "branch on the data": (lambda: keeps_batch(branch_on_data), ["Calls", "Control flow"]),
    "branch on the batch": (lambda: keeps_batch(lambda m, x: x if x.shape[0] > 2 else -x), ["Calls", "Control flow"]),
    "in-place function": (lambda: with_linear(overwritten), ["relu_", "inplace=False"]),
    "in-place layer": (lambda: with_linear(overwritten_by_layer), ["ReLU", "'relu'", "inplace=False"]),
    # caught by comparing the two functions
    "division by the batch size": (lambda: keeps_batch(lambda m, x: x / x.size(0)), ["Calls", "batch"]),
    "in-place by position": (lambda: with_linear(overwritten_by_position), []),
    "in-place through a view": (lambda: with_linear(overwritten_in_a_view), []),
    "input overwritten through a view": (lambda: with_linear(input_overwritten_in_a_view), []),
    "fixed batch size": (lambda: keeps_batch(lambda m, x: x.view(2, -1)), []),
    "squeezed batch": (lambda: keeps_batch(lambda m, x: x.squeeze().flatten(1)), []),
    "unflattened batch": (lambda: keeps_batch(lambda m, x: x.unflatten(0, (2, 1)).flatten(1)), []),
    "noise": (lambda: keeps_batch(lambda m, x: x + torch.randn(6)), []),
}


@pytest.mark.parametrize(("layer", "shape", "word"), [(ll.MaxMin(), (3,), "even"), (nn.Linear(5, 2), (6,), "multiplied")])
def test_a_shape_that_the_model_does_not_accept_is_named(layer, shape, word):
    with pytest.raises(ValueError, match=rf"does not accept samples of shape \({shape[0]},\).*'1.1'.*{word}"):
        ll.lower(inside(layer, shape)[0], shape)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    """Always UnsupportedLayer, with the path or the operation and what is supported; never another error."""
    build, words = REFUSED[name]
    module, shape = build()
    with pytest.raises(ll.UnsupportedLayer) as refusal:
        ll.lower(module, shape)
    for word in [*words, "upported"]:
        assert word in str(refusal.value)


@pytest.mark.parametrize("call", ["local_lipschitz", "global_lipschitz", "certify", "certified_radius"])
def test_every_public_function_refuses(call):
    module, x, y = nn.Sequential(nn.Linear(6, 6), nn.GELU()), torch.zeros(2, 6), torch.zeros(2, dtype=torch.long)
    args = {"local_lipschitz": (x, 0.1), "global_lipschitz": ((6,),), "certify": (x, y, 0.1), "certified_radius": (x, y)}
    with pytest.raises(ll.UnsupportedLayer, match="GELU at '1'"):
        getattr(ll, call)(module, *args[call])


def test_operation_in_a_nested_module_is_named_by_its_path():
    module = nn.Sequential(nn.Identity(), nn.Sequential(Calls(lambda m, x: x.abs())))
    with pytest.raises(ll.UnsupportedLayer, match=r"abs at '1\.0\.abs"):
        ll.lower(module, (6,))


def test_torchscript_is_refused():
    with pytest.raises(ll.UnsupportedLayer, match="TorchScript"):
        ll.lower(torch.jit.script(nn.Sequential(nn.Linear(6, 3))), (6,))


def test_not_a_module():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ll.lower(lambda x: x, (6,))  # type: ignore[arg-type]


# Functions that differ from their layers only where random samples do not look -------------------------------------------


def steep_far_out(z):
    return z + 100 * F.relu(z - 1000)


def far_hook():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].register_forward_hook(lambda layer, args, out: steep_far_out(out))
    return module


def far_pre_hook():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[1].register_forward_pre_hook(lambda layer, args: (steep_far_out(args[0]),))
    return module


def far_hook_on_the_whole():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module.register_forward_hook(lambda layer, args, out: steep_far_out(out))
    return module


def far_patch():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[1].forward = lambda z: steep_far_out(F.relu(z))
    return module


class FarConvolution(nn.Conv1d):
    """The forward of Conv1d, but not what it calls."""

    def _conv_forward(self, x, weight, bias):
        return steep_far_out(super()._conv_forward(x, weight, bias))


def far_convolution():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), FarConvolution(2, 2, 3), nn.Flatten())


def far_threshold():
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU6())
    module[1].max_val = 50.0
    return module


@pytest.mark.parametrize("build", [far_hook, far_pre_hook, far_hook_on_the_whole, far_patch, far_convolution, far_threshold])
def test_rare_deviations_are_refused_or_followed(build):
    """Comparing a few samples cannot see these, so they must be seen in the module itself."""
    torch.manual_seed(0)
    module = build()
    try:
        network = ll.lower(module, (6,))
    except ll.UnsupportedLayer:
        return
    x = 1e5 * torch.randn(20, 6)
    torch.testing.assert_close(network(x), module(x), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_hook_that_changes_the_output_is_refused_in_every_dtype(dtype):
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
    module[0].register_forward_hook(lambda layer, args, out: out * 5)
    with pytest.raises(ll.UnsupportedLayer):
        ll.lower(module, (6,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_checked_too(dtype):
    """Rounding of half precision must not be an excuse for another function."""
    module = Calls(overwritten_in_a_view, linear=nn.Linear(6, 3)).to(dtype)
    with pytest.raises(ll.UnsupportedLayer):
        ll.lower(module, (6,))


def test_no_certificate_for_an_input_scaled_in_place():
    """The scaled function has ten times the slope: a bound of the unscaled one would certify what an attack breaks."""
    module = Calls(input_overwritten_in_a_view, linear=nn.Linear(2, 2, bias=False))
    module.linear.weight.data = torch.eye(2)
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    with pytest.raises(ll.UnsupportedLayer):
        ll.certify(module, x, y, 0.1)
