"""Launches that will limit a graph once its kernels are shorter."""

from __future__ import annotations

import time

import torch

from fxopt import measure
from fxopt.labels import Axis, Label
from fxopt.proposals import to_come

GPU = {"device_type": "cuda"}


def idle_tensor_cores(headroom_ns: float, launch: str = "mm:0") -> Label:
    return Label(Axis.TENSOR_CORE_IDLE, "group", ("mm",), launch, (), "high", headroom_ns, "fp32 on the FMA units")


def expected(labels, *, kernel_ns=1e6, host_ns, floor_ns=1e5) -> list[Label]:
    return to_come(
        labels, kernel_ns=kernel_ns, host_ns=host_ns, floor_ns=floor_ns, environment=GPU, thresholds={}
    )


def test_launches_limit_a_graph_whose_kernels_will_take_less_than_the_cpu_needs_to_launch_them():
    (label,) = expected([idle_tensor_cores(8e5)], host_ns=6e5)
    assert label.axis is Axis.LAUNCH_BOUND and label.scope == "graph"
    assert label.headroom_ns == 4e5, "2e5 of kernels are left, and a call keeps the CPU busy for 6e5"
    assert label.why.startswith("Once the other labels are answered: kernels run for 200 us of the 600 us")
    assert label.confidence == "low" and {item.source for item in label.evidence} == {"modelled"}


def test_they_do_not_where_the_kernels_stay_longer_than_that():
    assert expected([idle_tensor_cores(3e5)], host_ns=6e5) == []
    assert expected([], host_ns=6e5) == []


def test_nothing_is_expected_below_the_floor():
    (label,) = expected([idle_tensor_cores(9.9e5)], host_ns=6e5, floor_ns=4e5)
    assert label.headroom_ns == 2e5


def test_the_cpu_is_busy_until_the_call_returns():
    slept = measure.host_ns(lambda x: time.sleep(x), [0.002], device=torch.device("cpu"), calls=3)
    assert slept >= 2e6
