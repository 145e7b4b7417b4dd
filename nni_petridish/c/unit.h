/* A unit (batch norm, ReLU, depthwise conv, pointwise conv) in one pass over its images. It lays an
image out in frames of zeros that stay in the cache; the norm and the ReLU happen on the way, and all
loops over taps run inside a frame without a look at borders. */

#pragma once
#include "sums.h"

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

/* y = pointwise conv of depthwise conv of ReLU(scale·x + shift), and its moments. If g is given, also
Σ g and Σ g·(y − mean) of each channel, as totals and products. */
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
