"""Finds the variant of the C++ step that this processor runs, and speaks its C interface. Imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_uint16, c_void_p
from functools import cache
from pathlib import Path

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

VARIANTS: dict[str, frozenset[str]] = {
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""Name to the processor flags it was compiled for (pyproject.toml holds the compiler's), the fastest first."""

PHASES = ("prepare", "queries, keys, values", "attention", "output", "mlp", "logits", "sampling")
"""What a step's time is spent on, in the order of phases.h."""

_MESSAGE_SIZE = 256


class Shape(Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")],
        *[(name, c_int32) for name in ("intermediate", "vocab", "tied", "qkv_bias", "qk_norm", "max_positions")],
        ("rms_eps", c_float),
        ("rope_scale", c_float),
        ("inv_freq", POINTER(c_float)),
        ("windows", POINTER(c_int32)),
    ]


class Sample(Structure):
    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
        ("best_ids", POINTER(c_int32)),
        ("best_logprobs", POINTER(c_float)),
    ]


class Plan(Structure):
    _fields_ = [
        *[(name, c_int32) for name in ("num_rows", "num_segments", "num_pages", "num_copies", "num_logit_rows")],
        *[(name, c_int32) for name in ("num_samples", "num_prompt_ids", "num_ids", "num_biases", "num_mask_words")],
        *[(name, c_void_p) for name in ("token_ids", "positions", "slots", "segments", "pages", "copies")],
        *[(name, c_void_p) for name in ("logit_rows", "samples", "prompt_ids", "ids", "biases", "mask_words")],
        ("results", POINTER(Sample)),
    ]


def processor_flags() -> frozenset[str]:
    """What Linux lets programs use of this processor; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def runnable_variants(flags: frozenset[str] | None = None) -> list[str]:
    """The variants that a processor with these flags (this one's when None) can run, the fastest first."""
    flags = processor_flags() if flags is None else flags
    return [name for name, needed in VARIANTS.items() if needed <= flags]


def library_path(variant: str) -> Path | None:
    """Where the installation put this variant; None when it was not built."""
    spec = importlib.util.find_spec(f"engine.native._{variant}")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def find_variant() -> str | None:
    """The fastest variant that was built and runs here."""
    return next((name for name in runnable_variants() if library_path(name) is not None), None)


@cache
def load_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    message = (c_char_p, c_size_t)
    library.chorus_create.argtypes = [POINTER(Shape), c_int, c_int, POINTER(c_void_p), *message]
    library.chorus_load.argtypes = [c_void_p, c_char_p, c_int, c_void_p, c_int, c_int, *message]
    library.chorus_load_packed.argtypes = [c_void_p, c_char_p, c_int, c_char_p, c_void_p, c_int, c_int, *message]
    library.chorus_check_packed.argtypes = [c_void_p]
    library.chorus_execute.argtypes = [c_void_p, POINTER(Plan), *message]
    library.chorus_destroy.argtypes = [c_void_p]
    library.chorus_destroy.restype = None
    library.chorus_logits.argtypes = [c_void_p, POINTER(c_int)]
    library.chorus_logits.restype = POINTER(c_float)
    library.chorus_pool.argtypes = [c_void_p, POINTER(c_size_t)]
    library.chorus_pool.restype = POINTER(c_uint16)
    library.chorus_phases.argtypes = [c_void_p]
    library.chorus_phases.restype = POINTER(c_double)
    return library


class NativeEngine:
    """One model's weights, KV pool and threads in C++. Calls release the GIL; one thread at a time may make them.

    Errors: ValueError for what does not fit the model or the pool (nothing has changed then), MemoryError.
    """

    def __init__(self, path: Path, shape: Shape, num_pages: int, num_threads: int) -> None:
        self._handle = c_void_p()
        self._library = load_library(path)
        self._message = ctypes.create_string_buffer(_MESSAGE_SIZE)
        self._check(self._library.chorus_create(shape, num_pages, num_threads, self._handle, *self._to_message()))

    def __del__(self) -> None:
        if self._handle:
            self._library.chorus_destroy(self._handle)
            self._handle = c_void_p()

    def load(self, name: str, layer: int, data: int, rows: int, columns: int) -> None:
        """Pack one bfloat16 parameter of [rows, columns], which stands at address `data`."""
        status = self._library.chorus_load(self._handle, name.encode(), layer, data, rows, columns, *self._to_message())
        self._check(status)

    def load_packed(self, name: str, layer: int, packing: str, blocks: int, rows: int, columns: int) -> None:
        """The same parameter as blocks of a GGUF type (Q4_0, Q4_1, Q8_0), which stand at address `blocks`."""
        names = (name.encode(), layer, packing.encode())
        self._check(self._library.chorus_load_packed(self._handle, *names, blocks, rows, columns, *self._to_message()))

    def check_packed(self) -> int:
        """Drop the blocks of matrices that are not, bit for bit, what was loaded; how many matrices stay packed."""
        return int(self._library.chorus_check_packed(self._handle))

    def execute(self, plan: Plan) -> None:
        self._check(self._library.chorus_execute(self._handle, plan, *self._to_message()))

    def logits(self) -> tuple[ctypes._Pointer[c_float], int]:
        """Where the last step's logits stand, and how many columns a row has."""
        width = c_int()
        return self._library.chorus_logits(self._handle, width), width.value

    def pool(self) -> tuple[ctypes._Pointer[c_uint16], int]:
        """The KV pool, [layer][page][kv head][keys, values], and its number of bfloat16 elements."""
        size = c_size_t()
        return self._library.chorus_pool(self._handle, size), size.value

    def phases(self) -> dict[str, float]:
        """Seconds that the last step spent on each of PHASES."""
        return dict(zip(PHASES, self._library.chorus_phases(self._handle)[: len(PHASES)], strict=True))

    def _to_message(self) -> tuple[ctypes.Array[ctypes.c_char], int]:
        return self._message, _MESSAGE_SIZE

    def _check(self, status: int) -> None:
        if status == 0:
            return
        error = {1: ValueError, 2: MemoryError}.get(status, RuntimeError)
        raise error(self._message.value.decode() or "the native step failed")
