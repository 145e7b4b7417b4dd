/* Pooling, or none, in one pass over the images. */

#pragma once
#include "sums.h"

/* Pooling over squares of 3x3 pixels, or none. */
enum { NONE, MEAN, MAXIMUM };

typedef struct {
    long kind, stride;
    const REAL *x;
    REAL *y, *mean, *variance; /* y may be missing */
    const REAL *g; /* likewise; then also */
    REAL *totals, *products;
    REAL *dx; /* where the gradient of x goes, if it is wanted */
    long adds; /* whether it is added to what is there */
} pool;

/* Of three neighbours, a step apart. A NaN among them may lose: g, with which all is multiplied that
comes of this, then is NaN. */
INLINE vec pool_three(const vec *from, long step, int is_maximum) {
    vec found = from[0];
    for (long k = 1; k < 3; k++) {
        vec value = from[k * step];
        mask wins = value > found;
        if (is_maximum) found = (vec)(((mask)value & wins) | ((mask)found & ~wins));
        else found += value;
    }
    return found;
}

/* One row from three in a frame, of which the columns are pooled first. */
INLINE void pool_row(
    vec *row, long step, vec *columns, const vec *from, long frame_width, long width, long stride,
    int is_maximum
) {
    for (long j = 0; j < frame_width; j++)
        columns[j] = pool_three(from + j, frame_width, is_maximum);
    for (long j = 0; j < width; j++)
        row[j * step] = pool_three(columns + j * stride, 1, is_maximum);
}

/* How many of the three neighbours of a pixel, itself included, lie within. */
INLINE long neighbours(long at, long size) { return 1 + (at > 0) + (at + 1 < size); }

/* Row i of what the pooling makes of an image in a frame; the mean counts no padding. */
static void pooled_row(
    vec *row, long step, vec *columns, frame f, const pool *of, long i, batch b, long width
) {
    const vec *from = f.start + i * of->stride * f.width;
    if (of->kind == MAXIMUM) 
        pool_row(row, step, columns, from, f.width, width, of->stride, 1);
    else {
        pool_row(row, step, columns, from, f.width, width, of->stride, 0);
        long rows = neighbours(i * of->stride, b.height);
        for (long j = 0; j < width; j++)
            row[j * step] *= (REAL)1 / (rows * neighbours(j * of->stride, b.width));
    }
}

/* What a thread needs to pool images: frames, a row, a row of columns pooled, and sums. */
typedef struct {
    vec *frames, *row, *columns;
    sums_of_block *sums;
} pool_workplace;

static long pool_room(batch b, conv c) {
    frame f = frame_in(0, b, c);
    long of_sums = sizeof(sums_of_block) / sizeof(vec);
    return blocks(b) * (f.size + strided(b.width, c) + of_sums) + f.width;
}

static pool_workplace pool_at(vec *memory, batch b, conv c) {
    pool_workplace at = {.frames = memory};
    at.row = at.frames + blocks(b) * frame_in(0, b, c).size;
    at.columns = at.row + blocks(b) * strided(b.width, c);
    at.sums = (sums_of_block *)(at.columns + frame_in(0, b, c).width);
    return at;
}

static void lay_out(vec *frames, const REAL *x, batch b, conv c) {
    for (long k = 0; k < blocks(b); k++) {
        frame f = frame_in(frames + k * frame_in(0, b, c).size, b, c);
        for (long i = 0; i < b.height; i++)
            load_row(f.inside + i * f.width, 1, x + i * b.width * b.channels, b.width, b, k);
    }
}

static void fill_frames(vec *frames, const pool *of, long size) {
    REAL outside = of->kind == MAXIMUM ? -__builtin_inf() : 0;
    for (long k = 0; k < size; k++) frames[k] = (vec){0} + outside;
}

/* Pool images; moments, totals and products are as in unit_forward. */
int pool_forward(const pool *of, batch b) {
    conv c = {3, of->stride, 1};
    long n = blocks(b), height = strided(b.height, c), width = strided(b.width, c);
    long frame_size = frame_in(0, b, c).size;
    vec *memory = room(b.threads * pool_room(b, c) * sizeof(vec));
    sums_of_channel *sums = room(b.images * b.channels * sizeof(sums_of_channel));
    if (!memory || !sums) return free(memory), free(sums), 0;
#pragma omp parallel num_threads(b.threads)
    {
        pool_workplace at = pool_at(memory + omp_get_thread_num() * pool_room(b, c), b, c);
        fill_frames(at.frames, of, n * frame_size);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            const REAL *x = of->x + image * pixels(b) * b.channels;
            if (of->kind != NONE) lay_out(at.frames, x, b, c);
            for (long i = 0; i < height; i++) {
                for (long k = 0; k < n; k++) {
                    frame f = frame_in(at.frames + k * frame_size, b, c);
                    if (of->kind == NONE)
                        load_row(at.row + k, n, x + i * width * b.channels, width, b, k);
                    else pooled_row(at.row + k, n, at.columns, f, of, i, b, width);
                }
                long first = (image * height + i) * width * b.channels;
                observe_row(at.sums, of->y, at.row, of->g, first, width, b, i == 0);
            }
            finish_image(sums + image * b.channels, at.sums, height * width, b);
        }
    }
    REAL *totals = of->g ? of->totals : NULL;
    finish_batch(of->mean, of->variance, totals, of->products, sums, height * width, b);
    free(memory), free(sums);
    return 1;
}

/* Hand the gradient of a row that was pooled to the pixels that it came from. */
INLINE void spread_row(
    vec *to, const vec *from, const vec *row, const vec *dy, long frame_width, long width,
    long stride, int is_maximum
) {
    for (long j = 0; j < width; j++) {
        mask left = (vec){0} == (vec){0}; /* all */
        for (long tap = 0; tap < 9; tap++) {
            long place = j * stride + tap / 3 * frame_width + tap % 3;
            if (is_maximum) { /* the first of equals gets it */
                mask takes = left & (from[place] == row[j]);
                to[place] += keep(dy[j], takes), left &= ~takes;
            } else to[place] += dy[j];
        }
    }
}

/* dx from the gradient of_g·g + of_y·y + constant of what pool_forward computes. */
int pool_backward(
    const pool *of, const REAL *of_g, const REAL *of_y, const REAL *constant, batch b
) {
    conv c = {3, of->stride, 1};
    long n = blocks(b), height = strided(b.height, c), width = strided(b.width, c);
    long size = frame_in(0, b, c).size, own = pool_room(b, c) + size + width;
    vec *memory = room(b.threads * own * sizeof(vec));
    if (!memory) return 0;
#pragma omp parallel num_threads(b.threads)
    {
        pool_workplace at = pool_at(memory + omp_get_thread_num() * own, b, c);
        vec *gradients = memory + omp_get_thread_num() * own + pool_room(b, c);
        vec *dy = gradients + size, *row = at.row;
        frame to = frame_in(gradients, b, c);
        fill_frames(at.frames, of, n * size);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            const REAL *x = of->x + image * pixels(b) * b.channels;
            if (of->kind != NONE) lay_out(at.frames, x, b, c);
            for (long k = 0; k < n; k++) {
                long first = k * LANES, lanes = lanes_of(k, b);
                vec by_g = load(of_g + first, lanes), by_y = load(of_y + first, lanes);
                vec plus = load(constant + first, lanes);
                frame f = frame_in(at.frames + k * size, b, c);
                memset(gradients, 0, size * sizeof(vec));
                for (long i = 0; i < height; i++) {
                    const REAL *g = of->g + (image * height + i) * width * b.channels + first;
                    long start = i * c.stride * f.width, rows = neighbours(i * c.stride, b.height);
                    if (of->kind == NONE)
                        load_row(row, 1, x + i * width * b.channels, width, b, k);
                    else pooled_row(row, 1, at.columns, f, of, i, b, width);
                    for (long j = 0; j < width; j++) {
                        dy[j] = by_g * load(g + j * b.channels, lanes) + by_y * row[j] + plus;
                        if (of->kind == MEAN)
                            dy[j] *= (REAL)1 / (rows * neighbours(j * c.stride, b.width));
                    }
                    if (of->kind == NONE)
                        for (long j = 0; j < width; j++) to.inside[i * to.width + j] = dy[j];
                    else if (of->kind == MEAN)
                        spread_row(to.start + start, 0, 0, dy, f.width, width, c.stride, 0);
                    else
                        spread_row(
                            to.start + start, f.start + start, row, dy, f.width, width, c.stride, 1
                        );
                }
                REAL *dx = of->dx + image * pixels(b) * b.channels + first;
                for (long i = 0; i < b.height; i++)
                    for (long j = 0; j < b.width; j++) {
                        REAL *place = dx + (i * b.width + j) * b.channels;
                        vec found = to.inside[i * to.width + j];
                        store(place, of->adds ? load(place, lanes) + found : found, lanes);
                    }
            }
        }
    }
    free(memory);
    return 1;
}
