"""Runs on a GPU: on a real one if there is one, else on one that only keeps books of where tensors are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import GPU, FakeGPU, fake_gpu
from lightning.pytorch.accelerators import CPUAccelerator

import lightning_ppo as ppo


class RealGPU:
    """What tests ask of a GPU."""

    def num_bytes(self) -> int:
        """Bytes of everything that is on the GPU now."""
        return torch.cuda.memory_allocated()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealGPU | FakeGPU]:
    """A GPU."""
    if torch.cuda.is_available():
        # so that it computes what the CPU computes
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        yield RealGPU()
    else:
        with fake_gpu(monkeypatch) as fake:
            yield fake


@pytest.fixture
def on_gpu(gpu: RealGPU | FakeGPU, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Build runs that train on the GPU; see `make_run`."""

    def build(*args: Any, **settings: Any) -> Any:
        if isinstance(gpu, RealGPU):
            return make_run(*args, **{"accelerator": "gpu", "devices": 1, **settings})
        # Lightning itself must not look for the GPU
        monkeypatch.setattr(CPUAccelerator, "setup_device", lambda self, device: None)
        monkeypatch.setattr(ppo.StreamingPPOStrategy, "root_device", property(lambda self: GPU))
        return make_run(*args, **settings)

    return build
