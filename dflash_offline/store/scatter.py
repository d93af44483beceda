"""Read a file to many places in memory by few calls to the system.

``os.preadv`` takes a Python object for each place: made and looked at with the interpreter's lock held, those of a sample cost more
than the copying of its bytes. Here places are rows of one array, computed all at once.
"""

import ctypes
import errno
import os

import numpy as np

MOST_PLACES = 1024  # of one call: the system's limit (IOV_MAX)
_libc = ctypes.CDLL(None, use_errno=True)
_preadv = getattr(_libc, "preadv64", None) or _libc.preadv  # where there are two, the other one may take 32-bit offsets
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


def read_to(descriptor: int, places: np.ndarray, offset: int) -> int:
    """Fill places in memory, one after another, from byte ``offset`` of a file on; returns how many bytes were there.

    Args:
        places: int64 ``[n, 2]`` address and bytes of each, contiguous. Whoever calls keeps that memory.

    Raises:
        OSError: the system cannot read.
    """
    found = _call(descriptor, places[:MOST_PLACES], offset)
    wanted = int(places[:, 1].sum())
    if found == wanted or not found:
        return found
    ends = np.cumsum(places[:, 1])
    while found < wanted:  # more places, or more bytes, than the system takes at once
        first = int(np.searchsorted(ends, found, "right"))
        group = places[first : first + MOST_PLACES].copy()
        begun = found - int(ends[first] - places[first, 1])
        group[0] += begun, -begun
        more = _call(descriptor, group, offset + found)
        if not more:
            break
        found += more
    return found


def _call(descriptor: int, places: np.ndarray, offset: int) -> int:
    while True:
        found = _preadv(descriptor, places.ctypes.data, len(places), offset)
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
