"""Other inputs of the same form as those that a graph was compiled for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from fxopt.reference import clone_inputs, extent, storage_groups

__all__ = ["fresh_inputs"]


def fresh_inputs(inputs: Sequence[Any], static: Collection[int], seed: int) -> list[Any]:
    """Other inputs of the same form, for checking that a candidate is right beyond the values it was tuned
    on.

    Every tensor outside ``static`` keeps its shape, strides, offset, dtype, device and aliasing, and gets a
    random permutation of its own elements: integers stay indices that were valid, floats stay in the range
    that the model expects. Floats are then multiplied by uniform(0.5, 1.5), element by element, and clamped
    to the tensor's own range, which keeps signs, zeros and domains (a probability stays one, a mask of
    finfo.min does not overflow); constant tensors are multiplied only. Two kinds of tensors have a form that
    a free permutation breaks: masks (bool; integers of 0 and 1; floats of 0 and one other value) have their
    rows permuted, and their columns by one common permutation, so that no row becomes fully masked;
    one-dimensional sorted integers that are not consecutive (cumulative sequence lengths, offsets) stay as
    they are, because kernels read memory by them. Tensors that view one storage swap only elements that the
    same tensors address. Deterministic in ``seed``; the global generators are not touched. Static inputs are
    shared, other objects passed through.
    """
    static = set(static)
    fresh = clone_inputs(inputs, static)
    with torch.no_grad(), torch.inference_mode(False):
        for group in storage_groups(inputs):
            members = [fresh[index].detach() for index in group]
            if any(index in static for index in group) or len({member.dtype for member in members}) > 1:
                continue
            generator = torch.Generator(device=members[0].device).manual_seed(seed * 1_000_003 + group[0])
            # A dimension of stride 0 repeats its elements (expand): permute them once.
            distinct = [
                member[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in member.stride())]
                for member in members
            ]
            if len(distinct) == 1 and _without_overlap(distinct[0]):
                distinct[0].copy_(_scrambled(distinct[0].clone(), generator))
            else:
                _scramble_shared(distinct, generator)
    return fresh


def _without_overlap(tensor: torch.Tensor) -> bool:
    """Whether the strides show that no two elements share an address (sufficient, as for every dense or
    sliced tensor)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _scramble_shared(members: list[torch.Tensor], generator: torch.Generator) -> None:
    """Permute a storage seen by several tensors, among addresses that belong to the same set of tensors."""
    end = max(extent(member)[1] for member in members)
    if end == 0 or len(members) > 62:
        return
    flat = members[0].as_strided((end,), (1,), 0)
    owners = torch.zeros(end, dtype=torch.int64, device=flat.device)
    addresses = torch.arange(end, device=flat.device)
    for bit, member in enumerate(members):
        own = addresses.as_strided(member.size(), member.stride(), member.storage_offset()).reshape(-1).unique()
        owners[own] |= 1 << bit
    for cell in owners.unique().tolist():
        if cell:
            where = (owners == cell).nonzero().squeeze(1)
            flat[where] = _scrambled(flat[where], generator)


def _scrambled(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """New values for a tensor, in its shape and dtype."""
    if values.numel() == 0:
        return values
    dtype = values.dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        return _scrambled(values.float(), generator).to(dtype)
    if dtype.is_complex:
        return _permuted(values, generator) * _factors(values, generator)
    low, high = values.min(), values.max()
    if bool(low == high):
        if not dtype.is_floating_point:
            return values
        finite = torch.finfo(dtype)
        return torch.where(
            values.isfinite(), (values * _factors(values, generator)).clamp(finite.min, finite.max), values
        )
    if _is_mask(values, low, high):
        if values.dim() < 2 or values.numel() == values.size(-1):
            return _permuted(values, generator)
        rows = values.reshape(-1, values.size(-1))
        order = torch.randperm(rows.size(0), generator=generator, device=rows.device)
        columns = torch.randperm(rows.size(1), generator=generator, device=rows.device)
        return rows[order][:, columns].reshape(values.shape)
    if not dtype.is_floating_point:
        if values.dim() == 1 and bool((values.diff() >= 0).all()) and not bool((values.diff() == 1).all()):
            return values
        return _permuted(values, generator)
    values = _permuted(values, generator)
    finite_values = values[values.isfinite()]
    if finite_values.numel() == 0:
        return values
    scaled = (values * _factors(values, generator)).clamp(finite_values.min(), finite_values.max())
    return torch.where(values.isfinite(), scaled, values)


def _is_mask(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> bool:
    if values.dtype == torch.bool:
        return True
    if not values.dtype.is_floating_point:
        return bool(low == 0) and bool(high == 1)
    return bool((low == 0) | (high == 0)) and bool(((values == low) | (values == high)).all())


def _permuted(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(values.numel(), generator=generator, device=values.device)
    return values.reshape(-1)[order].reshape(values.shape)


def _factors(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    real = torch.float64 if values.dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.rand(values.shape, generator=generator, device=values.device, dtype=real) + 0.5
