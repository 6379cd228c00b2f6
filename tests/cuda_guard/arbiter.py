"""Structures of the daemon's native library for ctypes."""

import ctypes


class Contender(ctypes.Structure):
    _fields_ = (
        ("policy", ctypes.c_void_p),
        ("job", ctypes.c_void_p),
        ("file", ctypes.c_int),
        *((name, ctypes.c_uint32) for name in ("place", "share_ppm", "limit_ppm", "lent_ppm")),
        ("active_ns", ctypes.c_int64),
        ("seen_ns", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("virtual_ns", "turn_ns", "looked_ns", "credible_ns")),
        *((name, ctypes.c_int64) for name in ("memory", "memory_most", "is_away", "sweep_ns")),
    )


class Arbiter(ctypes.Structure):
    """`struct arbiter` of native/arbiter.h."""

    _fields_ = (
        ("count", ctypes.c_uint32),
        ("holder", ctypes.c_int32),
        ("draining", ctypes.c_int32),
        ("cap_ppm", ctypes.c_uint32),
        *(
            (name, ctypes.c_int64)
            for name in ("turn_ns", "idle_ns", "drain_ns", "began_ns", "memory", "memory_foreign")
        ),
        ("contenders", Contender * 32),
        ("devices", ctypes.c_void_p),
        ("number", ctypes.c_uint32),
    )
