"""List the kinds of devices that ranks run on, with the traits that stages ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Describe a kind of device.

    torch_type: the device's type in torch
    backend: the backend of torch.distributed. gloo has no reduce-scatter, and reads a sent buffer
        after the sending call has returned
    has_streams: collectives and copies run beside compute
    has_pinned_memory: host memory can be pinned for copies to the device
    launches_are_free: the host spends no time on launching kernels
    has_driver: a driver takes some of the device's memory
    """

    torch_type: str
    backend: str
    has_streams: bool
    has_pinned_memory: bool
    launches_are_free: bool
    has_driver: bool


GPU = DeviceKind(
    torch_type="cuda",
    backend="nccl",
    has_streams=True,
    has_pinned_memory=True,
    launches_are_free=False,
    has_driver=True,
)
CPU = DeviceKind(
    torch_type="cpu",
    backend="gloo",
    has_streams=False,
    has_pinned_memory=False,
    launches_are_free=True,
    has_driver=False,
)
