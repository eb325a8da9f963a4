"""What calls of compiled code ask of torch each time, in its cheapest form. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module

#: torch.set_grad_enabled, without the object that could put the mode back: 0.1 us in place of 0.6
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
#: the innermost transform of torch.func (vmap, grad, jvp) that is under way, None outside of all
transformed: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
#: the address of the current stream of the device of this number (-1: of the current device); 0 in builds without CUDA
current_stream_address: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
#: how many tensors hold the storage at an address, its `_cdata`; one more where Python has an object of it
storage_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def callable_of(compiled: Any) -> Callable[..., Any]:
    """What `torch.compile(model)` calls, without the module around it, which nobody but its maker has in hand.

    That module has hooks of all modules called for itself too, and says so: where there are any, it stays. Its flag for
    torch's own such hooks is of no use elsewhere.
    """
    whole: Callable[..., Any] = compiled if module._has_any_global_hook() else compiled.forward
    return whole
