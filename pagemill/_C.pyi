"""The native extension, built from csrc/. Addresses and sizes in, nothing out; see ops/cpu.py."""

def active_isa() -> str: ...
def available_isas() -> str: ...
def force_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def pack_linear(
    weight: int,
    rows: int,
    k: int,
    stride: int,
    packed: int,
    tile_first: int,
    tile_step: int,
    dtype: int,
    /,
) -> None: ...
def linear_rows(
    ids: int, count: int, packed: int, n: int, k: int, out: int, dtype: int, /
) -> None: ...
def linear(
    x: int,
    x_stride: int,
    m: int,
    packed: int,
    n: int,
    k: int,
    dtype: int,
    bias: int,
    residual: int,
    residual_stride: int,
    out: int,
    out_stride: int,
    out_dtype: int,
    epilogue: int,
    /,
) -> None: ...
def linear_scratch_bytes() -> int: ...
def peak_flops(dtype: int, rounds: int, /) -> float: ...
def read_memory(address: int, size_bytes: int, /) -> int: ...
