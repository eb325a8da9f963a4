"""The operators that only look at one tensor, operand 0, in another way."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

VIEWS: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
    }
)


def strided_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether strides are known to be equal but for dimensions of size 1, where they address nothing."""
    from fxopt.torch_api.values import equal

    sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(equal(size, 1) or equal(one, other) for size, one, other in sizes)
