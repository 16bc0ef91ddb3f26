"""`models.cnn:cnn` and the networks of `models.resnet` in PyTorch: the same functions of the image.

Images are `[B, C, H, W]` in channels_last, the layout that oneDNN and cuDNN are fastest in. "Same"
padding is TensorFlow's: on even sides it has no pixel before and one after.
"""

from __future__ import annotations

import re

import torch
from lane import Config, Skipped
from torch import nn
from torch.nn import functional


def make_model(config: Config) -> nn.Module:
    """Build the model that the configuration names, with our initial distributions.

    Raises:
        Skipped: there is no such model here.
    """
    torch.manual_seed(config.seed)
    arguments, (height, width, channels) = dict(config.model_args), config.image_shape
    if config.model == "models.cnn:cnn":
        model = Cnn(height, width, channels, config.num_classes, **arguments)
    elif match := re.fullmatch(r"models\.resnet:resnet(\d*)", config.model):
        depth = int(match[1] or arguments.pop("depth", 20))
        model = ResNet(depth, channels, config.num_classes, **arguments)
    else:
        raise Skipped(f"{config.model} is not written in PyTorch here, only cnn and resnets are")
    return model.to(memory_format=torch.channels_last)


def penalties(model: nn.Module, config: Config) -> dict[float, list[nn.Parameter]]:
    """Return the parameters by `decay`, where the penalty is `decay * sum(w ** 2) / 2`."""
    groups: dict[float, list[nn.Parameter]] = {}
    of_model = model.decayed() if isinstance(model, Cnn) else {}
    everywhere = 0.0 if config.optimizer == "adamw" else config.weight_decay
    for name, parameter in model.named_parameters():
        decay = of_model.get(name, 0.0) + (everywhere if parameter.ndim > 1 else 0.0)
        groups.setdefault(decay, []).append(parameter)
    return groups


class Cnn(nn.Module):
    """The convolutional network of TensorFlow's CIFAR-10 tutorial."""

    def __init__(
        self, height: int, width: int, channels: int, num_classes: int, lrn: bool = True,
        weight_decay: float = 0.004,
    ):  # fmt: skip
        """Create the weights; the arguments are those of `models.cnn:cnn`."""
        super().__init__()
        self.weight_decay = weight_decay
        self.conv1 = nn.Conv2d(channels, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        # PyTorch divides alpha by the number of neighbors, TensorFlow does not.
        self.norm = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0) if lrn else nn.Identity()
        self.pool1, height, width = _same_pool(height, width)
        self.pool2, height, width = _same_pool(height, width)
        self.dense1 = nn.Linear(height * width * 64, 384)
        self.dense2 = nn.Linear(384, 192)
        self.logits = nn.Linear(192, num_classes)
        biases = {"conv1": 0.0, "conv2": 0.1, "dense1": 0.1, "dense2": 0.1, "logits": 0.0}
        deviations = {"conv1": 0.05, "conv2": 0.05, "dense1": 0.04, "dense2": 0.04}
        for name, bias in biases.items():
            layer = self.get_submodule(name)
            deviation = deviations.get(name, 1 / 192)
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            nn.init.constant_(layer.bias, bias)

    def decayed(self) -> dict[str, float]:
        """Return the weights with their own regularizer, and its factor."""
        return {"dense1.weight": self.weight_decay, "dense2.weight": self.weight_decay}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to logits `[B, num_classes]`."""
        x = self.norm(self.pool1(functional.relu(self.conv1(images))))
        x = self.pool2(self.norm(functional.relu(self.conv2(x))))
        x = x.permute(0, 2, 3, 1).flatten(1)  # in channels_last that is no copy
        x = functional.relu(self.dense1(x))
        x = functional.relu(self.dense2(x))
        return self.logits(x)


class ResNet(nn.Module):
    """The residual networks for CIFAR-10 of He et al. 2016, with shortcuts without weights."""

    def __init__(self, depth: int, channels: int, num_classes: int, width: int = 16):
        """Create the weights; the arguments are those of `models.resnet:resnet`."""
        super().__init__()
        self.conv = _SameConv(channels, width, 1)
        self.norm = nn.BatchNorm2d(width, eps=1e-5, momentum=0.1)
        blocks, num_channels = [], width
        for stage in range(3):
            for block in range(depth // 6):
                stride = 2 if stage and not block else 1
                blocks.append(_Block(num_channels, width * 2**stage, stride))
                num_channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.logits = nn.Linear(num_channels, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(self.logits.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to logits `[B, num_classes]`."""
        x = functional.relu(self.norm(self.conv(images)), inplace=True)
        return self.logits(self.blocks(x).mean((2, 3)))


class _Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, num_inputs: int, num_channels: int, stride: int):
        super().__init__()
        self.conv1 = _SameConv(num_inputs, num_channels, stride)
        self.norm1 = nn.BatchNorm2d(num_channels, eps=1e-5, momentum=0.1)
        self.conv2 = _SameConv(num_channels, num_channels, 1)
        self.norm2 = nn.BatchNorm2d(num_channels, eps=1e-5, momentum=0.1)
        self.stride, self.num_missing = stride, num_channels - num_inputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm1(self.conv1(inputs)), inplace=True)
        x = self.norm2(self.conv2(x))
        if self.stride != 1:
            inputs = inputs[:, :, :: self.stride, :: self.stride]
            inputs = functional.pad(inputs, (0, 0, 0, 0, 0, self.num_missing))
        return functional.relu(x + inputs, inplace=True)


class _SameConv(nn.Conv2d):
    """A 3x3 convolution without bias, padded as TensorFlow's "same"."""

    def __init__(self, num_inputs: int, num_channels: int, stride: int):
        super().__init__(num_inputs, num_channels, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[2:]
        if self.stride == (1, 1) or (height % 2 and width % 2):
            return super().forward(x)
        x = functional.pad(x, (width % 2, 1, height % 2, 1))
        return functional.conv2d(x, self.weight, stride=self.stride)


def _same_pool(height: int, width: int) -> tuple[nn.Module, int, int]:
    """Return max pooling 3/2 as TensorFlow's "same", and the sides of its result."""
    padding = (height % 2, width % 2)
    pool = nn.MaxPool2d(3, stride=2, padding=padding, ceil_mode=True)
    return pool, (height + 1) // 2, (width + 1) // 2
