"""Random networks of every supported kind, for the tests that hold every bound against what a search finds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import locallip as ll


class PostActivation(nn.Module):
    """relu(z + conv(relu(conv(z)))) blocks and an average pool."""

    def __init__(self, channels: int, act: Callable[[tuple[int, ...]], nn.Module]):
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.acts = nn.ModuleList(act((channels, 5, 5)) for _ in range(3))
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(channels * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.acts[0](self.stem(x))
        z = self.acts[2](z + self.second(self.acts[1](self.first(z))))
        return self.head(self.pool(z).flatten(1))


class PreActivation(nn.Module):
    """z + conv(act(conv(z))) twice with nothing between, so that sums are read by two layers."""

    def __init__(self, width: int, act: Callable[[tuple[int, ...]], nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.acts = nn.ModuleList(act((width,)) for _ in range(3))
        self.stem, self.head = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.acts[0](self.stem(x))
        z = z + self.layers[1](self.acts[1](self.layers[0](z)))
        z = z + self.layers[3](self.acts[2](self.layers[2](z)))
        return self.head(z)


class LinearResidual(nn.Module):
    """act(z + conv(z)): one operator I + W."""

    def __init__(self, width: int, act: Callable[[tuple[int, ...]], nn.Module]):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act_one, self.act_two = act((6,)), act((6,))

    def forward(self, x: Tensor) -> Tensor:
        z = self.act_one(x + self.one(x))
        z = self.act_two(z - 0.5 * self.two(z))
        return self.head(z)


def _dense(act: Callable[[tuple[int, ...]], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), act((8,)), nn.Linear(8, 6), act((6,)), nn.Linear(6, 3))


def _convolutional(act: Callable[[tuple[int, ...]], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(ll.Normalize([0.3], [0.5]), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), act((4, 5, 5))),
        *(nn.Conv2d(4, 4, 2, stride=2), act((4, 2, 2)), nn.Flatten(), nn.Linear(16, 3)),
    )


def _pooled(act: Callable[[tuple[int, ...]], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 2, groups=1), act((4, 4, 4)), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, padding="same", groups=2)),
        *(act((4, 2, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def _signal(act: Callable[[tuple[int, ...]], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv1d(2, 4, 3, stride=2, dilation=2),
            act((4, 2)),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(8, 4),
            nn.BatchNorm1d(4),
        ),
        *(act((4,)), nn.Linear(4, 3)),
    )


#: How to build each kind of body around an activation, and the shape of its samples.
BODIES: dict[str, tuple[Callable[[Callable[[tuple[int, ...]], nn.Module]], nn.Module], tuple[int, ...]]] = {
    "dense": (_dense, (6,)),
    "convolutional": (_convolutional, (1, 5, 5)),
    "pooled": (_pooled, (1, 5, 5)),
    "signal": (_signal, (2, 8)),
    "post_activation": (lambda act: PostActivation(4, act), (1, 5, 5)),
    "pre_activation": (lambda act: PreActivation(6, act), (6,)),
    "linear_residual": (lambda act: LinearResidual(6, act), (6,)),
}


def _half(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] // 2, *shape[1:])


ACTIVATIONS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "relu": lambda shape: nn.ReLU(),
    "relu_theta": lambda shape: ll.ReLUTheta(shape, init=0.5),
    "relu6": lambda shape: nn.ReLU6(),
    "hardtanh": lambda shape: nn.Hardtanh(-0.3, 0.4),
    "maxmin": lambda shape: ll.MaxMin(),
    "clipped_maxmin": lambda shape: ll.ClippedMaxMin(_half(shape), upper=0.4, lower=-0.2),
    "leaky_relu": lambda shape: nn.LeakyReLU(0.2),
    "elu": lambda shape: nn.ELU(1.5),
    "tanh": lambda shape: nn.Tanh(),
    "sigmoid": lambda shape: nn.Sigmoid(),
    "softplus": lambda shape: nn.Softplus(beta=2.0),
}


def random_network(body: str, activation: str, seed: int, gain: float) -> tuple[nn.Module, tuple[int, ...]]:
    """A float64 network in eval mode with random weights, thresholds and statistics; `gain` scales the weights."""
    build, shape = BODIES[body]
    generator = torch.Generator().manual_seed(seed)
    network = build(ACTIVATIONS[activation]).double().eval()

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for tensor in network.parameters():
            tensor.copy_(gain * noise(tensor) / max(1, tensor[0].numel()) ** 0.5)
        for module in network.modules():
            if isinstance(module, ll.ReLUTheta):
                module.raw_theta.copy_(0.8 * noise(module.raw_theta))
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.copy_(0.2 * noise(module.running_mean))
                module.running_var.copy_(0.3 + noise(module.running_var).square())
    return network, shape
