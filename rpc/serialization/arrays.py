"""Serialization of read-only NumPy arrays. The receiver's copy is its own, so it is writable there, as those
of other arrays are; protocol 5 of pickle alone would make it read-only.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from rpc.serialization.memory import memory_at

__all__ = ["reduce_array"]


def reduce_array(array: np.ndarray[Any, Any], _: object = None) -> Any:
    """Reduce an array; NotImplemented if pickle does it right."""
    if array.flags.writeable:
        return NotImplemented
    reduced = array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(reduced, str) or type(reduced[1][0]) is not pickle.PickleBuffer:
        return reduced
    make, (_, *layout), *state = reduced
    memory = memory_at(array.ctypes.data, array.nbytes, array)
    writable = pickle.PickleBuffer(bytearray(memory)) if type(memory) is bytes else memory
    return make, (writable, *layout), *state
