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

/* to = from · weight for some pixels; weight[i·out_blocks + o] is a block of outputs. The pixels are
step apart, the blocks of channels of the result block_step. */
static void multiply(
    vec *to, long step, long block_step, const vec *from, long from_step, const vec *weight,
    long pixels, shape s
) {
    long n = s.out_blocks, next = from_step * LANES, pixel = 0;
    const REAL *in = (const REAL *)from;
    for (; pixel + PIXELS <= pixels; pixel += PIXELS)
        for (long o = 0; o < n; o++) {
            vec sum[PIXELS] = {{0}};
            for (long i = 0; i < s.inputs; i++) {
                vec w = weight[i * n + o];
#pragma GCC unroll 8
                for (long p = 0; p < PIXELS; p++) sum[p] += in[(pixel + p) * next + i] * w;
            }
#pragma GCC unroll 8
            for (long p = 0; p < PIXELS; p++) to[(pixel + p) * step + o * block_step] = sum[p];
        }
    for (; pixel < pixels; pixel++)
        for (long o = 0; o < n; o++) {
            vec sum = {0};
            for (long i = 0; i < s.inputs; i++) sum += in[pixel * next + i] * weight[i * n + o];
            to[pixel * step + o * block_step] = sum;
        }
}

INLINE void add_lanes(double *sums, vec value) {
    for (long lane = 0; lane < LANES; lane++) sums[lane] += value[lane];
}

/* Add Σ g[pixel, o] · u[pixel, i] to sums[o·in_blocks·LANES + i], for some outputs. */
INLINE void accumulate_some(
    double *sums, const vec *g, long g_step, const vec *u, long u_step, long pixels, shape s,
    long first, long count
) {
    for (long i = 0; i < s.in_blocks; i++) {
        vec sum[LANES] = {{0}};
        const REAL *by = (const REAL *)g + first;
        for (long pixel = 0; pixel < pixels; pixel++) {
            vec value = u[pixel * u_step + i];
#pragma GCC unroll 16
            for (long k = 0; k < count; k++) sum[k] += by[pixel * g_step * LANES + k] * value;
        }
        for (long k = 0; k < count && first + k < s.outputs; k++)
            add_lanes(sums + ((first + k) * s.in_blocks + i) * LANES, sum[k]);
    }
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
