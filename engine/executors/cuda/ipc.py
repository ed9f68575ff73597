"""Memory of this GPU for other processes on the same host, and theirs for this one, through the CUDA driver.

A process that ends leaves its memory allocated until every other process has closed it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

from torch import Tensor

ENABLE_PEER_ACCESS = 1
HANDLE_BYTES = 64
Handle = ctypes.c_ubyte * HANDLE_BYTES


class _HandleStruct(ctypes.Structure):
    _fields_ = [("reserved", Handle)]


class IpcError(OSError):
    """The CUDA driver has refused a call. The message has the call and the name of the error."""


def export_memory(tensor: Tensor) -> tuple[bytes, int]:
    """Return the handle of the allocation that contains a tensor, and the offset of the tensor in it. Raises
    IpcError."""
    _use_device(tensor.device.index)
    base, size, handle = c_uint64(), c_size_t(), _HandleStruct()
    _call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(tensor.data_ptr()))
    _call("cuIpcGetMemHandle", byref(handle), base)
    return bytes(handle.reserved), tensor.data_ptr() - base.value


def open_memory(handle: bytes, device: int) -> int:
    """Return the address at which a GPU of this process can access the allocation of another process. Raises
    IpcError."""
    if len(handle) != HANDLE_BYTES:
        raise IpcError(f"a handle has {len(handle)} bytes, not {HANDLE_BYTES}")
    _use_device(device)
    address = c_uint64()
    struct = _HandleStruct(Handle.from_buffer_copy(handle))
    _call("cuIpcOpenMemHandle_v2", byref(address), struct, c_uint(ENABLE_PEER_ACCESS))
    return address.value


def close_memory(address: int, device: int) -> None:
    """Close what `open_memory` has returned."""
    _use_device(device)
    _call("cuIpcCloseMemHandle", c_uint64(address))


def _use_device(index: int) -> None:
    """Make the context in which torch uses this GPU that of this thread."""
    _call("cuCtxSetCurrent", c_void_p(_context(index)))


@functools.cache
def _context(index: int) -> int | None:
    device, context = c_int(), c_void_p()
    _call("cuDeviceGet", byref(device), c_int(index))
    _call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context.value


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise IpcError(f"the CUDA driver cannot be loaded: {error}") from None


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(c_int(status), byref(text))
        raise IpcError(f"{name} has failed: {(text.value or b'unknown error').decode()} ({status})")
