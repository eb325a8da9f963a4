"""The half of CUPTI's profiler that needs no GPU and no driver: which metrics a chip has, in how many passes a set of
them is collected, and the values in what was collected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from profiler_core.collect.cupti.library import (
    CountersError,
    CountersUnavailable,
    Library,
    UnknownMetric,
    bytes_pointer,
    load,
    names_array,
)

if TYPE_CHECKING:
    import numpy as np

_RANGE_PROFILER = 0  # CUPTI_PROFILER_TYPE_RANGE_PROFILER
_METRIC_TYPES = (0, 1, 2)  # counter, ratio, throughput


class Host:
    """CUPTI's host object for one chip ("GH100"). Close it, or use it in a ``with``.

    ``availability`` is the image that a live device gives of its counters (a passive one: a chip has more than a
    device of it may offer); without one the chip's whole set counts. Raises :class:`CountersUnavailable` for a chip
    that this libcupti does not know.
    """

    def __init__(self, chip: str, availability: bytes | None = None, library: Library | None = None) -> None:
        self.chip = chip
        self._library = library or load()
        self._availability = ctypes.create_string_buffer(availability, len(availability)) if availability else None
        try:
            self._object = self._library.call(
                "cuptiProfilerHostInitialize",
                profilerType=_RANGE_PROFILER,
                pChipName=chip.encode(),
                pCounterAvailabilityImage=bytes_pointer(self._availability) if self._availability else None,
            ).pHostObject
        except CountersError as error:
            raise CountersUnavailable(f"chip {chip!r}: {error}") from error

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._object:
            self._library.call("cuptiProfilerHostDeinitialize", pHostObject=self._object)
            self._object = None

    def base_metrics(self) -> list[str]:
        """Names without roll-up or submetric ("sm__warps_active")."""
        names: list[str] = []
        for kind in _METRIC_TYPES:
            found = self._library.call("cuptiProfilerHostGetBaseMetrics", pHostObject=self._object, metricType=kind)
            names += [found.ppMetricNames[i].decode() for i in range(found.numMetrics)]
        return names

    def add(self, metrics: Sequence[str]) -> None:
        """Adds metrics to the configuration, in one call: the scheduler packs what it sees together, and added one by
        one the same metrics need more than twice the passes. A name that the chip lacks raises an error, after which
        CUPTI 13.0 refuses everything on this object: use another. :func:`configure` says which name it was.
        """
        self._library.call(
            "cuptiProfilerHostConfigAddMetrics",
            pHostObject=self._object,
            ppMetricNames=names_array(metrics),
            numMetrics=len(metrics),
        )

    def config_image(self) -> bytes:
        """The schedule of the metrics added so far."""
        size = self._library.call("cuptiProfilerHostGetConfigImageSize", pHostObject=self._object).configImageSize
        image = ctypes.create_string_buffer(size)
        self._library.call(
            "cuptiProfilerHostGetConfigImage",
            pHostObject=self._object,
            configImageSize=size,
            pConfigImage=bytes_pointer(image),
        )
        return image.raw

    def evaluate(self, counter_data: Any, metrics: Sequence[str], ranges: range) -> np.ndarray:
        """float64[ranges, metrics] of these ranges of a decoded counter data image (a ctypes buffer); NaN where there
        is none.
        """
        import numpy as np

        values = np.full((len(ranges), len(metrics)), np.nan)
        names, data, size = names_array(metrics), bytes_pointer(counter_data), len(counter_data)
        for row, index in enumerate(ranges):
            self._library.call(
                "cuptiProfilerHostEvaluateToGpuValues",
                pHostObject=self._object,
                pCounterDataImage=data,
                counterDataImageSize=size,
                rangeIndex=index,
                ppMetricNames=names,
                numMetrics=len(metrics),
                pMetricValues=values[row].ctypes.data_as(ctypes.POINTER(ctypes.c_double)),
            )
        return values


def chips(library: Library | None = None) -> list[str]:
    """The chips that this libcupti knows ("GH100", ...)."""
    found = (library or load()).call("cuptiProfilerHostGetSupportedChips")
    return [found.ppChipNames[i].decode() for i in range(found.numChips)]


def unknown(chip: str, metrics: Iterable[str], library: Library | None = None) -> list[str]:
    """Those of ``metrics`` that the chip lacks."""
    missing = []
    for name in metrics:
        with Host(chip, library=library) as host:  # a new object for each: a refusal leaves it unusable
            try:
                host.add([name])
            except CountersError:
                missing.append(name)
    return missing


def config_image(
    chip: str, metrics: Sequence[str], availability: bytes | None = None, library: Library | None = None
) -> bytes:
    """The schedule for collecting ``metrics`` together. Raises :class:`UnknownMetric` that names each bad one."""
    with Host(chip, availability, library) as host:
        return configure(host, metrics)


def configure(host: Host, metrics: Sequence[str]) -> bytes:
    """As :func:`config_image`, on a host object that will evaluate the values later."""
    if not metrics:
        raise ValueError("no metrics to configure")
    try:
        host.add(metrics)
        return host.config_image()
    except CountersError as error:
        missing = unknown(host.chip, metrics, host._library)
        if not missing:
            raise
        raise UnknownMetric(f"{host.chip} has no metric {', '.join(map(repr, missing))}") from error


def passes(chip: str, metrics: Sequence[str], library: Library | None = None) -> int:
    """How many times each kernel has to run for ``metrics`` together."""
    return image_passes(config_image(chip, metrics, library=library), library)


def image_passes(image: bytes, library: Library | None = None) -> int:
    """The number of passes that a config image holds."""
    buffer = ctypes.create_string_buffer(image, len(image))
    found = (library or load()).call(
        "cuptiProfilerHostGetNumOfPasses", configImageSize=len(image), pConfigImage=bytes_pointer(buffer)
    )
    return int(found.numOfPasses)
