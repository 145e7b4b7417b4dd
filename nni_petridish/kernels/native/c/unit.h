/* A unit (batch norm, ReLU, depthwise conv, pointwise conv) in one pass over its images. An image is
copied into zero-padded frames that stay in the cache, and normalized and rectified on the way. All loops
over taps run inside a frame without checks for borders. */

#pragma once
#include "product.h"

/* A unit with its inputs and outputs, forward and backward. */
typedef struct {
    conv c;
    const REAL *x, *scale, *shift; /* ReLU(scale·x + shift), or ReLU(x) without a scale */
    const REAL *depthwise, *pointwise;
    REAL *y, *mean, *variance; /* the output, and its moments */
    const REAL *g; /* the gradient of the output is a combination of g and y */
    combination of;
    const REAL *center; /* the mean of x, if it is normalized */
    REAL *dx, *totals, *products, *ddepthwise, *dpointwise;
    long adds; /* whether to add to dx instead of writing it */
    vec *kept; /* the output of the depthwise conv, if saved instead of recomputed */
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

INLINE long variant(conv c) { return 100 * c.kernel + 10 * c.stride + c.dilation; }

/* One row of a conv, stored at every step-th place; the kernel and the stride are constants. */
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
    long w = f.width;
    switch (variant(c)) {
    case 311: convolve(to, step, from, weight, w, width, 3, 1, 1); break;
    case 312: convolve(to, step, from, weight, w, width, 3, 1, 2); break;
    case 321: convolve(to, step, from, weight, w, width, 3, 2, 1); break;
    case 322: convolve(to, step, from, weight, w, width, 3, 2, 2); break;
    case 511: convolve(to, step, from, weight, w, width, 5, 1, 1); break;
    case 512: convolve(to, step, from, weight, w, width, 5, 1, 2); break;
    case 521: convolve(to, step, from, weight, w, width, 5, 2, 1); break;
    case 522: convolve(to, step, from, weight, w, width, 5, 2, 2); break;
    }
}

/* Add the contribution of a pixel of g to Σ g·x at each tap, for some rows of taps. */
INLINE void correlate_pixel(
    vec *sum, vec g, const vec *x, long frame_width, long rows, long k, long d
) {
#pragma GCC unroll 5
    for (long p = 0; p < rows; p++)
#pragma GCC unroll 5
        for (long q = 0; q < k; q++) sum[p * k + q] += g * x[p * d * frame_width + q * d];
}

/* The same for two pixels as far apart as taps, which read the same x through adjacent taps. */
INLINE void correlate_pair(
    vec *sum, vec g, vec other, const vec *x, long frame_width, long rows, long k, long d
) {
#pragma GCC unroll 5
    for (long p = 0; p < rows; p++)
#pragma GCC unroll 6
        for (long q = 0; q <= k; q++) {
            vec value = x[p * d * frame_width + q * d];
            if (q < k) sum[p * k + q] += g * value;
            if (q > 0) sum[p * k + q - 1] += other * value;
        }
}

/* Some rows of taps; the kernel, the stride and the dilation are constants. */
INLINE void correlate_rows(
    vec *sums, frame g, frame x, long height, long width, long first, long rows, long k,
    long stride, long d
) {
    vec sum[15] = {{0}};
    for (long i = 0; i < height; i++) {
        const vec *from = g.inside + i * stride * g.width;
        const vec *at = x.start + (i * stride + first * d) * x.width;
        long j = 0;
        if (stride == 1)
            for (; j + 2 * d <= width; j += 2 * d)
#pragma GCC unroll 2
                for (long m = j; m < j + d; m++)
                    correlate_pair(sum, from[m], from[m + d], at + m, x.width, rows, k, d);
        for (; j < width; j++)
            correlate_pixel(sum, from[j * stride], at + j * stride, x.width, rows, k, d);
    }
    for (long tap = 0; tap < rows * k; tap++) sums[first * k + tap] = sum[tap];
}

/* All rows of taps, as many at a time as fit their sums in registers. */
INLINE void correlate(
    vec *sums, frame g, frame x, long height, long width, long k, long stride, long d
) {
    correlate_rows(sums, g, x, height, width, 0, 3, k, stride, d);
    if (k > 3) correlate_rows(sums, g, x, height, width, 3, k - 3, k, stride, d);
}

static void correlate_image(vec *sums, frame g, frame x, batch b, conv c) {
    long height = strided(b.height, c), width = strided(b.width, c);
    switch (variant(c)) {
    case 311: correlate(sums, g, x, height, width, 3, 1, 1); break;
    case 312: correlate(sums, g, x, height, width, 3, 1, 2); break;
    case 321: correlate(sums, g, x, height, width, 3, 2, 1); break;
    case 322: correlate(sums, g, x, height, width, 3, 2, 2); break;
    case 511: correlate(sums, g, x, height, width, 5, 1, 1); break;
    case 512: correlate(sums, g, x, height, width, 5, 1, 2); break;
    case 521: correlate(sums, g, x, height, width, 5, 2, 1); break;
    case 522: correlate(sums, g, x, height, width, 5, 2, 2); break;
    }
}

/* The weights of a unit, one vec per block of channels. */
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
    long weights_size = n * (size + b.channels), u_size = height * width * n;
    long of_sums = n * sizeof(sums_of_block) / sizeof(vec);
    long own = weights_size + frames_size + u_size + width * n + of_sums;
    sums_of_channel *sums = room(b.images * b.channels * sizeof(sums_of_channel));
    if (!sums) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *taps = own_room(own * sizeof(vec)), *rows = taps + n * size;
        vec *frames = taps + weights_size, *u = frames + frames_size, *row = u + u_size;
        sums_of_block *of_image = (sums_of_block *)(row + width * n);
        if (taps) {
            memset(taps, 0, weights_size * sizeof(vec)), clear_padding(frames, b, c);
            load_depthwise(taps, of->depthwise, b, size), load_pointwise(rows, of->pointwise, b, 1);
        } else missing(&enough);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            if (!taps) continue;
            if (of->kept) u = of->kept + image * u_size;
            rectify_image(frames, of, image, b);
            convolve_image(u, frames, taps, b, c);
            for (long i = 0; i < height; i++) {
                long at = (image * height + i) * width * b.channels;
                multiply(row, n, 1, u + i * width * n, n, rows, width, square(b));
                observe_row(of_image, of->y, row, of->g, at, width, b, i == 0);
            }
            finish_image(sums + image * b.channels, of_image, height * width, b);
        }
        REAL *totals = of->g ? of->totals : NULL;
        finish_batch(of->mean, of->variance, totals, of->products, sums, height * width, b);
    }
    free(sums);
    return enough;
}

/* The gradient before the ReLU of one block, and its sums: alone, and times (x − mean). */
INLINE void input_gradient(
    REAL *dx, vec *sums, vec *row, const vec *flipped, frame g, frame rectified, const REAL *x,
    const REAL *mean, batch b, conv c, long adds, long lanes
) {
    vec center = {0}, total = {0}, products = {0};
    if (mean) center = load(mean, lanes);
    c.stride = 1;
    for (long i = 0; i < b.height; i++) {
        convolve_row(row, 1, g.start + i * g.width, flipped, g, b.width, c);
        for (long j = 0; j < b.width; j++) {
            long at = (i * b.width + j) * b.channels;
            vec value = keep(row[j], rectified.inside[i * rectified.width + j] > (vec){0});
            store(dx + at, adds ? load(dx + at, lanes) + value : value, lanes);
            total += value;
            if (mean) products += value * (load(x + at, lanes) - center);
        }
    }
    sums[0] = total, sums[1] = products;
}

/* Scratch memory of a thread for the backward pass of a unit. */
typedef struct {
    vec *frames, *u, *dy, *row, *gradients;
} workplace;

/* The gradients of the weights of a unit from one image, and dx. The sums are, for each channel, Σ dx,
Σ dx·(x − center) and the taps, followed by the pointwise weights. */
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
    if (of->kept) at.u = of->kept + image * height * width * n;
    else convolve_image(at.u, at.frames, taps, b, c);
    output_gradient(at.dy, of->g + y_at, of->y + y_at, of->of, height * width, b);
    accumulate(sums + n * stride * LANES, at.dy, n, at.u, n, height * width, square(b));
    for (long i = 0; i < height; i++) {
        frame to = frame_in(at.gradients, b, c);
        vec *row = to.inside + i * c.stride * to.width;
        multiply(row, c.stride, frame_size, at.dy + i * width * n, n, rows, width, square(b));
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
            const REAL *center = of->center ? of->center + first : NULL;
            const vec *taps_k = flipped + k * size;
            if (lanes == LANES)
                input_gradient(
                    to, found, at.row, taps_k, gradient, rectified, from, center, b, c, of->adds,
                    LANES
                );
            else
                input_gradient(
                    to, found, at.row, taps_k, gradient, rectified, from, center, b, c, of->adds,
                    lanes
                );
        }
        for (long s = 0; s < stride; s++) add_lanes(sums + (k * stride + s) * LANES, found[s]);
    }
}

/* The backward pass of unit_forward: the gradients of both weights. If dx is given, the gradient before
the ReLU is written or added to it, and totals and products are Σ dx and Σ dx·(x − center) of each
channel. */
int unit_backward(const unit *of, batch b) {
    conv c = of->c;
    long n = blocks(b), size = c.kernel * c.kernel, stride = size + 2;
    long frames_size = n * frame_in(0, b, c).size, u_size = outputs(b, c) * n;
    long sums_size = n * LANES * (stride + b.channels), weights_size = n * (2 * size + b.channels);
    long own = weights_size + 2 * frames_size + 2 * u_size + b.width * n;
    double **found = zeros(b.parts * sizeof *found);
    if (!found) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *taps = own_sums(found, sums_size, own, b), *flipped = taps + n * size;
        share parts = own_parts(b);
        workplace at = {.frames = taps + weights_size};
        at.gradients = at.frames + frames_size, at.u = at.gradients + frames_size;
        at.dy = at.u + u_size, at.row = at.dy + u_size;
        if (taps) {
            memset(taps, 0, weights_size * sizeof(vec));
            clear_padding(at.frames, b, c);
            if (c.stride == 1) clear_padding(at.gradients, b, c);
            else memset(at.gradients, 0, frames_size * sizeof(vec)); /* most of it stays zero */
            load_depthwise(taps, of->depthwise, b, size);
            for (long k = 0; k < n * size; k++)
                flipped[k] = taps[k / size * size + size - 1 - k % size];
            load_pointwise(flipped + n * size, of->pointwise, b, 0);
        } else missing(&enough);
        for (long p = parts.first; taps && p < parts.end; p++)
            for (long image = images_of(p, b).first; image < images_of(p, b).end; image++)
                image_backward(found[p], at, taps, of, image, b);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long channel = 0; channel < b.channels; channel++) {
            long start = channel / LANES * stride * LANES + channel % LANES;
            for (long s = 0; s < stride; s++) {
                REAL sum = total_of(found, start + s * LANES, b.parts);
                if (s > 1) of->ddepthwise[channel * size + s - 2] = sum;
                else if (of->dx) *(s ? of->products + channel : of->totals + channel) = sum;
            }
            for (long i = 0; i < b.channels; i++)
                of->dpointwise[channel * b.channels + i] =
                    total_of(found, n * LANES * (stride + channel) + i, b.parts);
        }
    }
    free(found);
    return enough;
}
