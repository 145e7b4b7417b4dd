/* The inner loops of training on images in channels_last, on the CPU; see native.py.

Images are taken one by one and a block of LANES channels at a time. A unit (batch norm, ReLU,
depthwise conv, pointwise conv) lays an image out in frames of zeros that stay in the cache; the
norm and the ReLU happen on the way, and all loops over taps run inside a frame without a look at
borders. Within an image sums are REAL, over images they are double. Compiled once for each REAL.
Scratch memory has whole blocks: the channels that fill up the last one are zero. */

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

/* frame = ReLU(scale·x + shift), or ReLU(x) without a scale; x starts at the block. */
INLINE void rectify(
    frame f, const REAL *x, const REAL *scale, const REAL *shift, batch b, long lanes
) {
    vec by = {0}, plus = {0};
    if (scale) by = load(scale, lanes), plus = load(shift, lanes);
    for (long i = 0; i < b.height; i++)
        for (long j = 0; j < b.width; j++) {
            vec value = load(x + (i * b.width + j) * b.channels, lanes);
            if (scale) value = by * value + plus;
            f.inside[i * f.width + j] = keep(value, ~(value < (vec){0}));
        }
}

/* One row of a conv to every step-th place, the kernel and the stride being constants. */
INLINE void convolve(
    vec *to, long step, const vec *from, const vec *weight, long frame_width, long width, long k,
    long stride, long d
) {
    long j = 0;
    for (; j + PIXELS <= width; j += PIXELS) {
        vec sum[PIXELS] = {{0}};
        for (long p = 0; p < k; p++)
#pragma GCC unroll 5
            for (long q = 0; q < k; q++) {
                const vec *at = from + p * d * frame_width + q * d + j * stride;
#pragma GCC unroll 8
                for (long n = 0; n < PIXELS; n++) sum[n] += weight[p * k + q] * at[n * stride];
            }
#pragma GCC unroll 8
        for (long n = 0; n < PIXELS; n++) to[(j + n) * step] = sum[n];
    }
    for (; j < width; j++) {
        vec sum = {0};
        for (long p = 0; p < k; p++)
            for (long q = 0; q < k; q++)
                sum += weight[p * k + q] * from[p * d * frame_width + q * d + j * stride];
        to[j * step] = sum;
    }
}

static void convolve_row(
    vec *to, long step, const vec *from, const vec *weight, frame f, long width, conv c
) {
    long w = f.width, d = c.dilation;
    if (c.kernel == 3 && c.stride == 1) convolve(to, step, from, weight, w, width, 3, 1, d);
    else if (c.kernel == 3) convolve(to, step, from, weight, w, width, 3, 2, d);
    else if (c.stride == 1) convolve(to, step, from, weight, w, width, 5, 1, d);
    else convolve(to, step, from, weight, w, width, 5, 2, d);
}

/* sums[tap] = Σ g · (x seen through that tap), the kernel and the stride being constants. */
INLINE void correlate(
    vec *sums, frame g, frame x, long height, long width, long k, long stride, long d
) {
    vec sum[25] = {{0}};
    for (long i = 0; i < height; i++)
        for (long j = 0; j < width; j++) {
            vec value = g.inside[(i * g.width + j) * stride];
            const vec *at = x.start + (i * x.width + j) * stride;
#pragma GCC unroll 5
            for (long p = 0; p < k; p++)
#pragma GCC unroll 5
                for (long q = 0; q < k; q++) sum[p * k + q] += value * at[p * d * x.width + q * d];
        }
    for (long tap = 0; tap < k * k; tap++) sums[tap] = sum[tap];
}

static void correlate_image(vec *sums, frame g, frame x, batch b, conv c) {
    long height = strided(b.height, c), width = strided(b.width, c);
    if (c.kernel == 3 && c.stride == 1) correlate(sums, g, x, height, width, 3, 1, c.dilation);
    else if (c.kernel == 3) correlate(sums, g, x, height, width, 3, 2, c.dilation);
    else if (c.stride == 1) correlate(sums, g, x, height, width, 5, 1, c.dilation);
    else correlate(sums, g, x, height, width, 5, 2, c.dilation);
}

/* to = from · weight, for pixels of one row; weight[i·blocks + o] has blocks of outputs. */
static void multiply(vec *to, const vec *from, const vec *weight, long pixels, batch b) {
    long n = blocks(b), pixel = 0;
    const REAL *in = (const REAL *)from;
    for (; pixel + PIXELS <= pixels; pixel += PIXELS)
        for (long o = 0; o < n; o++) {
            vec sum[PIXELS] = {{0}};
            for (long i = 0; i < b.channels; i++) {
                vec w = weight[i * n + o];
#pragma GCC unroll 8
                for (long p = 0; p < PIXELS; p++) sum[p] += in[(pixel + p) * n * LANES + i] * w;
            }
#pragma GCC unroll 8
            for (long p = 0; p < PIXELS; p++) to[(pixel + p) * n + o] = sum[p];
        }
    for (; pixel < pixels; pixel++)
        for (long o = 0; o < n; o++) {
            vec sum = {0};
            for (long i = 0; i < b.channels; i++) sum += in[pixel * n * LANES + i] * weight[i * n + o];
            to[pixel * n + o] = sum;
        }
}

/* sums[o, i] += Σ g[pixel, o] · u[pixel, i]. */
static void accumulate(double *sums, const vec *g, const vec *u, long pixels, batch b) {
    long n = blocks(b);
    for (long o = 0; o < b.channels; o += OUTPUTS)
        for (long i = 0; i < n; i++) {
            vec sum[OUTPUTS] = {{0}};
            const REAL *by = (const REAL *)g + o;
            for (long pixel = 0; pixel < pixels; pixel++) {
                vec value = u[pixel * n + i];
#pragma GCC unroll 8
                for (long k = 0; k < OUTPUTS; k++) sum[k] += by[pixel * n * LANES + k] * value;
            }
            for (long k = 0; k < OUTPUTS && o + k < b.channels; k++)
                for (long lane = 0; lane < lanes_of(i, b); lane++)
                    sums[(o + k) * b.channels + i * LANES + lane] += sum[k][lane];
        }
}

/* The weights of a unit, a block of channels to a vec. */
static void load_depthwise(vec *taps, const REAL *weight, batch b, long size) {
    for (long channel = 0; channel < b.channels; channel++)
        for (long tap = 0; tap < size; tap++)
            taps[channel / LANES * size + tap][channel % LANES] = weight[channel * size + tap];
}

static void load_pointwise(vec *rows, const REAL *weight, batch b, int transposed) {
    for (long o = 0; o < b.channels; o++)
        for (long i = 0; i < b.channels; i++)
            ((REAL *)rows)[(transposed ? i : o) * blocks(b) * LANES + (transposed ? o : i)] =
                weight[o * b.channels + i];
}

/* u = depthwise conv of ReLU(scale·x + shift) of one image, which stays in the frames. */
static void rectified_conv(
    vec *u, vec *frames, const vec *taps, const REAL *x, const REAL *scale, const REAL *shift,
    batch b, conv c
) {
    long n = blocks(b), width = strided(b.width, c), size = c.kernel * c.kernel;
    for (long k = 0; k < n; k++) {
        long first = k * LANES, lanes = lanes_of(k, b);
        frame f = frame_in(frames + k * frame_in(0, b, c).size, b, c);
        const REAL *by = scale ? scale + first : NULL, *plus = scale ? shift + first : NULL;
        if (lanes == LANES) rectify(f, x + first, by, plus, b, LANES);
        else rectify(f, x + first, by, plus, b, lanes);
        for (long i = 0; i < strided(b.height, c); i++)
            convolve_row(
                u + i * width * n + k, n, f.start + i * c.stride * f.width, taps + k * size, f,
                width, c
            );
    }
}

static void *zeros(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory) memset(memory, 0, (bytes + 63) / 64 * 64);
    return memory;
}

INLINE void image_moments(double *mean, double *m2, const REAL *x, batch b, long k, long lanes) {
    vec sum = {0}, rest = {0}, squares = {0};
    for (long p = 0; p < pixels(b); p++) sum += load(x + p * b.channels + k * LANES, lanes);
    vec centre = sum / (REAL)pixels(b);
    for (long p = 0; p < pixels(b); p++) {
        vec from = load(x + p * b.channels + k * LANES, lanes) - centre;
        rest += from;
        squares += from * from;
    }
    for (long lane = 0; lane < lanes; lane++) {
        double off = rest[lane] / pixels(b); /* the centre is rounded */
        mean[k * LANES + lane] = centre[lane] + off;
        m2[k * LANES + lane] = squares[lane] - off * off * pixels(b);
    }
}

static void moments_of(double *mean, double *m2, const REAL *x, batch b) {
    for (long k = 0; k < blocks(b); k++)
        if (lanes_of(k, b) == LANES) image_moments(mean, m2, x, b, k, LANES);
        else image_moments(mean, m2, x, b, k, lanes_of(k, b));
}

/* Mean and biased variance of each channel, from the mean and M2 = Σ (x − mean)² of each image. */
static void pool_moments(REAL *mean, REAL *variance, const double *means, const double *m2, batch b) {
    for (long channel = 0; channel < b.channels; channel++) {
        double centre = 0, within = 0, between = 0;
        for (long at = channel; at < b.images * b.channels; at += b.channels)
            centre += means[at] / b.images, within += m2[at] / b.images;
        for (long at = channel; at < b.images * b.channels; at += b.channels)
            between += (means[at] - centre) * (means[at] - centre) / b.images;
        mean[channel] = centre, variance[channel] = within / pixels(b) + between;
    }
}

/* Mean and biased variance of each channel. Returns whether there was memory, as all do here. */
int moments(REAL *mean, REAL *variance, const REAL *x, batch b) {
    long size = b.images * b.channels;
    double *means = zeros(2 * size * sizeof(double));
    if (!means) return 0;
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long image = 0; image < b.images; image++) {
        long at = image * b.channels;
        moments_of(means + at, means + size + at, x + at * pixels(b), b);
    }
    pool_moments(mean, variance, means, means + size, b);
    free(means);
    return 1;
}

/* y = pointwise conv of depthwise conv of ReLU(scale·x + shift), and its moments. */
int unit_forward(
    REAL *y, REAL *mean, REAL *variance, const REAL *x, const REAL *scale, const REAL *shift,
    const REAL *depthwise, const REAL *pointwise, batch b, conv c
) {
    long n = blocks(b), width = strided(b.width, c), size = c.kernel * c.kernel;
    long frames_size = n * frame_in(0, b, c).size, u_size = outputs(b, c) * n;
    long own = frames_size + u_size + width * n, shared = n * size + b.channels * n;
    long size_of_means = b.images * b.channels;
    vec *memory = zeros((b.threads * own + shared) * sizeof(vec));
    double *means = zeros(2 * size_of_means * sizeof(double));
    if (!memory || !means) return free(memory), free(means), 0;
    vec *taps = memory, *rows = taps + n * size;
    load_depthwise(taps, depthwise, b, size), load_pointwise(rows, pointwise, b, 1);
    batch result = {b.images, strided(b.height, c), width, b.channels, b.threads};
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long image = 0; image < b.images; image++) {
        vec *frames = memory + shared + omp_get_thread_num() * own;
        vec *u = frames + frames_size, *row = u + u_size;
        REAL *to = y + image * u_size / n * b.channels;
        rectified_conv(
            u, frames, taps, x + image * pixels(b) * b.channels, scale, shift, b, c
        );
        for (long i = 0; i < result.height; i++) {
            multiply(row, u + i * width * n, rows, width, b);
            for (long j = 0; j < width; j++)
                for (long k = 0; k < n; k++)
                    store(to + (i * width + j) * b.channels + k * LANES, row[j * n + k],
                          lanes_of(k, b));
        }
        double *mean_of_image = means + image * b.channels;
        moments_of(mean_of_image, mean_of_image + size_of_means, to, result);
    }
    pool_moments(mean, variance, means, means + size_of_means, result);
    free(memory), free(means);
    return 1;
}

/* The gradient before the ReLU of one block, and its sums: alone, and times (x − mean). */
INLINE void input_gradient(
    REAL *dx, vec *sums, vec *row, const vec *flipped, frame g, frame rectified, const REAL *x,
    const REAL *mean, batch b, conv c, long lanes
) {
    vec centre = {0}, total = {0}, products = {0};
    if (mean) centre = load(mean, lanes);
    c.stride = 1;
    for (long i = 0; i < b.height; i++) {
        convolve_row(row, 1, g.start + i * g.width, flipped, g, b.width, c);
        for (long j = 0; j < b.width; j++) {
            long at = (i * b.width + j) * b.channels;
            vec value = keep(row[j], rectified.inside[i * rectified.width + j] > (vec){0});
            store(dx + at, value, lanes);
            total += value;
            if (mean) products += value * (load(x + at, lanes) - centre);
        }
    }
    sums[0] = total, sums[1] = products;
}

INLINE vec combined(
    const REAL *g, const REAL *x, const REAL *of_g, const REAL *of_x, const REAL *constant,
    long at, long channel, long lanes
) {
    vec value = load(of_g + channel, lanes) * load(g + at + channel, lanes);
    if (of_x)
        value += load(of_x + channel, lanes) * load(x + at + channel, lanes)
            + load(constant + channel, lanes);
    return value;
}

/* Of unit_forward, where the gradient of y is of_g·g + of_y·y + constant: the gradients of both
weights. If dx is given, it becomes the gradient before the ReLU, and totals and products become
Σ dx and Σ dx·(x − mean) of each channel. */
int unit_backward(
    REAL *dx, REAL *totals, REAL *products, REAL *ddepthwise, REAL *dpointwise, const REAL *g, const REAL *y, const REAL *of_g,
    const REAL *of_y, const REAL *constant, const REAL *x, const REAL *scale, const REAL *shift,
    const REAL *mean, const REAL *depthwise, const REAL *pointwise, batch b, conv c
) {
    long n = blocks(b), width = strided(b.width, c), height = strided(b.height, c);
    long size = c.kernel * c.kernel, stride = size + 2, frame_size = frame_in(0, b, c).size;
    long u_size = height * width * n, own = 2 * n * frame_size + 2 * u_size + b.width * n;
    long shared = 2 * n * size + b.channels * n, sums_size = b.channels * (stride + b.channels);
    vec *memory = zeros((b.threads * own + shared) * sizeof(vec));
    double *sums = zeros(b.threads * sums_size * sizeof(double));
    if (!memory || !sums) return free(memory), free(sums), 0;
    vec *taps = memory, *flipped = taps + n * size, *rows = flipped + n * size;
    load_depthwise(taps, depthwise, b, size), load_pointwise(rows, pointwise, b, 0);
    for (long k = 0; k < n * size; k++) flipped[k] = taps[k / size * size + size - 1 - k % size];
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long image = 0; image < b.images; image++) {
        vec *frames = memory + shared + omp_get_thread_num() * own, *gradients, found[27];
        vec *u = frames + n * frame_size, *dy = u + u_size, *row = dy + u_size;
        gradients = row + b.width * n;
        double *mine = sums + omp_get_thread_num() * sums_size;
        const REAL *of_image = x + image * pixels(b) * b.channels;
        long start = image * height * width * b.channels;
        rectified_conv(u, frames, taps, of_image, scale, shift, b, c);
        for (long p = 0; p < height * width; p++)
            for (long k = 0; k < n; k++)
                dy[p * n + k] = combined(
                    g, y, of_g, of_y, constant, start + p * b.channels, k * LANES, lanes_of(k, b)
                );
        accumulate(mine + b.channels * stride, dy, u, height * width, b);
        for (long i = 0; i < height; i++) {
            multiply(row, dy + i * width * n, rows, width, b);
            for (long k = 0; k < n; k++) {
                frame to = frame_in(gradients + k * frame_size, b, c);
                for (long j = 0; j < width; j++)
                    to.inside[(i * to.width + j) * c.stride] = row[j * n + k];
            }
        }
        for (long k = 0; k < n; k++) {
            frame rectified = frame_in(frames + k * frame_size, b, c);
            frame gradient = frame_in(gradients + k * frame_size, b, c);
            long first = k * LANES, lanes = lanes_of(k, b);
            found[0] = found[1] = (vec){0};
            correlate_image(found + 2, gradient, rectified, b, c);
            if (dx) {
                REAL *to = dx + image * pixels(b) * b.channels + first;
                const REAL *centre = mean ? mean + first : NULL, *from = of_image + first;
                const vec *taps_k = flipped + k * size;
                if (lanes == LANES)
                    input_gradient(
                        to, found, row, taps_k, gradient, rectified, from, centre, b, c, LANES
                    );
                else
                    input_gradient(
                        to, found, row, taps_k, gradient, rectified, from, centre, b, c, lanes
                    );
            }
            for (long s = 0; s < stride; s++)
                for (long lane = 0; lane < lanes; lane++)
                    mine[(first + lane) * stride + s] += found[s][lane];
        }
    }
    for (long t = 1; t < b.threads; t++)
        for (long k = 0; k < sums_size; k++) sums[k] += sums[t * sums_size + k];
    for (long channel = 0; channel < b.channels; channel++) {
        const double *of_channel = sums + channel * stride;
        totals[channel] = of_channel[0], products[channel] = of_channel[1];
        for (long tap = 0; tap < size; tap++) ddepthwise[channel * size + tap] = of_channel[2 + tap];
    }
    for (long k = 0; k < b.channels * b.channels; k++)
        dpointwise[k] = sums[b.channels * stride + k];
    free(memory), free(sums);
    return 1;
}

INLINE void image_correlations(
    double *total, double *products, const REAL *g, const REAL *x, const REAL *mean, batch b,
    long first, long lanes
) {
    vec centre = load(mean + first, lanes), sum = {0}, product = {0};
    for (long at = first; at < pixels(b) * b.channels; at += b.channels) {
        vec value = load(g + at, lanes);
        sum += value;
        product += value * (load(x + at, lanes) - centre);
    }
    for (long lane = 0; lane < lanes; lane++)
        total[first + lane] = sum[lane], products[first + lane] = product[lane];
}

/* For each channel: Σ g and Σ g·(x − mean). */
int correlations(
    REAL *totals, REAL *products, const REAL *g, const REAL *x, const REAL *mean, batch b
) {
    long size = b.images * b.channels;
    double *found = zeros(2 * size * sizeof(double));
    if (!found) return 0;
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long image = 0; image < b.images; image++)
        for (long k = 0; k < blocks(b); k++) {
            double *of_image = found + image * b.channels;
            long start = image * pixels(b) * b.channels;
            long first = k * LANES, lanes = lanes_of(k, b);
            if (lanes == LANES)
                image_correlations(
                    of_image, of_image + size, g + start, x + start, mean, b, first, LANES
                );
            else
                image_correlations(
                    of_image, of_image + size, g + start, x + start, mean, b, first, lanes
                );
        }
    for (long channel = 0; channel < b.channels; channel++) {
        double total = 0, product = 0;
        for (long at = channel; at < size; at += b.channels)
            total += found[at], product += found[size + at];
        totals[channel] = total, products[channel] = product;
    }
    free(found);
    return 1;
}

/* out = of_g·g + of_x·x + constant; without of_x, of_g·g. */
void combine(
    REAL *out, const REAL *g, const REAL *x, const REAL *of_g, const REAL *of_x,
    const REAL *constant, batch b
) {
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long p = 0; p < b.images * pixels(b); p++)
        for (long k = 0; k < blocks(b); k++)
            store(
                out + p * b.channels + k * LANES,
                combined(
                    g, x, of_g, of_x, constant, p * b.channels, k * LANES, lanes_of(k, b)
                ),
                lanes_of(k, b)
            );
}
