"""Models of images and volumes, hand-made."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo_models.registry import BF16, OWN_STREAM, Made, model


def images(count: int = 2, *, size: int = 16, channels: int = 3, calls: int = 2) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(count, channels, size, size),) for _ in range(calls)]


def conv_bn(inner: int, outer: int, kernel: int = 3, **kwargs: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, padding=kernel // 2, bias=False, **kwargs), nn.BatchNorm2d(outer), nn.ReLU()
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(width, width), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x), inplace=True)


def resnet_of(width: int) -> nn.Module:
    return nn.Sequential(
        conv_bn(3, width), nn.MaxPool2d(2), Residual(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


@model(
    "ResNet; trained with batch norm's running statistics",
    under=("no_grad", "grad"),
    session=True,
    reason="the gradient of a convolution's bias is zero but for rounding before a batch norm, which takes it out",
)
def resnet() -> Made:
    return resnet_of(8), images(4)


@model("ResNet in channels-last order, larger batch the second time", under=("inference_mode",))
def resnet_channels_last() -> Made:
    calls = [(torch.randn(n, 3, 16, 16).to(memory_format=torch.channels_last),) for n in (2, 5)]
    fn: Any = resnet_of(8)
    return fn.to(memory_format=torch.channels_last), calls


@model(
    "MobileNet: depthwise convolutions and hard-swish; trained",
    under=("no_grad", "grad"),
    reason="the gradient of a batch norm's scale is zero but for rounding where another batch norm takes it out again",
)
def mobilenet() -> Made:
    block = nn.Sequential(conv_bn(8, 16, 1), conv_bn(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1), nn.Hardswish())
    return nn.Sequential(conv_bn(3, 8, stride=2), block, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images(4)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.shrink(F.gelu(self.grow(y)))).permute(0, 3, 1, 2)


@model("ConvNeXt: depthwise 7x7, layer norm after a permute", under=("no_grad", "grad"))
def convnext() -> Made:
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), ConvNextBlock(8), ConvNextBlock(8)), images()


class UNet(nn.Module):
    """A step of a diffusion model: down, attention over pixels, up, with the time put in everywhere."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.norm, self.qkv = nn.GroupNorm(2, width), nn.Conv2d(width, 3 * width, 1)
        self.up, self.leave = nn.ConvTranspose2d(width, width, 2, stride=2), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.exp(torch.linspace(0, -4, 4, device=x.device))
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        high = F.silu(self.enter(x) + time)
        low = self.down(high)
        q, k, v = self.qkv(self.norm(low)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        low = low + mixed.transpose(1, 2).reshape(low.shape)
        return self.leave(torch.cat([self.up(low + time), high], 1))


@model("diffusion U-Net: group norm, attention over pixels, skip connections; trained", under=("no_grad", "grad"))
def unet() -> Made:
    return UNet(), [(torch.randn(2, 3, 8, 8), torch.rand(2) * 100) for _ in range(2)]


class Detector(nn.Module):
    """Boxes, scores, classes by top-k, and the suppression of overlaps in matrix form."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv_bn(3, 8, stride=2), nn.Conv2d(8, 4 + 3, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        raw = self.head(self.body(x)).flatten(2).transpose(1, 2)
        scores, classes = raw[..., 4:].softmax(-1).max(-1)
        scores, chosen = scores.topk(6, dim=1)
        boxes = raw[..., :4].gather(1, chosen[..., None].expand(-1, -1, 4))
        low, high = boxes[..., :2], boxes[..., :2] + boxes[..., 2:].exp()
        overlap = torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(low[:, :, None], low[:, None])
        both = overlap.clamp_min(0).prod(-1)
        area = (high - low).prod(-1)
        iou = both / (area[:, :, None] + area[:, None] - both)
        kept = ~((iou > 0.5).tril(-1).any(-1))
        return {
            "boxes": torch.cat([low, high], -1),
            "scores": scores,
            "classes": classes.gather(1, chosen),
            "kept": kept,
        }


@model("detection head: top-k, gather, boxes, integers and booleans among the outputs", session=True)
def detector() -> Made:
    return Detector(), images()


@model("variational autoencoder that draws noise in forward; trained", under=("no_grad", "grad"), reason=OWN_STREAM)
def vae() -> Made:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(20, 8), nn.Sequential(nn.Linear(4, 20), nn.Sigmoid())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, spread = self.encode(x).chunk(2, 1)
            return self.decode(mean + spread.exp() * torch.randn_like(mean)), mean, spread

    return Vae(), [(torch.rand(6, 20),) for _ in range(2)]


@model("convolutional autoencoder with pooling indices and unpooling", under=("no_grad", "grad"))
def autoencoder() -> Made:
    class Unpooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Conv2d(3, 6, 3, padding=1), nn.ConvTranspose2d(6, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            pooled, where = F.max_pool2d(torch.relu(self.enter(x)), 2, return_indices=True)
            return torch.tanh(self.leave(F.max_unpool2d(pooled, where, [2, 2]))), where

    return Unpooling(), images()


@model("3-d convolutions, instance norm and trilinear resampling")
def volume() -> Made:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(
                F.elu(self.norm(self.conv(x))), scale_factor=2.0, mode="trilinear", align_corners=False
            )

    return Volume(), [(torch.randn(1, 1, 6, 6, 6),) for _ in range(2)]


@model("spatial transformer: a grid that is predicted, and sampling by it; trained", under=("no_grad", "grad"))
def spatial_transformer() -> Made:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.locate = nn.Linear(3 * 64, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            theta = self.locate(x.flatten(1)).view(-1, 2, 3)
            return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    return Sampler(), images(size=8)


@model("convolutions, batch norm and pooling in bf16", tolerance=BF16)
def convnet_bf16() -> Made:
    return resnet_of(8).to(torch.bfloat16).eval(), [(x.to(torch.bfloat16),) for (x,) in images(4)]
