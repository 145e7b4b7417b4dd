/* Sums over images for norms and their gradients. Sums within an image are REAL, sums over images are
double. */

#pragma once
#include "images.h"

/* Sums over one block of channels of an image y, row by row: of y and y² around the mean of the first
row, and of products with the gradient g. */
typedef struct {
    vec center, sum, squares, total, products;
} sums_of_block;

/* The same over images, for one channel: Σ (y − mean)² is m2, Σ g·(y − mean) is product. */
typedef struct {
    double mean, m2, total, product;
} sums_of_channel;

/* Add a row to the sums, and write it to y if given. */
INLINE void observe_block(
    sums_of_block *sums, REAL *y, const vec *row, const REAL *g, long width, batch b, long k,
    long lanes, int is_first
) {
    long n = blocks(b);
    sums_of_block s = sums[k];
    if (is_first) {
        vec sum = {0};
        for (long j = 0; j < width; j++) sum += row[j * n + k];
        s = (sums_of_block){.center = sum / (REAL)width};
    }
    for (long j = 0; j < width; j++) {
        vec value = row[j * n + k], from = value - s.center;
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

/* The row is at offset "at" in y and g, each of which may be NULL. */
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
        to[channel].mean = s->center[lane] + off;
        to[channel].m2 = s->squares[lane] - off * off * count;
        to[channel].total = total, to[channel].product = s->products[lane] - off * total;
    }
}

/* Mean and biased variance of each channel, and if needed Σ g and Σ g·(y − mean), from the sums of
each image. The threads of a team share the work. */
static void finish_batch(
    REAL *mean, REAL *variance, REAL *totals, REAL *products, const sums_of_channel *sums,
    long count, batch b
) {
#pragma omp for schedule(static)
    for (long channel = 0; channel < b.channels; channel++) {
        const sums_of_channel *end = sums + b.images * b.channels, *s;
        double center = 0, within = 0, between = 0, total = 0, product = 0;
        for (s = sums + channel; s < end; s += b.channels)
            center += s->mean / b.images, within += s->m2 / b.images;
        for (s = sums + channel; s < end; s += b.channels) {
            double off = s->mean - center;
            between += off * off / b.images;
            total += s->total, product += s->product + off * s->total;
        }
        mean[channel] = center, variance[channel] = within / count + between;
        if (totals) totals[channel] = total, products[channel] = product;
    }
}

/* Allocate the sums of the parts of the calling thread, set to zero, and register them in found. They
precede the returned memory. */
static vec *own_sums(double **found, long count, long vecs, batch b) {
    share parts = own_parts(b);
    size_t bytes = whole_blocks(count * sizeof(double)), all = (parts.end - parts.first) * bytes;
    char *memory = own_room(all + vecs * sizeof(vec));
    if (!memory) return NULL;
    memset(memory, 0, all);
    for (long p = parts.first; p < parts.end; p++)
        found[p] = (double *)(memory + (p - parts.first) * bytes);
    return (vec *)(memory + all);
}

/* The total over all parts, in order, without those whose thread could not allocate memory. */
INLINE double total_of(double *const *found, long at, long parts) {
    double total = 0;
    for (long p = 0; p < parts; p++) total += found[p] ? found[p][at] : 0;
    return total;
}

/* A norm of x with known moments; totals are Σ g and products Σ g·(x − mean), with g the gradient of
its output. */
typedef struct {
    const REAL *mean, *variance, *totals, *products;
    double eps, count;
    long channels;
} norm;

INLINE double inverse_deviation(norm of, long channel) {
    return 1 / __builtin_sqrt(of.variance[channel] + of.eps);
}

/* The coefficients of of_g·g + of_y·y + constant, vectors over channels; without of_y, of of_g·g. */
typedef struct {
    const REAL *of_g, *of_y, *constant;
} combination;

/* of_g, of_x and constant such that dx = of_g·g + of_x·x + constant; without a vector of γ, γ is the
same in all channels. */
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

INLINE void image_correlations(
    double *total, double *products, const REAL *g, const REAL *x, const REAL *mean, batch b,
    long first, long lanes
) {
    vec center = load(mean + first, lanes), sum = {0}, product = {0};
    for (long at = first; at < pixels(b) * b.channels; at += b.channels) {
        vec value = load(g + at, lanes);
        sum += value;
        product += value * (load(x + at, lanes) - center);
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
