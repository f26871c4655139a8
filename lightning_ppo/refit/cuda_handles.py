"""CUDA memory of this process as another process on the same device opens it: numbers and base64 text, no pickle."""

import base64
from typing import Any

import torch
from torch import Tensor

from lightning_ppo.errors import EngineError

_NUM_FIELDS = 8
_BYTE_FIELDS = (1, 4, 6)


def device_uuid(device: torch.device) -> str:
    """Name the physical device; its number differs between processes that see different devices."""
    return str(torch.cuda.get_device_properties(device).uuid)


def encode_handle(fields: tuple[Any, ...]) -> list[Any]:
    """Turn what torch hands out for a shared storage into plain JSON values.

    Args:
        fields: Device, handle, size, offset, reference counter's handle and offset, event's handle, whether to wait for
            the event; the handles are bytes.

    Raises:
        EngineError: this torch hands out something else.
    """
    if len(fields) != _NUM_FIELDS or not all(isinstance(fields[index], bytes) for index in _BYTE_FIELDS):
        raise EngineError(f"transport=ipc does not know torch {torch.__version__}'s handles; set another transport")
    return [base64.b64encode(f).decode() if isinstance(f, bytes) else f for f in fields]


def decode_handle(message: list[Any], device_index: int) -> tuple[Any, ...]:
    """Turn `encode_handle`'s values back, for the number that the device has in this process.

    Raises:
        EngineError: they are no handle.
    """
    try:
        fields = [base64.b64decode(f) if index in _BYTE_FIELDS else int(f) for index, f in enumerate(message)]
    except (TypeError, ValueError) as error:
        raise EngineError(f"handle={error!r} cannot be read; both sides need the same version") from None
    if len(fields) != _NUM_FIELDS:
        raise EngineError(f"handle={len(fields)} fields are not {_NUM_FIELDS}; both sides need the same version")
    return (device_index, *fields[1:7], bool(fields[7]))


def share(flat: Tensor) -> list[Any]:
    """Handle of a CUDA tensor `[N]` uint8 that fills its own storage.

    The caller keeps the memory for as long as anybody may read it.
    """
    storage: Any = flat.untyped_storage()
    fields = storage._share_cuda_()
    handle = encode_handle(fields)
    # The count is 1 until somebody who opened it lets go, and torch keeps the memory till then: for ever, if a server
    # was killed or never opened it. Nobody else counts: this is ours to give back.
    storage._release_ipc_counter(fields[4], fields[5], device=flat.device)
    return handle


def open_shared(message: list[Any], device: torch.device) -> Tensor:
    """Open another process's tensor, `[N]` uint8, on the same physical device.

    Raises:
        EngineError: the device or driver does not allow it.
    """
    new_shared: Any = torch.UntypedStorage._new_shared_cuda
    try:
        storage = new_shared(*decode_handle(message, device.index or 0))
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise EngineError(f"transport=ipc cannot open the trainer's memory ({why}); set another transport") from None
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
