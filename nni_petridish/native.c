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

/* A unit, with what it takes and makes, forward and backward. */
typedef struct {
    conv c;
    const REAL *x, *scale, *shift; /* ReLU(scale·x + shift), or ReLU(x) without a scale */
    const REAL *depthwise, *pointwise;
    REAL *y, *mean, *variance; /* the output, and its moments */
    const REAL *g, *of_g, *of_y, *constant; /* the output's gradient, of_g·g + of_y·y + constant */
    const REAL *centre; /* the mean of x, if it is normalised */
    REAL *dx, *totals, *products, *ddepthwise, *dpointwise;
    long adds; /* whether dx is added to what is there */
} unit;

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
    long height = strided(b.height, c), width = strided(b.width, c), d = c.dilation;
    if (c.kernel == 3 && c.stride == 1) correlate(sums, g, x, height, width, 3, 1, d);
    else if (c.kernel == 3) correlate(sums, g, x, height, width, 3, 2, d);
    else if (c.stride == 1) correlate(sums, g, x, height, width, 5, 1, d);
    else correlate(sums, g, x, height, width, 5, 2, d);
}

/* to = from · weight, for pixels of one row; weight[i·blocks + o] has blocks of outputs. Neighbours
lie a step apart, blocks of channels a block_step. */
static void multiply(
    vec *to, long step, long block_step, const vec *from, const vec *weight, long pixels, batch b
) {
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
            for (long p = 0; p < PIXELS; p++) to[(pixel + p) * step + o * block_step] = sum[p];
        }
    for (; pixel < pixels; pixel++)
        for (long o = 0; o < n; o++) {
            vec sum = {0};
            for (long i = 0; i < b.channels; i++) sum += in[pixel * n * LANES + i] * weight[i * n + o];
            to[pixel * step + o * block_step] = sum;
        }
}

INLINE void add_lanes(double *sums, vec value, long lanes) {
    if (lanes == LANES) for (long lane = 0; lane < LANES; lane++) sums[lane] += value[lane];
    else for (long lane = 0; lane < lanes; lane++) sums[lane] += value[lane];
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
                add_lanes(sums + (o + k) * b.channels + i * LANES, sum[k], lanes_of(i, b));
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

/* frames = ReLU(scale·x + shift) of one image. */
static void rectify_image(vec *frames, const unit *of, long image, batch b) {
    const REAL *x = of->x + image * pixels(b) * b.channels;
    for (long k = 0; k < blocks(b); k++) {
        long first = k * LANES, lanes = lanes_of(k, b);
        frame f = frame_in(frames + k * frame_in(0, b, of->c).size, b, of->c);
        const REAL *by = of->scale ? of->scale + first : NULL;
        const REAL *plus = of->scale ? of->shift + first : NULL;
        if (lanes == LANES) rectify(f, x + first, by, plus, b, LANES);
        else rectify(f, x + first, by, plus, b, lanes);
    }
}

/* u = depthwise conv of the image in the frames. */
static void convolve_image(vec *u, vec *frames, const vec *taps, batch b, conv c) {
    long n = blocks(b), width = strided(b.width, c), size = c.kernel * c.kernel;
    for (long k = 0; k < n; k++) {
        frame f = frame_in(frames + k * frame_in(0, b, c).size, b, c);
        for (long i = 0; i < strided(b.height, c); i++)
            convolve_row(
                u + i * width * n + k, n, f.start + i * c.stride * f.width, taps + k * size, f,
                width, c
            );
    }
}

static void *room(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

static void *zeros(size_t bytes) {
    void *memory = room(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

/* Sums over one block of channels of an image y, of which the rows come one after the other: of y
and y² around the mean of the first row, and with the gradient g of each. */
typedef struct {
    vec centre, sum, squares, total, products;
} sums_of_block;

/* The same over images, for one channel: Σ (y − mean)² is m2, Σ g·(y − mean) is product. */
typedef struct {
    double mean, m2, total, product;
} sums_of_channel;

/* Take a row into account, and write it to y if that is given. */
INLINE void observe_block(
    sums_of_block *sums, REAL *y, const vec *row, const REAL *g, long width, batch b, long k,
    long lanes, int is_first
) {
    long n = blocks(b);
    sums_of_block s = sums[k];
    if (is_first) {
        vec sum = {0};
        for (long j = 0; j < width; j++) sum += row[j * n + k];
        s = (sums_of_block){.centre = sum / (REAL)width};
    }
    for (long j = 0; j < width; j++) {
        vec value = row[j * n + k], from = value - s.centre;
        s.sum += from;
        s.squares += from * from;
        if (y) store(y + j * b.channels + k * LANES, value, lanes);
        if (g) {
            vec gradient = load(g + j * b.channels + k * LANES, lanes);
            s.total += gradient;
            s.products += gradient * from;
        }
    }
    sums[k] = s;
}

/* at is the place of the row in y and g, each of which may be missing. */
static void observe_row(
    sums_of_block *sums, REAL *y, const vec *row, const REAL *g, long at, long width, batch b,
    int is_first
) {
    if (y) y += at;
    if (g) g += at;
    for (long k = 0; k < blocks(b); k++)
        if (lanes_of(k, b) == LANES)
            observe_block(sums, y, row, g, width, b, k, LANES, is_first);
        else
            observe_block(sums, y, row, g, width, b, k, lanes_of(k, b), is_first);
}

static void finish_image(sums_of_channel *to, const sums_of_block *sums, long count, batch b) {
    for (long channel = 0; channel < b.channels; channel++) {
        const sums_of_block *s = sums + channel / LANES;
        long lane = channel % LANES;
        double off = s->sum[lane] / (double)count, total = s->total[lane];
        to[channel].mean = s->centre[lane] + off;
        to[channel].m2 = s->squares[lane] - off * off * count;
        to[channel].total = total, to[channel].product = s->products[lane] - off * total;
    }
}

/* Mean and biased variance of each channel, and if wanted Σ g and Σ g·(y − mean), from the sums of
each image. */
static void finish_batch(
    REAL *mean, REAL *variance, REAL *totals, REAL *products, const sums_of_channel *sums,
    long count, batch b
) {
    for (long channel = 0; channel < b.channels; channel++) {
        const sums_of_channel *end = sums + b.images * b.channels, *s;
        double centre = 0, within = 0, between = 0, total = 0, product = 0;
        for (s = sums + channel; s < end; s += b.channels)
            centre += s->mean / b.images, within += s->m2 / b.images;
        for (s = sums + channel; s < end; s += b.channels) {
            double off = s->mean - centre;
            between += off * off / b.images;
            total += s->total, product += s->product + off * s->total;
        }
        mean[channel] = centre, variance[channel] = within / count + between;
        if (totals) totals[channel] = total, products[channel] = product;
    }
}

/* y = pointwise conv of depthwise conv of ReLU(scale·x + shift), and its moments. If g is given, also
Σ g and Σ g·(y − mean) of each channel, as totals and products. Returns whether there was memory, as
all do here. */
int unit_forward(const unit *of, batch b) {
    conv c = of->c;
    long n = blocks(b), width = strided(b.width, c), height = strided(b.height, c);
    long size = c.kernel * c.kernel, frames_size = n * frame_in(0, b, c).size;
    long u_size = height * width * n, of_sums = n * sizeof(sums_of_block) / sizeof(vec);
    long own = frames_size + u_size + width * n + of_sums;
    vec *taps = zeros((n * size + b.channels * n) * sizeof(vec)), *rows = taps + n * size;
    vec *memory = room(b.threads * own * sizeof(vec));
    sums_of_channel *sums = room(b.images * b.channels * sizeof(sums_of_channel));
    if (!taps || !memory || !sums) return free(taps), free(memory), free(sums), 0;
    load_depthwise(taps, of->depthwise, b, size), load_pointwise(rows, of->pointwise, b, 1);
#pragma omp parallel num_threads(b.threads)
    {
        vec *frames = memory + omp_get_thread_num() * own;
        vec *u = frames + frames_size, *row = u + u_size;
        sums_of_block *of_image = (sums_of_block *)(row + width * n);
        memset(frames, 0, frames_size * sizeof(vec));
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            rectify_image(frames, of, image, b);
            convolve_image(u, frames, taps, b, c);
            for (long i = 0; i < height; i++) {
                long at = (image * height + i) * width * b.channels;
                multiply(row, n, 1, u + i * width * n, rows, width, b);
                observe_row(of_image, of->y, row, of->g, at, width, b, i == 0);
            }
            finish_image(sums + image * b.channels, of_image, height * width, b);
        }
    }
    REAL *totals = of->g ? of->totals : NULL;
    finish_batch(of->mean, of->variance, totals, of->products, sums, height * width, b);
    free(taps), free(memory), free(sums);
    return 1;
}

/* The gradient before the ReLU of one block, and its sums: alone, and times (x − mean). */
INLINE void input_gradient(
    REAL *dx, vec *sums, vec *row, const vec *flipped, frame g, frame rectified, const REAL *x,
    const REAL *mean, batch b, conv c, long adds, long lanes
) {
    vec centre = {0}, total = {0}, products = {0};
    if (mean) centre = load(mean, lanes);
    c.stride = 1;
    for (long i = 0; i < b.height; i++) {
        convolve_row(row, 1, g.start + i * g.width, flipped, g, b.width, c);
        for (long j = 0; j < b.width; j++) {
            long at = (i * b.width + j) * b.channels;
            vec value = keep(row[j], rectified.inside[i * rectified.width + j] > (vec){0});
            store(dx + at, adds ? load(dx + at, lanes) + value : value, lanes);
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

/* One block of channels of of_g·g + of_y·y + constant, for the pixels of an image. */
INLINE void output_gradient(
    vec *dy, const unit *of, long start, long count, batch b, long k, long lanes
) {
    const REAL *g = of->g + start + k * LANES, *y = of->y + start + k * LANES;
    vec of_g = load(of->of_g + k * LANES, lanes), of_y = {0}, constant = {0};
    if (of->of_y)
        of_y = load(of->of_y + k * LANES, lanes), constant = load(of->constant + k * LANES, lanes);
    for (long p = 0; p < count; p++) {
        vec value = of_g * load(g + p * b.channels, lanes) + constant;
        if (of->of_y) value += of_y * load(y + p * b.channels, lanes);
        dy[p * blocks(b) + k] = value;
    }
}

/* What a thread needs to take images back through a unit. */
typedef struct {
    vec *frames, *u, *dy, *row, *gradients;
} workplace;

/* The gradients of the weights of a unit from one image, and dx. Sums are for each channel Σ dx,
Σ dx·(x − centre) and the taps; then the pointwise weights. */
static void image_backward(
    double *sums, workplace at, const vec *taps, const unit *of, long image, batch b
) {
    conv c = of->c;
    long n = blocks(b), width = strided(b.width, c), height = strided(b.height, c);
    long size = c.kernel * c.kernel, stride = size + 2, frame_size = frame_in(0, b, c).size;
    long x_at = image * pixels(b) * b.channels, y_at = image * height * width * b.channels;
    const vec *flipped = taps + n * size, *rows = flipped + n * size;
    vec found[27];
    rectify_image(at.frames, of, image, b);
    convolve_image(at.u, at.frames, taps, b, c);
    for (long k = 0; k < n; k++)
        if (lanes_of(k, b) == LANES) output_gradient(at.dy, of, y_at, height * width, b, k, LANES);
        else output_gradient(at.dy, of, y_at, height * width, b, k, lanes_of(k, b));
    accumulate(sums + b.channels * stride, at.dy, at.u, height * width, b);
    for (long i = 0; i < height; i++) {
        frame to = frame_in(at.gradients, b, c);
        vec *row = to.inside + i * c.stride * to.width;
        multiply(row, c.stride, frame_size, at.dy + i * width * n, rows, width, b);
    }
    for (long k = 0; k < n; k++) {
        frame rectified = frame_in(at.frames + k * frame_size, b, c);
        frame gradient = frame_in(at.gradients + k * frame_size, b, c);
        long first = k * LANES, lanes = lanes_of(k, b);
        found[0] = found[1] = (vec){0};
        correlate_image(found + 2, gradient, rectified, b, c);
        if (of->dx) {
            REAL *to = of->dx + x_at + first;
            const REAL *from = of->x + x_at + first;
            const REAL *centre = of->centre ? of->centre + first : NULL;
            const vec *taps_k = flipped + k * size;
            if (lanes == LANES)
                input_gradient(
                    to, found, at.row, taps_k, gradient, rectified, from, centre, b, c, of->adds,
                    LANES
                );
            else
                input_gradient(
                    to, found, at.row, taps_k, gradient, rectified, from, centre, b, c, of->adds,
                    lanes
                );
        }
        for (long s = 0; s < stride; s++)
            for (long lane = 0; lane < lanes; lane++)
                sums[(first + lane) * stride + s] += found[s][lane];
    }
}

/* Of unit_forward: the gradients of both weights. If dx is given, it becomes the gradient before the
ReLU, or that is added to it, and totals and products become its Σ and Σ dx·(x − centre) of each
channel. */
int unit_backward(const unit *of, batch b) {
    conv c = of->c;
    long n = blocks(b), size = c.kernel * c.kernel, stride = size + 2;
    long frames_size = n * frame_in(0, b, c).size, u_size = outputs(b, c) * n;
    long own = 2 * frames_size + 2 * u_size + b.width * n;
    long sums_size = b.channels * (stride + b.channels);
    vec *taps = zeros((2 * n * size + b.channels * n) * sizeof(vec)), *flipped = taps + n * size;
    vec *memory = room(b.threads * own * sizeof(vec));
    double *sums = zeros(b.threads * sums_size * sizeof(double));
    if (!taps || !memory || !sums) return free(taps), free(memory), free(sums), 0;
    load_depthwise(taps, of->depthwise, b, size);
    for (long k = 0; k < n * size; k++) flipped[k] = taps[k / size * size + size - 1 - k % size];
    load_pointwise(flipped + n * size, of->pointwise, b, 0);
#pragma omp parallel num_threads(b.threads)
    {
        workplace at = {.frames = memory + omp_get_thread_num() * own};
        at.gradients = at.frames + frames_size, at.u = at.gradients + frames_size;
        at.dy = at.u + u_size, at.row = at.dy + u_size;
        memset(at.frames, 0, 2 * frames_size * sizeof(vec));
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++)
            image_backward(sums + omp_get_thread_num() * sums_size, at, taps, of, image, b);
    }
    for (long t = 1; t < b.threads; t++)
        for (long k = 0; k < sums_size; k++) sums[k] += sums[t * sums_size + k];
    for (long channel = 0; channel < b.channels; channel++) {
        const double *of_channel = sums + channel * stride;
        if (of->dx) of->totals[channel] = of_channel[0], of->products[channel] = of_channel[1];
        for (long tap = 0; tap < size; tap++)
            of->ddepthwise[channel * size + tap] = of_channel[2 + tap];
    }
    for (long k = 0; k < b.channels * b.channels; k++)
        of->dpointwise[k] = sums[b.channels * stride + k];
    free(taps), free(memory), free(sums);
    return 1;
}

/* The norm of a value x, of which the moments are known, and the gradient g of its output, of which
totals are Σ g and products Σ g·(x − mean). */
typedef struct {
    const REAL *mean, *variance, *totals, *products;
    double eps, count;
    long channels;
} norm;

INLINE double inverse_deviation(norm of, long channel) {
    return 1 / __builtin_sqrt(of.variance[channel] + of.eps);
}

/* of_g, of_x and constant such that dx = of_g·g + of_x·x + constant; γ is the same in all channels
where there is no vector of it. */
static void norm_backward(
    REAL *of_g, REAL *of_x, REAL *constant, norm of, const REAL *gammas, double gamma
) {
    for (long k = 0; k < of.channels; k++) {
        double inv_std = inverse_deviation(of, k), scale = (gammas ? gammas[k] : gamma) * inv_std;
        double by = -scale * inv_std * inv_std * of.products[k] / of.count;
        of_g[k] = scale, of_x[k] = by;
        constant[k] = -scale * of.totals[k] / of.count - by * of.mean[k];
    }
}

/* A candidate: a chain of at most two units, of which the first has no norm, and a norm without γ
and β. Of units only what belongs to the unit alone is given. */
typedef struct {
    unit units[2];
    const REAL *gamma, *beta; /* of the norm between two units */
    REAL *dgamma, *dbeta;
    long length;
    double alpha, dalpha, eps;
} branch;

/* The gradients of all weights of a candidate and of α, g being the gradient of x_k. */
int branch_gradients(branch *of, const REAL *g, batch b) {
    unit *first = of->units, *last = first + of->length - 1;
    batch inner = {
        b.images, strided(b.height, first->c), strided(b.width, first->c), b.channels, b.threads
    };
    long n = b.channels, count = b.images * pixels(inner), size = count * n;
    REAL *memory = aligned_alloc(64, ((2 * size + 7 * n) * sizeof(REAL) + 63) / 64 * 64);
    if (!memory) return 0;
    REAL *totals = memory + 2 * size, *products = totals + n;
    REAL *of_g = products + n, *of_x = of_g + n, *constant = of_x + n, *scale = constant + n, *shift = scale + n;
    for (unit *u = first; u <= last; u++) {
        u->y = memory + (u - first) * size, u->g = u == last ? g : NULL;
        u->totals = totals, u->products = products;
        u->of_g = of_g, u->of_y = of_x, u->constant = constant;
    }
    norm middle = {first->mean, first->variance, totals, products, of->eps, count, n};
    norm end = {last->mean, last->variance, totals, products, of->eps, count, n};
    int enough = 1;
    if (last != first) {
        enough = unit_forward(first, b);
        for (long k = 0; k < n; k++) {
            scale[k] = of->gamma[k] * inverse_deviation(middle, k);
            shift[k] = of->beta[k] - scale[k] * first->mean[k];
        }
        last->x = first->y, last->centre = first->mean;
        last->dx = last->y; /* of which each image is read before it is written */
        last->scale = scale, last->shift = shift;
    }
    enough = enough && unit_forward(last, last == first ? b : inner);
    of->dalpha = 0;
    for (long k = 0; k < n; k++) of->dalpha += products[k] * inverse_deviation(end, k);
    norm_backward(of_g, of_x, constant, end, NULL, of->alpha);
    enough = enough && unit_backward(last, last == first ? b : inner);
    if (last != first) {
        for (long k = 0; k < n; k++)
            of->dgamma[k] = products[k] * inverse_deviation(middle, k), of->dbeta[k] = totals[k];
        norm_backward(of_g, of_x, constant, middle, of->gamma, 0);
        first->g = last->dx;
        enough = enough && unit_backward(first, b);
    }
    free(memory);
    return enough;
}

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

/* to[pixel·step] = one block of channels of the pixels of a row. */
INLINE void load_row(vec *to, long step, const REAL *x, long width, batch b, long k) {
    if (lanes_of(k, b) == LANES)
        for (long j = 0; j < width; j++) to[j * step] = load(x + j * b.channels + k * LANES, LANES);
    else
        for (long j = 0; j < width; j++)
            to[j * step] = load(x + j * b.channels + k * LANES, lanes_of(k, b));
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

/* The gradient of α of a candidate that is a pooling and a norm without γ and β, and dx. */
int pool_gradients(const pool *of, double *dalpha, double alpha, double eps, batch b) {
    conv c = {3, of->stride, 1};
    long n = b.channels;
    REAL *vectors = room(3 * n * sizeof(REAL));
    if (!vectors) return 0;
    int enough = pool_forward(of, b);
    norm end = {
        of->mean, of->variance, of->totals, of->products, eps, b.images * outputs(b, c), n
    };
    *dalpha = 0;
    for (long k = 0; k < n; k++) *dalpha += of->products[k] * inverse_deviation(end, k);
    norm_backward(vectors, vectors + n, vectors + 2 * n, end, NULL, alpha);
    if (of->dx && enough) enough = pool_backward(of, vectors, vectors + n, vectors + 2 * n, b);
    free(vectors);
    return enough;
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
