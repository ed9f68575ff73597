"""The kernel of int4_gemm.py, in Gluon, the language below Triton's, in which a kernel says what each warp does.

One warp copies tiles of words to shared memory with the copy engine, before the inputs of the kernel are there, another
one tiles of x. Two groups of four warps unpack weights into registers, while the tensor cores multiply those that they
unpacked before. A program computes one tile after another, so that copies for the next one are under way when it stores
results.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.ops.cuda.launch import STEP_ARRAYS, STEP_SIZES, begin_next, wait_for_inputs
from engine.ops.cuda.lowbit_values import NIBBLE, NIBBLE_LESS_ZERO

GROUPS = gl.constexpr(2)  # of warps that multiply
TILE = gl.constexpr(64)  # rows of weights that the tensor cores multiply at once
X_STAGES = gl.constexpr(8)  # parts of x in shared memory


@gluon.jit(do_not_specialize=[*STEP_SIZES, "splits"], do_not_specialize_on_alignment=STEP_ARRAYS)
def gemm(
    words, x, out, scale, zero, bias, num_rows, columns, num_blocks, splits,
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr, IS_STAGED: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute tiles of outputs, or shares of their sums. Where weights are no multiple of its rows, the last tile
    overlaps the one before. With IS_GATED, every other eight rows of `words` are the gate's, so that a thread has both
    factors of an output.
    """
    begin_next()
    WEIGHTS: gl.constexpr = 16 * words.block_shape[0]
    ROWS: gl.constexpr = x.block_shape[0]
    memory = gl.allocate_shared_memory(gl.int16, [GROUPS * STAGES] + words.block_shape, words.layout)
    x_memory = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES] + x.block_shape, x.layout)
    if IS_STAGED:
        staging = gl.allocate_shared_memory(out.dtype, [GROUPS] + out.block_shape, out.layout)
    else:
        staging = memory
    full, empty = _barriers(GROUPS * STAGES, 1), _barriers(GROUPS * STAGES, 1)
    x_full, x_empty = _barriers(X_STAGES, 1), _barriers(X_STAGES, GROUPS)
    fence_async_shared()
    tiles, x_tiles = (memory, full, empty), (x_memory, x_full, x_empty)
    sizes = num_rows, columns * (1 + IS_GATED), num_blocks, splits
    given = scale, zero, bias, out, columns
    gl.warp_specialize(
        [
            (_multiply, (tiles, x_tiles, given, sizes, staging, 0, HAS_ZERO, HAS_BIAS, IS_GATED, IS_STAGED)),
            (_multiply, (tiles, x_tiles, given, sizes, staging, 1, HAS_ZERO, HAS_BIAS, IS_GATED, IS_STAGED)),
            (_copy_words, (words, tiles, sizes, ROWS)),
            (_copy_x, (x, x_tiles, sizes, WEIGHTS)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _num_tiles(sizes, ROWS: gl.constexpr, WEIGHTS: gl.constexpr):
    num_rows, num_weights, num_blocks, splits = sizes
    return gl.cdiv(num_rows, ROWS) * gl.cdiv(num_weights, GROUPS * WEIGHTS) * splits


@gluon.jit
def _place(number, sizes, GROUP: gl.constexpr, ROWS: gl.constexpr, WEIGHTS: gl.constexpr):
    """Return the first row of x, row of weights and block of a tile, and the number of its blocks. Tiles of the same
    weights follow each other.
    """
    num_rows, num_weights, num_blocks, splits = sizes
    down, across = gl.cdiv(num_rows, ROWS), gl.cdiv(num_weights, GROUPS * WEIGHTS)
    first = number // down % across * (GROUPS * WEIGHTS) + GROUP * WEIGHTS
    each = gl.cdiv(num_blocks, splits)
    block = number // down // across * each
    return number % down * ROWS, gl.minimum(first, num_weights - WEIGHTS), block, gl.minimum(num_blocks - block, each)


@gluon.jit
def _copy_words(words, tiles, sizes, ROWS: gl.constexpr):
    """Copy the words of both groups, one block of columns after another."""
    memory, full, empty = tiles
    STAGES: gl.constexpr = memory.shape[0] // GROUPS
    WEIGHTS: gl.constexpr = 16 * words.block_shape[0]
    WIDTH: gl.constexpr = words.block_shape[3]
    at = 0
    for number in range(gl.program_id(0), _num_tiles(sizes, ROWS, WEIGHTS), gl.num_programs(0)):
        m, first, block, count = _place(number, sizes, 0, ROWS, WEIGHTS)
        m, second, block, count = _place(number, sizes, 1, ROWS, WEIGHTS)
        for k in range(block * WIDTH, (block + count) * WIDTH, WIDTH):
            for group in gl.static_range(GROUPS):
                stage = group * STAGES + (at & STAGES - 1)
                row = second if group else first
                mbarrier.wait(empty.index(stage), at // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(stage), words.block_type.nbytes)
                tma.async_copy_global_to_shared(words, [row // 16, 0, 0, k], full.index(stage), memory.index(stage))
            at += 1


@gluon.jit
def _copy_x(x, x_tiles, sizes, WEIGHTS: gl.constexpr):
    """Copy tiles of x, each for a part of the words of a block."""
    memory, full, empty = x_tiles
    ROWS: gl.constexpr = x.block_shape[0]
    WIDTH: gl.constexpr = x.block_shape[1]
    wait_for_inputs()
    part = 0
    for number in range(gl.program_id(0), _num_tiles(sizes, ROWS, WEIGHTS), gl.num_programs(0)):
        m, first, block, count = _place(number, sizes, 0, ROWS, WEIGHTS)
        for k in range(4 * block * WIDTH, 4 * (block + count) * WIDTH, WIDTH):
            stage = part & X_STAGES - 1
            mbarrier.wait(empty.index(stage), part // X_STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [m, k], full.index(stage), memory.index(stage))
            part += 1


@gluon.jit
def _multiply(
    tiles, x_tiles, given, sizes, staging,
    GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr,
    IS_STAGED: gl.constexpr,
):  # fmt: skip
    """Multiply one or two tiles of 64 rows of weights by a tile of x. While the tensor cores multiply a part of the
    columns of a tile, the weights of the next part or tile are unpacked.
    """
    memory, full, empty = tiles
    scale, zero, bias, out, columns = given
    num_rows, num_weights, num_blocks, splits = sizes
    TILES: gl.constexpr = 16 * memory.shape[1] // TILE
    WEIGHTS: gl.constexpr = TILES * TILE
    ROWS: gl.constexpr = x_tiles[0].shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    SECOND: gl.constexpr = TILE // (1 + IS_GATED)  # rows from those of a tile to those of the next
    num_tiles, at = _num_tiles(sizes, ROWS, WEIGHTS), 0  # at: blocks of columns that were multiplied
    m, first, block, count = _place(gl.program_id(0), sizes, GROUP, ROWS, WEIGHTS)
    rows = _weight_rows(columns, OPERAND, IS_GATED)
    at_row = block * num_weights + first // (1 + IS_GATED)
    scales = _scales(scale, zero, at_row, rows, SECOND, TILES, HAS_ZERO)
    words = _words(memory, full, GROUP, at, True, TILES, OPERAND)
    weights = _weights(words, scales, 0, HAS_ZERO)
    wait_for_inputs()
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        m, first, block, count = _place(number, sizes, GROUP, ROWS, WEIGHTS)
        following = number + gl.num_programs(0)
        place = _place(gl.minimum(following, num_tiles - 1), sizes, GROUP, ROWS, WEIGHTS)
        next_row = place[2] * num_weights + place[1] // (1 + IS_GATED)
        sums = (gl.zeros([TILE, ROWS], gl.float32, SUMS),) * TILES
        for i in range(count):
            has_next = (i + 1 < count) | (following < num_tiles)
            at_row = gl.where(i + 1 < count, at_row + num_weights, next_row)
            next_scales = _scales(scale, zero, at_row, rows, SECOND, TILES, HAS_ZERO)
            sums, weights, words = _multiply_block(
                sums, weights, words, scales, next_scales, tiles, x_tiles, at, has_next, GROUP, HAS_ZERO
            )
            scales = next_scales
            at += 1
        for tile in gl.static_range(TILES):
            y, n = sums[tile], first // (1 + IS_GATED) + tile * SECOND
            if HAS_BIAS:
                if block == 0:
                    y += gl.load(bias + n + _weight_rows(columns, SUMS, IS_GATED)).to(gl.float32)[:, None]
            if IS_GATED:
                y = _gated(y)
            if IS_STAGED:
                _store_staged(y, out, m, n, staging.index(GROUP))
            else:
                split = (block // gl.cdiv(num_blocks, splits)).to(gl.int64)
                _store(y, out + split * num_rows * columns, m, n, num_rows, columns)
    if IS_STAGED:
        tma.store_wait(0)


@gluon.jit
def _multiply_block(
    sums, weights, words, scales, next_scales, tiles, x_tiles, at, has_next, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr
):
    """Multiply a block of columns, in a step for each tile of each part of its words. Return the sums, and the first
    weights and the words of the next block.
    """
    memory, full, empty = tiles
    x_memory, x_full, x_empty = x_tiles
    TILES: gl.constexpr = len(words)
    STEPS: gl.constexpr = 4 * TILES
    STAGES: gl.constexpr = memory.shape[0] // GROUPS
    OPERAND: gl.constexpr = weights.type.layout
    before = weights
    for step in gl.static_range(STEPS):
        part = 4 * at + step // TILES
        stage = part & X_STAGES - 1
        if step % TILES == 0:
            mbarrier.wait(x_full.index(stage), part // X_STAGES & 1)
        values = x_memory.index(stage).permute((1, 0))
        sums = _replaced(sums, step % TILES, warpgroup_mma(weights, values, sums[step % TILES], is_async=True))
        if step == TILES - 1:
            # Not right after the words were loaded: barriers do not wait until they are in registers, and a load can
            # take longer than the next copy while the tensor cores read shared memory. By now all words were unpacked.
            mbarrier.arrive(empty.index(GROUP * STAGES + (at & STAGES - 1)))
        if step > 0:
            sums, before = _wait(1, sums, before)
            if step % TILES == 0:
                mbarrier.arrive(x_empty.index(stage - 1))
        before = weights
        if step < STEPS - 1:
            weights = _weights(words, scales, step + 1, HAS_ZERO)
        else:
            words = _words(memory, full, GROUP, at + 1, has_next, TILES, OPERAND)
            weights = _weights(words, next_scales, 0, HAS_ZERO)
    sums, before = _wait(0, sums, before)
    mbarrier.arrive(x_empty.index(4 * at + 3 & X_STAGES - 1))
    return sums, weights, words


@gluon.jit
def _gated(y):
    """Return the `swiglu` [rows / 2, m] of products [rows, m] whose rows of weights are those of `_weight_rows`."""
    both = gl.permute(gl.reshape(y, (y.shape[0] // 16, 2, 8, y.shape[1])), (0, 2, 3, 1))
    gate, up = gl.split(both)
    return gl.reshape(gate / (1 + gl.exp(-gate)) * up, (y.shape[0] // 2, y.shape[1]))


@gluon.jit
def _store_staged(y, out, m, n, staging):
    """Store a tile with the copy engine, which reads it from shared memory while the program goes on."""
    tma.store_wait(0)
    staging.store(gl.permute(y.to(out.dtype), (1, 0)))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [m, n], staging)


@gluon.jit
def _store(y, out, m, n, num_rows, columns):
    row = m + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))[None, :]
    column = n + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))[:, None]
    gl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=row < num_rows)


@gluon.jit
def _replaced(values, INDEX: gl.constexpr, value):
    """Return a tuple of one or two values with another one at INDEX."""
    if len(values) == 1:
        return (value,)
    elif INDEX == 0:
        return value, values[1]
    else:
        return values[0], value


@gluon.jit
def _wait(PENDING: gl.constexpr, sums, weights):
    """Wait for all products but the last PENDING ones. `weights` were an operand of one that is complete then."""
    if len(sums) == 1:
        first, weights = warpgroup_mma_wait(PENDING, deps=(sums[0], weights))
        return (first,), weights
    else:
        first, second, weights = warpgroup_mma_wait(PENDING, deps=(sums[0], sums[1], weights))
        return (first, second), weights


@gluon.jit
def _weight_rows(columns, LAYOUT: gl.constexpr, IS_GATED: gl.constexpr):
    """Return the numbers of the rows of weights of a tile, from that of the first."""
    i = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    return i // 16 * 8 + i % 8 + i // 8 % 2 * columns if IS_GATED else i


@gluon.jit
def _scales(scale, zero, at_row, rows, SECOND: gl.constexpr, TILES: gl.constexpr, HAS_ZERO: gl.constexpr):
    """Load the scales of each tile, and behind them the zeros."""
    scales = _each_tile(scale + at_row + rows, SECOND, TILES)
    return scales + _each_tile(zero + at_row + rows, SECOND, TILES) if HAS_ZERO else scales


@gluon.jit
def _each_tile(pointers, SECOND: gl.constexpr, TILES: gl.constexpr):
    return (gl.load(pointers),) if TILES == 1 else (gl.load(pointers), gl.load(pointers + SECOND))


@gluon.jit
def _words(memory, full, GROUP: gl.constexpr, at, is_there, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the words of each tile of a block from shared memory, once they are there."""
    STAGES: gl.constexpr = memory.shape[0] // GROUPS
    WIDTH: gl.constexpr = memory.shape[4]
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16)
    stage = GROUP * STAGES + (at & STAGES - 1)
    mbarrier.wait(full.index(stage), at // STAGES & 1, pred=is_there)
    words = memory.index(stage)._reinterpret(gl.int16, [TILES * TILE, WIDTH], SHARED)
    first = words.slice(0, TILE).load(LAYOUT)
    return (first,) if TILES == 1 else (first, words.slice(TILE, TILE).load(LAYOUT))


@gluon.jit
def _weights(words, scales, STEP: gl.constexpr, HAS_ZERO: gl.constexpr):
    """Return the weights of a step, which are those of one of the four codes in each word of a tile."""
    TILES: gl.constexpr = len(words)
    PART: gl.constexpr = STEP // TILES
    scale = (scales[STEP % TILES] >> 16 * PART).to(gl.int16)[:, None]
    if HAS_ZERO:
        zero = (scales[TILES + STEP % TILES] >> 16 * PART).to(gl.int16)[:, None]
        return gl.inline_asm_elementwise(
            NIBBLE_LESS_ZERO[PART], "=r,r,r,r", [words[STEP % TILES], scale, zero],
            dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            NIBBLE[PART], "=r,r,r", [words[STEP % TILES], scale], dtype=gl.bfloat16, is_pure=True, pack=2
        )
