/* Images in channels_last, processed in blocks of channels. Scratch memory holds whole blocks; the
channels that pad the last one are zero. */

#pragma once

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

/* As wide as a register: gcc keeps wider vectors in memory, which is slower than plain PyTorch. */
#ifdef __AVX512F__
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif

typedef REAL vec __attribute__((vector_size(VECTOR)));
typedef __typeof__((vec){0} < (vec){0}) mask;

#define LANES ((long)(VECTOR / sizeof(REAL)))
#define PIXELS 8 /* adjacent pixels that a conv computes together: their sums fit in registers */
enum { STRIP = 64 }; /* the pixels of a product, whose operands then stay in the first cache */

#define INLINE static inline __attribute__((always_inline))

/* The shape of a batch of images. Sums over images are those of the parts, in order: the number of
threads that compute them changes no result. */
typedef struct {
    long images, height, width, channels, parts, threads;
} batch;

/* The geometry of a depthwise conv with a square kernel and "same" padding. */
typedef struct {
    long kernel, stride, dilation;
} conv;

/* A part of a block, the first lanes; the others are zero, and not read or written. A loop over lanes
takes several times as long as the whole block. */
#if defined(__AVX512F__)
INLINE unsigned first_lanes(long lanes) { return (1u << lanes) - 1; }

INLINE vec load_lanes(const REAL *from, long lanes) {
    if (sizeof(REAL) == 4) return (vec)_mm512_maskz_loadu_ps(first_lanes(lanes), from);
    return (vec)_mm512_maskz_loadu_pd(first_lanes(lanes), from);
}

INLINE void store_lanes(REAL *to, vec value, long lanes) {
    if (sizeof(REAL) == 4) _mm512_mask_storeu_ps(to, first_lanes(lanes), (__m512)value);
    else _mm512_mask_storeu_pd(to, first_lanes(lanes), (__m512d)value);
}
#elif defined(__AVX__)
INLINE __m256i first_lanes(long lanes) {
    static const int of_four_bytes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const void *)(of_four_bytes + 8 - lanes * sizeof(REAL) / 4));
}

INLINE vec load_lanes(const REAL *from, long lanes) {
    if (sizeof(REAL) == 4)
        return (vec)_mm256_maskload_ps((const float *)from, first_lanes(lanes));
    return (vec)_mm256_maskload_pd((const double *)from, first_lanes(lanes));
}

INLINE void store_lanes(REAL *to, vec value, long lanes) {
    if (sizeof(REAL) == 4)
        _mm256_maskstore_ps((float *)to, first_lanes(lanes), (__m256)value);
    else _mm256_maskstore_pd((double *)to, first_lanes(lanes), (__m256d)value);
}
#else
INLINE vec load_lanes(const REAL *from, long lanes) {
    vec value = {0};
    for (long lane = 0; lane < lanes; lane++) value[lane] = from[lane];
    return value;
}

INLINE void store_lanes(REAL *to, vec value, long lanes) {
    for (long lane = 0; lane < lanes; lane++) to[lane] = value[lane];
}
#endif

INLINE vec load(const REAL *from, long lanes) {
    vec value;
    if (lanes != LANES) return load_lanes(from, lanes);
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(REAL *to, vec value, long lanes) {
    if (lanes == LANES) memcpy(to, &value, sizeof value);
    else store_lanes(to, value, lanes);
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

/* One block of channels of an image with the padding around it. */
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

/* Set the padding of the frames of all blocks to zero. */
static void clear_padding(vec *frames, batch b, conv c) {
    frame f = frame_in(0, b, c);
    long margin = padding(c), ends = margin * f.width + margin; /* up to the first pixel */
    for (vec *start = frames; start < frames + blocks(b) * f.size; start += f.size) {
        memset(start, 0, ends * sizeof(vec));
        for (long i = 1; i < b.height; i++)
            memset(start + (margin + i) * f.width - margin, 0, 2 * margin * sizeof(vec));
        memset(start + f.size - ends, 0, ends * sizeof(vec));
    }
}

/* to[pixel·step] = one block of channels of the pixels of a row. */
INLINE void load_row(vec *to, long step, const REAL *x, long width, batch b, long k) {
    if (lanes_of(k, b) == LANES)
        for (long j = 0; j < width; j++) to[j * step] = load(x + j * b.channels + k * LANES, LANES);
    else
        for (long j = 0; j < width; j++)
            to[j * step] = load(x + j * b.channels + k * LANES, lanes_of(k, b));
}

/* What one of several takes of a whole: consecutive shares, the first of which may be larger by one. */
typedef struct {
    long first, end;
} share;

INLINE share share_of(long index, long count, long whole) {
    long each = whole / count, rest = whole % count;
    long first = index * each + (index < rest ? index : rest);
    return (share){first, first + each + (index < rest)};
}

/* The images of a part, and the parts of the calling thread. */
INLINE share images_of(long part, batch b) { return share_of(part, b.parts, b.images); }
INLINE share own_parts(batch b) {
    return share_of(omp_get_thread_num(), omp_get_num_threads(), b.parts);
}

INLINE size_t whole_blocks(size_t bytes) { return (bytes + 63) / 64 * 64; }

static void *room(size_t bytes) { return aligned_alloc(64, whole_blocks(bytes)); }

static void *zeros(size_t bytes) {
    void *memory = room(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static pthread_key_t kept_by_thread;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_key(void) { pthread_key_create(&kept_by_thread, free); }

/* Scratch memory of the calling thread, valid until the next call. A thread reuses its own: memory
written by another thread is in the cache of another core, and slow to read. */
static void *own_room(size_t bytes) {
    pthread_once(&once, make_key);
    size_t *block = pthread_getspecific(kept_by_thread);
    if (!block || *block < bytes) {
        free(block);
        block = room(64 + bytes);
        pthread_setspecific(kept_by_thread, block);
        if (!block) return NULL;
        *block = bytes;
    }
    return (char *)block + 64;
}

/* Report that a thread could not allocate memory. */
INLINE void missing(int *enough) {
#pragma omp atomic write
    *enough = 0;
}
