/* Pooling or the identity in one pass over the images. */

#pragma once
#include "sums.h"

/* Pooling over squares of 3x3 pixels, or the identity. */
enum { NONE, MEAN, MAXIMUM };

typedef struct {
    long kind, stride;
    const REAL *x;
    REAL *y; /* output for the result; NULL if not needed */
    REAL *mean, *variance;
    const REAL *g; /* may be NULL; if given, also compute */
    REAL *totals, *products;
    REAL *dx; /* output for the gradient of x; NULL if not needed */
    long adds; /* whether to add to dx instead of writing it */
} pool;

INLINE conv square_of_nine(const pool *of) { return (conv){3, of->stride, 1}; }

/* NaN if one of them is. */
INLINE vec larger(vec a, vec b) {
    mask wins = ~((a >= b) | (a != a));
    return (vec)(((mask)b & wins) | ((mask)a & ~wins));
}

/* The number of pixels inside the image in the window of three around a position. */
INLINE long neighbors(long at, long size) { return 1 + (at > 0) + (at + 1 < size); }

/* Three rows of pixels, pooled over columns, with one extra column at each end. */
typedef struct {
    vec *largest, *sums;
} columns;

/* Pool one block of channels of row i over columns. Pixels outside the image repeat the border, which
changes no maximum, or are zero. */
INLINE void pool_columns(columns to, const REAL *image, long i, batch b, long lanes) {
    long next = b.width * b.channels;
    long above = i > 0 ? -next : 0, below = i + 1 < b.height ? next : 0;
    for (long j = 0; j < b.width; j++) {
        const REAL *at = image + i * next + j * b.channels;
        vec here = load(at, lanes), up = load(at + above, lanes), down = load(at + below, lanes);
        to.largest[j + 1] = larger(larger(up, here), down);
        to.sums[j + 1] = here + (above ? up : (vec){0}) + (below ? down : (vec){0});
    }
    to.largest[0] = to.largest[1], to.largest[b.width + 1] = to.largest[b.width];
    to.sums[0] = to.sums[b.width + 1] = (vec){0};
}

INLINE columns columns_of(columns all, long k, batch b) {
    return (columns){all.largest + k * (b.width + 2), all.sums + k * (b.width + 2)};
}

/* The same for all blocks. */
static void pool_all_columns(columns to, const REAL *image, long i, batch b) {
    for (long k = 0; k < blocks(b); k++) {
        const REAL *x = image + k * LANES;
        if (lanes_of(k, b) == LANES) pool_columns(columns_of(to, k, b), x, i, b, LANES);
        else pool_columns(columns_of(to, k, b), x, i, b, lanes_of(k, b));
    }
}

/* The weight of each pixel in a mean with the padding not counted. */
INLINE REAL part_of_mean(const pool *of, long i, long j, batch b) {
    return (REAL)1 / (neighbors(i * of->stride, b.height) * neighbors(j * of->stride, b.width));
}

/* Row i of the output of a pooling, for one block of channels, stored at every step-th place. */
static void pooled_row(vec *row, long step, columns from, const pool *of, long i, batch b) {
    long stride = of->stride, width = strided(b.width, square_of_nine(of));
    if (of->kind == MAXIMUM)
        for (long j = 0; j < width; j++) {
            const vec *at = from.largest + j * stride;
            row[j * step] = larger(larger(at[0], at[1]), at[2]);
        }
    else
        for (long j = 0; j < width; j++) {
            const vec *at = from.sums + j * stride;
            row[j * step] = (at[0] + at[1] + at[2]) * part_of_mean(of, i, j, b);
        }
}

/* Scratch memory of a thread: a row, columns, and the sums of each pooling. */
typedef struct {
    vec *row;
    columns from;
    sums_of_block *sums;
} pool_workplace;

static long pool_room(batch b, long count) {
    long of_sums = count * sizeof(sums_of_block) / sizeof(vec);
    return blocks(b) * (b.width + 2 * (b.width + 2) + of_sums);
}

static pool_workplace pool_at(vec *memory, batch b) {
    pool_workplace at = {.row = memory};
    at.from.largest = at.row + blocks(b) * b.width;
    at.from.sums = at.from.largest + blocks(b) * (b.width + 2);
    at.sums = (sums_of_block *)(at.from.sums + blocks(b) * (b.width + 2));
    return at;
}

/* Apply several poolings to one image. */
static void pool_image(pool_workplace at, const pool *pools, long count, long image, batch b) {
    conv c = square_of_nine(pools);
    long n = blocks(b), height = strided(b.height, c), width = strided(b.width, c);
    const REAL *x = pools->x + image * pixels(b) * b.channels;
    int is_pooled = 0;
    for (long p = 0; p < count; p++) is_pooled |= pools[p].kind != NONE;
    for (long i = 0; i < height; i++) {
        long first = (image * height + i) * width * b.channels;
        if (is_pooled) pool_all_columns(at.from, x, i * c.stride, b);
        for (long p = 0; p < count; p++) {
            for (long k = 0; k < n; k++)
                if (pools[p].kind == NONE)
                    load_row(at.row + k, n, x + i * width * b.channels, width, b, k);
                else pooled_row(at.row + k, n, columns_of(at.from, k, b), pools + p, i, b);
            observe_row(
                at.sums + p * n, pools[p].y, at.row, pools[p].g, first, width, b, i == 0
            );
        }
    }
}

/* Apply several poolings with the same x and stride; moments, totals and products are as in
unit_forward. */
int pool_forward(const pool *pools, long count, batch b) {
    long n = blocks(b), pixels_out = outputs(b, square_of_nine(pools));
    long sums_size = b.images * b.channels;
    sums_of_channel *sums = room(count * sums_size * sizeof(sums_of_channel));
    if (!sums) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *memory = own_room(pool_room(b, count) * sizeof(vec));
        pool_workplace at = pool_at(memory, b);
        if (!memory) missing(&enough);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            if (!memory) continue;
            pool_image(at, pools, count, image, b);
            for (long p = 0; p < count; p++)
                finish_image(
                    sums + p * sums_size + image * b.channels, at.sums + p * n, pixels_out, b
                );
        }
        for (const pool *p = pools; p < pools + count; p++)
            finish_batch(
                p->mean, p->variance, p->g ? p->totals : NULL, p->products,
                sums + (p - pools) * sums_size, pixels_out, b
            );
    }
    free(sums);
    return enough;
}

/* Add the gradient of a row of maxima to the pixels they came from, the first one in case of ties. */
INLINE void spread_row(
    vec *to, const vec *from, const vec *row, const vec *dy, long frame_width, long width,
    long stride
) {
    for (long j = 0; j < width; j++) {
        mask left = (vec){0} == (vec){0}; /* all lanes */
        for (long tap = 0; tap < 9; tap++) {
            long place = j * stride + tap / 3 * frame_width + tap % 3;
            mask takes = left & (from[place] == row[j]);
            to[place] += keep(dy[j], takes), left &= ~takes;
        }
    }
}

/* Scratch memory of a thread: frames of one block for x and for the gradients. */
typedef struct {
    pool_workplace pooling;
    frame x, gradients;
    vec *dy;
} pool_backward_workplace;

/* Fill a frame with an image, padded with values below all others. */
static void lay_out(frame f, const REAL *x, batch b, long k) {
    for (long p = 0; p < f.size; p++) f.start[p] = (vec){0} - (REAL)__builtin_inf();
    for (long i = 0; i < b.height; i++)
        load_row(f.inside + i * f.width, 1, x + i * b.width * b.channels, b.width, b, k);
}

/* The gradients of one block of an image, in the frame. Those of a mean stay at the center of its
window. */
static void block_gradients(
    pool_backward_workplace at, const pool *of, combination by, long image, batch b, long k
) {
    conv c = square_of_nine(of);
    long height = strided(b.height, c), width = strided(b.width, c), lanes = lanes_of(k, b);
    const REAL *x = of->x + image * pixels(b) * b.channels, *block = x + k * LANES;
    vec of_g = load(by.of_g + k * LANES, lanes), of_y = load(by.of_y + k * LANES, lanes);
    vec constant = load(by.constant + k * LANES, lanes), *row = at.pooling.row;
    frame to = at.gradients;
    memset(to.start, 0, to.size * sizeof(vec));
    if (of->kind == MAXIMUM) lay_out(at.x, x, b, k);
    for (long i = 0; i < height; i++) {
        const REAL *g = of->g + (image * height + i) * width * b.channels + k * LANES;
        if (of->kind == NONE) load_row(row, 1, x + i * width * b.channels, width, b, k);
        else {
            pool_columns(at.pooling.from, block, i * c.stride, b, lanes);
            pooled_row(row, 1, at.pooling.from, of, i, b);
        }
        for (long j = 0; j < width; j++)
            at.dy[j] = of_g * load(g + j * b.channels, lanes) + of_y * row[j] + constant;
        long start = i * c.stride * to.width;
        if (of->kind == MAXIMUM)
            spread_row(
                to.start + start, at.x.start + start, row, at.dy, to.width, width, c.stride
            );
        else
            for (long j = 0; j < width; j++)
                to.inside[start + j * c.stride] =
                    at.dy[j] * (of->kind == MEAN ? part_of_mean(of, i, j, b) : 1);
    }
}

/* Write dx from the frame. */
static void take_gradients(
    pool_backward_workplace at, const pool *of, long image, batch b, long k
) {
    REAL *dx = of->dx + image * pixels(b) * b.channels + k * LANES;
    frame from = at.gradients;
    long lanes = lanes_of(k, b), next = from.width;
    vec *sums = at.pooling.from.sums;
    for (long i = 0; i < b.height; i++) {
        const vec *row = from.start + i * next;
        if (of->kind == MEAN)
            for (long j = 0; j < next; j++) sums[j] = row[j] + row[j + next] + row[j + 2 * next];
        for (long j = 0; j < b.width; j++) {
            REAL *place = dx + (i * b.width + j) * b.channels;
            vec found = row[next + j + 1];
            if (of->kind == MEAN) found = sums[j] + sums[j + 1] + sums[j + 2];
            store(place, of->adds ? load(place, lanes) + found : found, lanes);
        }
    }
}

/* dx, given the gradient of the output of pool_forward as a combination of g and that output. */
int pool_backward(const pool *of, combination by, batch b) {
    conv c = square_of_nine(of);
    long size = frame_in(0, b, c).size, own = pool_room(b, 1) + 2 * size + b.width;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *memory = own_room(own * sizeof(vec)), *frames = memory + pool_room(b, 1);
        pool_backward_workplace at = {
            pool_at(memory, b), frame_in(frames, b, c), frame_in(frames + size, b, c),
            frames + 2 * size
        };
        if (!memory) missing(&enough);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++)
            for (long k = 0; k < blocks(b) && memory; k++) {
                block_gradients(at, of, by, image, b, k);
                take_gradients(at, of, image, b, k);
            }
    }
    return enough;
}
