"""The native extension, built from csrc/. Addresses and sizes in, nothing out; see ops/cpu.py."""

from collections.abc import Sequence

def active_isa() -> str: ...
def available_isas() -> str: ...
def force_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def pin_threads(places: Sequence[Sequence[int]], /) -> None: ...
def touch_tiles(packed: int, tiles: int, k: int, grain: int, dtype: int, /) -> None: ...
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
def pack_int8(
    codes: int,
    rows: int,
    k: int,
    stride: int,
    scales: int,
    packed: int,
    packed_scales: int,
    sums: int,
    tile_first: int,
    tile_step: int,
    /,
) -> None: ...
def quantize_int8(
    weight: int,
    rows: int,
    k: int,
    stride: int,
    dtype: int,
    packed: int,
    packed_scales: int,
    tile_first: int,
    tile_step: int,
    /,
) -> None: ...
def linear_int8_rows(
    ids: int, count: int, packed: int, scales: int, n: int, k: int, out: int, dtype: int, /
) -> None: ...
def linear_int8(
    x: int,
    x_stride: int,
    m: int,
    dtype: int,
    rounding: int,
    scale: float,
    zero: int,
    packed: int,
    scales: int,
    sums: int,
    n: int,
    k: int,
    bias: int,
    residual: int,
    residual_stride: int,
    out: int,
    out_stride: int,
    out_dtype: int,
    epilogue: int,
    /,
) -> None: ...
def linear_int8_scratch_bytes() -> int: ...
def peak_int8_ops(rounds: int, /) -> float: ...
def embedding(ids: int, count: int, table: int, n: int, row_bytes: int, out: int, /) -> None: ...
def rms_norm(
    x: int,
    x_stride: int,
    rows: int,
    size: int,
    weight: int,
    eps: float,
    offset: float,
    dtype: int,
    residual: int,
    residual_stride: int,
    out: int,
    out_stride: int,
    /,
) -> None: ...
def layer_norm(
    x: int,
    x_stride: int,
    rows: int,
    size: int,
    weight: int,
    bias: int,
    eps: float,
    dtype: int,
    out: int,
    out_stride: int,
    /,
) -> None: ...
def rotate_heads(
    heads: int,
    token_stride: int,
    tokens: int,
    num_heads: int,
    head_dim: int,
    weight: int,
    eps: float,
    offset: float,
    cos: int,
    sin: int,
    half: int,
    interleaved: bool,
    dtype: int,
    /,
) -> None: ...
def best_rows(
    logits: int, stride: int, rows: int, vocab: int, best: int, highest: int, /
) -> None: ...
def draw_rows(
    logits: int,
    stride: int,
    vocab: int,
    count: int,
    highest: int,
    numbers: int,
    wholes: int,
    tokens: int,
    /,
) -> None: ...
def score_rows(
    logits: int,
    stride: int,
    rows: int,
    vocab: int,
    chosen: int,
    starts: int,
    counts: int,
    normalizers: int,
    ranks: int,
    top_ids: int,
    /,
) -> None: ...
def penalize_row(
    logits: int,
    vocab: int,
    tokens: int,
    count: int,
    prompt: int,
    repetition: float,
    frequency: float,
    presence: float,
    /,
) -> None: ...
def rope_angles(
    positions: int,
    count: int,
    inv_freq: int,
    half: int,
    scaling: float,
    cos: int,
    sin: int,
    dtype: int,
    /,
) -> None: ...
def scale(x: int, count: int, factor: float, dtype: int, /) -> None: ...
def soft_cap(x: int, count: int, cap: float, /) -> None: ...
def activate(x: int, count: int, activation: int, dtype: int, /) -> None: ...
def add(x: int, y: int, count: int, dtype: int, /) -> None: ...
def add_rows(
    x: int, count: int, size: int, ids: int, offset: int, table: int, n: int, dtype: int, /
) -> None: ...
def gather_columns(
    x: int,
    x_stride: int,
    rows: int,
    k: int,
    order: int,
    columns: int,
    out: int,
    dtype: int,
    /,
) -> None: ...

class QMatrix:
    def __init__(
        self,
        codec: int,
        group: int,
        n: int,
        k: int,
        parts: int,
        codes: int,
        scales: int,
        offsets: int,
        offset: int,
        multipliers: int,
        table: Sequence[int],
        /,
    ) -> None: ...

def qlinear(
    matrix: QMatrix,
    x: int,
    x_stride: int,
    m: int,
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
def qlinear_rows(matrix: QMatrix, ids: int, count: int, out: int, dtype: int, /) -> None: ...
def qlinear_pack(
    codes: int,
    rows: int,
    k: int,
    stride: int,
    bits: int,
    packed: int,
    tile_first: int,
    tile_step: int,
    /,
) -> None: ...
def qlinear_quantize(
    weight: int,
    rows: int,
    k: int,
    stride: int,
    dtype: int,
    table: Sequence[int],
    codes: int,
    scales: int,
    /,
) -> None: ...
def qlinear_scratch_bytes() -> int: ...

class AttentionPlan:
    def __init__(
        self,
        query_starts: Sequence[int],
        num_computed: Sequence[int],
        block_tables: int,
        table_width: int,
        slots: int,
        block_size: int,
        kind: int,
        /,
    ) -> None: ...

def attention(
    plan: AttentionPlan,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    softcap: float,
    window: int,
    q_dtype: int,
    cache_dtype: int,
    q: int,
    q_token: int,
    q_head: int,
    k: int,
    k_token: int,
    k_head: int,
    v: int,
    v_token: int,
    v_head: int,
    k_pool: int,
    v_pool: int,
    num_blocks: int,
    sinks: int,
    out: int,
    scratch: int,
    scratch_bytes: int,
    /,
) -> int: ...
def attention_scratch_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_tokens: int,
    max_len: int,
    threads: int,
    /,
) -> int: ...
def peak_flops(dtype: int, rounds: int, /) -> float: ...
def read_memory(address: int, size_bytes: int, /) -> int: ...
def read_pieces(address: int, piece_bytes: int, order: int, count: int, /) -> int: ...

class Tape:
    def __init__(self, token_ids: int, positions: int, count: int, /) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def __len__(self) -> int: ...
    def replay(
        self,
        token_ids: int,
        positions: int,
        plans: Sequence[AttentionPlan],
        scratch: int,
        scratch_bytes: int,
        /,
    ) -> int: ...

def kernel_seconds(count: bool, /) -> float: ...
