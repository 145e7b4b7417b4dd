/* 1x1 convs: products of pixels with a matrix, in blocks of channels. */

#pragma once
#include "sums.h"

/* The shape of a product: channels, and the blocks that they fill. */
typedef struct {
    long inputs, outputs, in_blocks, out_blocks;
} shape;

INLINE shape square(batch b) { return (shape){b.channels, b.channels, blocks(b), blocks(b)}; }
INLINE shape transposed(shape s) {
    return (shape){s.outputs, s.inputs, s.out_blocks, s.in_blocks};
}

/* Blocks of channels that a product computes together: a value that is loaded serves all of them. */
#define PAIR 2
#ifdef __AVX512F__
#define PAIR_PIXELS 8
#else
#define PAIR_PIXELS 4 /* half as many registers */
#endif

/* Some blocks of outputs, from the first, of some adjacent pixels; both numbers are constants. With a
shift it is added, and the result is rectified. */
INLINE void multiply_tile(
    vec *to, long step, long block_step, const REAL *in, long next, const vec *weight,
    const vec *shift, shape s, long first, long outputs, long pixels
) {
    vec sum[16] = {{0}};
    for (long i = 0; i < s.inputs; i++)
#pragma GCC unroll 16
        for (long p = 0; p < pixels; p++)
#pragma GCC unroll 2
            for (long o = 0; o < outputs; o++)
                sum[p * outputs + o] += in[p * next + i] * weight[i * s.out_blocks + first + o];
#pragma GCC unroll 16
    for (long p = 0; p < pixels; p++)
#pragma GCC unroll 2
        for (long o = 0; o < outputs; o++) {
            vec value = sum[p * outputs + o];
            if (shift) value += shift[first + o], value = keep(value, ~(value < (vec){0}));
            to[p * step + (first + o) * block_step] = value;
        }
}

INLINE void multiply_tiles(
    vec *to, long step, long block_step, const vec *from, long from_step, const vec *weight,
    const vec *shift, long pixels, shape s
) {
    long next = from_step * LANES, paired = s.out_blocks / PAIR * PAIR, o = 0;
    const REAL *in = (const REAL *)from;
    for (; o < paired; o += PAIR) {
        long p = 0;
        for (; p + PAIR_PIXELS <= pixels; p += PAIR_PIXELS)
            multiply_tile(
                to + p * step, step, block_step, in + p * next, next, weight, shift, s, o,
                PAIR, PAIR_PIXELS
            );
        for (; p < pixels; p++)
            multiply_tile(
                to + p * step, step, block_step, in + p * next, next, weight, shift, s, o, PAIR, 1
            );
    }
    if (o == s.out_blocks) return;
    long p = 0;
    for (; p + PIXELS <= pixels; p += PIXELS)
        multiply_tile(
            to + p * step, step, block_step, in + p * next, next, weight, shift, s, o, 1, PIXELS
        );
    for (; p < pixels; p++)
        multiply_tile(
            to + p * step, step, block_step, in + p * next, next, weight, shift, s, o, 1, 1
        );
}

/* The distance of pixels as a constant, where it is a common one: their addresses then need no registers. */
INLINE void multiply_any(
    vec *to, long step, long block_step, const vec *from, long from_step, const vec *weight,
    const vec *shift, long pixels, shape s
) {
    switch (from_step) {
    case 1: multiply_tiles(to, step, block_step, from, 1, weight, shift, pixels, s); break;
    case 2: multiply_tiles(to, step, block_step, from, 2, weight, shift, pixels, s); break;
    case 3: multiply_tiles(to, step, block_step, from, 3, weight, shift, pixels, s); break;
    case 4: multiply_tiles(to, step, block_step, from, 4, weight, shift, pixels, s); break;
    case 6: multiply_tiles(to, step, block_step, from, 6, weight, shift, pixels, s); break;
    case 12: multiply_tiles(to, step, block_step, from, 12, weight, shift, pixels, s); break;
    default: multiply_tiles(to, step, block_step, from, from_step, weight, shift, pixels, s);
    }
}

/* to = from · weight for some pixels; weight[i·out_blocks + o] is a block of outputs. The pixels are
step apart, the blocks of channels of the result block_step. */
static void multiply(
    vec *to, long step, long block_step, const vec *from, long from_step, const vec *weight,
    long pixels, shape s
) {
    multiply_any(to, step, block_step, from, from_step, weight, NULL, pixels, s);
}

/* to = ReLU(from · weight + shift). */
static void multiply_and_rectify(
    vec *to, long step, long block_step, const vec *from, long from_step, const vec *weight,
    const vec *shift, long pixels, shape s
) {
    multiply_any(to, step, block_step, from, from_step, weight, shift, pixels, s);
}

INLINE void add_lanes(double *sums, vec value) {
    for (long lane = 0; lane < LANES; lane++) sums[lane] += value[lane];
}

/* Add Σ g[pixel, o] · u[pixel, i] to sums[o·in_blocks·LANES + i], for count outputs from the first and
some blocks of inputs, from the block; both numbers are constants. */
INLINE void accumulate_tile(
    double *sums, const vec *g, long g_step, const vec *u, long u_step, long pixels, shape s,
    long first, long count, long block, long inputs
) {
    vec sum[16] = {{0}};
    const REAL *by = (const REAL *)g + first;
    for (long pixel = 0; pixel < pixels; pixel++)
#pragma GCC unroll 16
        for (long k = 0; k < count; k++)
#pragma GCC unroll 2
            for (long i = 0; i < inputs; i++)
                sum[k * inputs + i] +=
                    by[pixel * g_step * LANES + k] * u[pixel * u_step + block + i];
    for (long k = 0; k < count && first + k < s.outputs; k++)
        for (long i = 0; i < inputs; i++)
            add_lanes(
                sums + ((first + k) * s.in_blocks + block + i) * LANES, sum[k * inputs + i]
            );
}

/* The same for all blocks of inputs. */
INLINE void accumulate_some(
    double *sums, const vec *g, long g_step, const vec *u, long u_step, long pixels, shape s,
    long first, long count
) {
    long i = 0, half = count > 1 ? count / 2 : 1; /* count is 1 where a register holds two lanes */
    for (; i + PAIR <= s.in_blocks; i += PAIR)
        for (long k = first; k < first + count; k += half)
            accumulate_tile(sums, g, g_step, u, u_step, pixels, s, k, half, i, PAIR);
    if (i < s.in_blocks)
        accumulate_tile(sums, g, g_step, u, u_step, pixels, s, first, count, i, 1);
}

/* The same for all outputs; the pixels are step apart. */
static void accumulate(
    double *sums, const vec *g, long g_step, const vec *u, long u_step, long pixels, shape s
) {
    for (long o = 0; o < s.outputs; o += LANES)
        if (s.outputs - o > LANES / 2)
            accumulate_some(sums, g, g_step, u, u_step, pixels, s, o, LANES);
        else
            accumulate_some(sums, g, g_step, u, u_step, pixels, s, o, LANES / 2);
}

/* One block of channels of the gradient of the output of a product, for some pixels. */
INLINE void block_of_gradient(
    vec *dy, const REAL *g, const REAL *y, combination of, long count, batch b, long k, long lanes
) {
    long first = k * LANES;
    vec of_g = load(of.of_g + first, lanes), of_y = {0}, constant = {0};
    if (of.of_y) of_y = load(of.of_y + first, lanes), constant = load(of.constant + first, lanes);
    for (long p = 0; p < count; p++) {
        vec value = of_g * load(g + p * b.channels + first, lanes) + constant;
        if (of.of_y) value += of_y * load(y + p * b.channels + first, lanes);
        dy[p * blocks(b) + k] = value;
    }
}

/* b has the channels of y. */
static void output_gradient(
    vec *dy, const REAL *g, const REAL *y, combination of, long count, batch b
) {
    for (long k = 0; k < blocks(b); k++)
        if (lanes_of(k, b) == LANES) block_of_gradient(dy, g, y, of, count, b, k, LANES);
        else block_of_gradient(dy, g, y, of, count, b, k, lanes_of(k, b));
}
