/* Images in channels_last, a block of channels at a time. Scratch memory has whole blocks: the
channels that fill up the last one are zero. */

#pragma once

#include <omp.h>
#include <stdlib.h>
#include <string.h>

typedef REAL vec __attribute__((vector_size(64)));
typedef __typeof__((vec){0} < (vec){0}) mask;

#define LANES ((long)(64 / sizeof(REAL)))
#define PIXELS 8 /* neighbours that a conv computes together: their sums fit in registers */
#define OUTPUTS 8 /* likewise, rows of a weight gradient; divides LANES */
#define INLINE static inline __attribute__((always_inline))

/* Of a batch of images. */
typedef struct {
    long images, height, width, channels, threads;
} batch;

/* Of a depthwise conv with a square kernel and "same" padding. */
typedef struct {
    long kernel, stride, dilation;
} conv;

INLINE vec load(const REAL *from, long lanes) {
    vec value = {0};
    if (lanes == LANES) memcpy(&value, from, sizeof value);
    else for (long lane = 0; lane < lanes; lane++) value[lane] = from[lane];
    return value;
}

INLINE void store(REAL *to, vec value, long lanes) {
    if (lanes == LANES) memcpy(to, &value, sizeof value);
    else for (long lane = 0; lane < lanes; lane++) to[lane] = value[lane];
}

INLINE vec keep(vec value, mask where) { return (vec)((mask)value & where); }

INLINE long blocks(batch b) { return (b.channels + LANES - 1) / LANES; }
INLINE long pixels(batch b) { return b.height * b.width; }
INLINE long padding(conv c) { return c.dilation * (c.kernel - 1) / 2; }
INLINE long strided(long size, conv c) { return (size - 1) / c.stride + 1; }

INLINE long outputs(batch b, conv c) { return strided(b.height, c) * strided(b.width, c); }
INLINE long lanes_of(long block, batch b) {
    return b.channels - block * LANES < LANES ? b.channels - block * LANES : LANES;
}

/* One block of channels of an image, and the padding around it. */
typedef struct {
    vec *inside, *start;
    long width, size;
} frame;

INLINE frame frame_in(vec *memory, batch b, conv c) {
    frame f;
    f.width = b.width + 2 * padding(c);
    f.size = (b.height + 2 * padding(c)) * f.width;
    f.start = memory;
    f.inside = f.start + padding(c) * f.width + padding(c);
    return f;
}

/* to[pixel·step] = one block of channels of the pixels of a row. */
INLINE void load_row(vec *to, long step, const REAL *x, long width, batch b, long k) {
    if (lanes_of(k, b) == LANES)
        for (long j = 0; j < width; j++) to[j * step] = load(x + j * b.channels + k * LANES, LANES);
    else
        for (long j = 0; j < width; j++)
            to[j * step] = load(x + j * b.channels + k * LANES, lanes_of(k, b));
}

static void *room(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

static void *zeros(size_t bytes) {
    void *memory = room(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}
