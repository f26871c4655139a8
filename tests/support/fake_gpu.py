"""A GPU that is not there: tensors that say they are on `cuda`, and operations that fail where a real one's would.

Every tensor stays in host memory. Its storage is marked, `Tensor.device` tells the mark, operations pass it on to their
results, and an operation on tensors of two devices raises what torch raises. It cannot show kernels, streams, autocast
or memory that runs out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
REAL_DEVICE = torch._C.TensorBase.device
ATEN = torch.ops.aten
COPIES = {ATEN.copy_.default, ATEN._foreach_copy_.default}
INDEXING = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN._index_put_impl_.default}
"""Operations whose second argument, the indices, may be on the host."""


class FakeGPU:
    """Which storages are on the GPU."""

    def __init__(self) -> None:
        # a weak reference keeps the address of a storage from being given to another one
        self._storages: dict[int, StorageWeakRef] = {}

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor would be."""
        return GPU if tensor.untyped_storage()._cdata in self._storages else REAL_DEVICE.__get__(tensor)

    def put(self, result: Any, device: torch.device) -> Any:
        """Mark every tensor of a result as being there."""
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if device.type == GPU.type:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
                else:
                    self._storages.pop(storage._cdata, None)
        return result

    def num_bytes(self) -> int:
        """Bytes of everything that is on the GPU now."""
        total = 0
        for address, kept in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(kept.cdata)
            if storage is None:
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total


class Operations(TorchDispatchMode):
    """Looks at the devices of what goes into an operation, and marks what comes out."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in COPIES:
            return result
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        anywhere = {id(index) for index in args[1] if index is not None} if func in INDEXING else set()
        devices = {
            self._gpu.device_of(tensor)
            for tensor in tensors
            if self._gpu.device_of(tensor) == GPU or (id(tensor) not in anywhere and not self._is_number(func, tensor))
        }
        if len(devices) > 1:
            where = ", ".join(f"{list(tensor.shape)} on {self._gpu.device_of(tensor)}" for tensor in tensors)
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {where}")
        return self._gpu.put(result, GPU) if devices == {GPU} else result

    def _is_number(self, func: Any, tensor: Tensor) -> bool:
        """Whether torch takes a tensor on the host for a number."""
        takes_numbers = torch.Tag.pointwise in func.tags or func in INDEXING or "_foreach_" in func.name()
        return takes_numbers and tensor.dim() == 0


class Calls(TorchFunctionMode):
    """Carries out calls that name a device, which a torch without CUDA would refuse."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda"):
            return self._move(name, func, args[0], args[1:], kwargs)
        if name in ("numpy", "__array__") and self._gpu.device_of(args[0]) == GPU:
            raise TypeError(f"can't convert {GPU} device type tensor to numpy. Use Tensor.cpu() first")
        if name == "pin_memory":
            return args[0].clone()
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None or torch.device(device).type not in (HOST.type, GPU.type):
            return func(*args, **kwargs)
        return self._gpu.put(func(*args, **{**kwargs, "device": HOST}), torch.device(device))

    def _move(self, name: str, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        target = {"cpu": HOST, "cuda": GPU}.get(name)
        for value in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, Tensor):
                target = value.device
            elif isinstance(value, torch.device | str):
                target = torch.device(value)
        here = self._gpu.device_of(tensor)
        if "meta" in (here.type, target and target.type):
            return func(tensor, *args, **kwargs)
        if name == "to":
            args = tuple(HOST if isinstance(value, torch.device | str) else value for value in args)
            result = func(tensor, *args, **{**kwargs, **({"device": HOST} if kwargs.get("device") else {})})
        else:
            result = tensor
        if target is None or target.type == here.type:
            return result
        moved = result.clone() if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata else result
        return self._gpu.put(moved, target)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """Pretend, in this thread, that there is a GPU."""
    gpu = FakeGPU()
    monkeypatch.setattr(Tensor, "device", property(gpu.device_of), raising=False)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: gpu.device_of(tensor) == GPU), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    with Calls(gpu), Operations(gpu):
        yield gpu
