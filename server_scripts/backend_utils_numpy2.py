"""Replacement of triton_python_backend_utils.py for a stub that was built for numpy 1 and runs with numpy 2.

Such a stub reads the item size of an array where numpy 2 stores the flags of its dtype. For tensors of strings, the
only ones of the server's model, this module corrects two consequences. Input arrays would have wrong strides: the stub
gets an array API that ignores strides. Outputs would be cut off: their bytes are stored in items whose size equals the
flags of their dtype, and padded behind the string, where the readers of a tensor with one string do not look.
"""

import ctypes
import sys
import types
from pathlib import Path

import numpy as np
from numpy._core import multiarray

exec(compile(Path(__file__).with_name("original_triton_python_backend_utils.py").read_bytes(), __file__, "exec"))

API_LEN = 300  # entries that pybind11 may look at
NEW_FROM_DESCR = 94  # PyArray_NewFromDescr(subtype, descr, nd, dims, strides, data, flags, obj)
Pointer = ctypes.c_void_p
NewFromDescr = ctypes.PYFUNCTYPE(Pointer, Pointer, Pointer, ctypes.c_int, *[Pointer] * 3, ctypes.c_int, Pointer)


def api_without_strides():
    """Return a module with numpy's C API in which PyArray_NewFromDescr ignores the strides."""
    get_pointer, new_capsule = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    get_pointer.restype, get_pointer.argtypes = Pointer, [ctypes.py_object, ctypes.c_char_p]
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [Pointer, ctypes.c_char_p, Pointer]
    api = (Pointer * API_LEN)(*(Pointer * API_LEN).from_address(get_pointer(multiarray._ARRAY_API, None)))
    original = NewFromDescr(api[NEW_FROM_DESCR])

    @NewFromDescr
    def new_from_descr(subtype, descr, ndim, dims, strides, data, flags, obj):  # noqa: PLR0913 - numpy says so
        return original(subtype, descr, ndim, dims, None, data, flags, obj)

    api[NEW_FROM_DESCR] = ctypes.cast(new_from_descr, Pointer).value
    module = types.ModuleType("numpy.core.multiarray")
    module._ARRAY_API = new_capsule(ctypes.addressof(api), None, None)
    module.kept_alive = (api, new_from_descr, original)
    return module


def item_of_flags_size():
    """Return a dtype of n bytes whose flags, which the stub takes for the size, are n.

    Raise ImportError if there is none.
    """
    for align in (False, True):
        size = np.dtype([("bytes", "u1")], align=align).flags
        item = np.dtype([("bytes", "u1", (size,))], align=align) if size > 0 else None
        if item is not None and item.flags == item.itemsize == size:
            return item
    raise ImportError(f"this stub needs numpy 1, and numpy {np.__version__} cannot stand in for it")


ITEM = item_of_flags_size()
serialize_original = serialize_byte_tensor  # noqa: F821 - executed above


def serialize_byte_tensor(input_tensor):
    """Return the serialized tensor of one string: its length, the string, and zeros up to a multiple of the item size.

    The length does not count the zeros, because MessagePack does not allow anything behind a message.
    """
    [text] = input_tensor.reshape(-1)
    padding = bytes(-(len(text) + 4) % ITEM.itemsize)
    return np.frombuffer(serialize_original(np.array([text], dtype=np.object_)) + padding, dtype=ITEM)


sys.modules["numpy.core.multiarray"] = api_without_strides()  # before the stub asks for it
