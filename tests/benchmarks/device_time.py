"""What a GPU does in a call, by torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class DeviceTime:
    """Of one call, on average."""

    kernels: float
    """Kernels and copies."""
    ms: dict[str, float]
    """Milliseconds by name of the kernel."""

    @property
    def busy_ms(self) -> float:
        """Milliseconds of all."""
        return sum(self.ms.values())

    def of(self, *parts: str) -> float:
        """Milliseconds of kernels with any of `parts` in their names."""
        return sum(spent for name, spent in self.ms.items() if any(part in name for part in parts))


def device_time(call: Callable[[], object], calls: int, device: torch.device) -> DeviceTime:
    """Profile `calls` calls on a CUDA device."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize(device)
    spent, count = Counter[str](), 0
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            spent[event.name] += event.device_time / 1e3 / calls
            count += 1
    return DeviceTime(count / calls, dict(spent.most_common()))
