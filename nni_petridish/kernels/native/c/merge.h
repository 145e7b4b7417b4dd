/* x_k + η·h with h = norm(1x1 conv of the concatenated shortcuts). Each shortcut is normalized as it is
read, so neither its normalized value nor the concatenation is ever written. */

#pragma once
#include "norm.h"
#include "product.h"

/* One input of the conv: factor·(u − mean)/σ, or factor·u without a mean. */
typedef struct {
    norm_parameters norm; /* its running statistics */
    const REAL *u, *mean, *variance;
    const REAL *factors; /* one for each image (drop-path); NULL for 1 */
    REAL *dvalue; /* the gradient of (u − mean)/σ, or of u; that of u is a combination of it and u */
    REAL *of_g, *of_u, *constant;
} shortcut;

typedef struct {
    long count; /* of shortcuts */
    shortcut *shortcuts;
    const REAL *weight;
    REAL *dweight;
    norm_parameters norm;
    const REAL *eta;
    REAL *deta;
    const REAL *x_k;
    REAL *y, *mean, *variance; /* the output of the conv, and its moments */
    REAL *h, *out; /* h is NULL if not needed */
    const REAL *g, *of_h; /* the gradients of out and of h; that of h may be NULL */
} merge;

/* The product of all inputs of a pixel, in whole blocks, with the weights. */
static shape merge_shape(const merge *of, batch b) {
    long n = blocks(b);
    return (shape){of->count * n * LANES, b.channels, of->count * n, n};
}

/* rows[input·out_blocks] are the weights of an input in all outputs; or, transposed,
rows[output·in_blocks] the weights of all inputs in an output. */
static void load_merge(vec *rows, const merge *of, batch b, int is_transposed) {
    shape s = merge_shape(of, b);
    long n = b.channels, row = (is_transposed ? s.in_blocks : s.out_blocks) * LANES;
    memset(rows, 0, (is_transposed ? s.outputs : s.inputs) * row * sizeof(REAL));
    for (long o = 0; o < n; o++)
        for (long p = 0; p < of->count; p++)
            for (long c = 0; c < n; c++) {
                long i = p * blocks(b) * LANES + c, at = is_transposed ? o * row + i : i * row + o;
                ((REAL *)rows)[at] = of->weight[(o * of->count + p) * n + c];
            }
}

/* The scales and shifts of all shortcuts, whole blocks each, for one image. */
static void load_affine(vec *affine, const merge *of, long image, batch b, settings s) {
    long n = blocks(b);
    memset(affine, 0, 2 * of->count * n * sizeof(vec));
    for (long p = 0; p < of->count; p++) {
        const shortcut *from = of->shortcuts + p;
        REAL *scale = (REAL *)(affine + 2 * p * n), *shift = scale + n * LANES;
        REAL factor = from->factors ? from->factors[image] : 1;
        norm own = {.mean = from->mean, .variance = from->variance, .eps = s.eps};
        for (long c = 0; c < b.channels; c++) {
            scale[c] = factor * (from->mean ? inverse_deviation(own, c) : 1);
            shift[c] = from->mean ? -scale[c] * from->mean[c] : 0;
        }
    }
}

INLINE void load_block(
    vec *to, long step, const REAL *u, vec scale, vec shift, long count, batch b, long lanes
) {
    for (long j = 0; j < count; j++)
        to[j * step] = scale * load(u + j * b.channels, lanes) + shift;
}

/* The inputs of some pixels of an image from the first. */
static void load_inputs(
    vec *to, const merge *of, const vec *affine, long first, long count, batch b
) {
    long n = blocks(b), step = of->count * n;
    for (long p = 0; p < of->count; p++)
        for (long k = 0; k < n; k++) {
            const REAL *u = of->shortcuts[p].u + first * b.channels + k * LANES;
            const vec *by = affine + 2 * p * n + k;
            vec *at = to + p * n + k;
            if (lanes_of(k, b) == LANES) load_block(at, step, u, by[0], by[n], count, b, LANES);
            else load_block(at, step, u, by[0], by[n], count, b, lanes_of(k, b));
        }
}

INLINE long strip_at(long pixel, batch b) {
    return pixels(b) - pixel < STRIP ? pixels(b) - pixel : STRIP;
}

/* The output of the conv, and its moments. */
static int project_shortcuts(const merge *of, batch b, settings s) {
    shape by = merge_shape(of, b);
    long n = blocks(b), weights = by.inputs * n, of_sums = n * sizeof(sums_of_block) / sizeof(vec);
    long own = weights + 2 * by.in_blocks + STRIP * (by.in_blocks + n) + of_sums;
    sums_of_channel *sums = room(b.images * b.channels * sizeof(sums_of_channel));
    if (!sums) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *rows = own_room(own * sizeof(vec)), *affine = rows + weights;
        vec *inputs = affine + 2 * by.in_blocks, *strip = inputs + STRIP * by.in_blocks;
        sums_of_block *of_image = (sums_of_block *)(strip + STRIP * n);
        if (rows) load_merge(rows, of, b, 0);
        else missing(&enough);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            if (!rows) continue;
            load_affine(affine, of, image, b, s);
            for (long pixel = 0; pixel < pixels(b); pixel += STRIP) {
                long first = image * pixels(b) + pixel, count = strip_at(pixel, b);
                load_inputs(inputs, of, affine, first, count, b);
                multiply(strip, n, 1, inputs, by.in_blocks, rows, count, by);
                observe_row(
                    of_image, of->y, strip, NULL, first * b.channels, count, b, pixel == 0
                );
            }
            finish_image(sums + image * b.channels, of_image, pixels(b), b);
        }
        finish_batch(of->mean, of->variance, NULL, NULL, sums, pixels(b), b);
    }
    free(sums);
    return enough;
}

INLINE void boost_block(
    const merge *of, const REAL *scale, const REAL *shift, long first, long count, batch b, long k,
    long lanes
) {
    vec by = load(scale + k * LANES, lanes), plus = load(shift + k * LANES, lanes);
    for (long j = first; j < first + count; j++) {
        long at = j * b.channels + k * LANES;
        vec h = by * load(of->y + at, lanes) + plus;
        if (of->h) store(of->h + at, h, lanes);
        store(of->out + at, load(of->x_k + at, lanes) + *of->eta * h, lanes);
    }
}

/* h = scale·y + shift and out = x_k + η·h. */
static void boost(const merge *of, const REAL *scale, const REAL *shift, batch b) {
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long image = 0; image < b.images; image++)
        for (long pixel = 0; pixel < pixels(b); pixel += STRIP)
            for (long k = 0; k < blocks(b); k++) {
                long first = image * pixels(b) + pixel, count = strip_at(pixel, b);
                if (lanes_of(k, b) == LANES)
                    boost_block(of, scale, shift, first, count, b, k, LANES);
                else boost_block(of, scale, shift, first, count, b, k, lanes_of(k, b));
            }
}

/* The norm of a shortcut or of y. */
INLINE norm merge_norm(const REAL *mean, const REAL *variance, batch b, settings s) {
    return (norm){
        .mean = mean, .variance = variance, .eps = s.eps, .count = b.images * pixels(b),
        .channels = b.channels
    };
}

int merge_forward(const merge *of, batch b, double eps, double momentum) {
    settings s = {eps, momentum};
    REAL *scale = room(2 * b.channels * sizeof(REAL)), *shift = scale + b.channels;
    int enough = scale && project_shortcuts(of, b, s);
    if (enough) {
        for (shortcut *p = of->shortcuts; p < of->shortcuts + of->count; p++)
            if (p->mean) show(&p->norm, merge_norm(p->mean, p->variance, b, s), s);
        norm last = merge_norm(of->mean, of->variance, b, s);
        show(&of->norm, last, s);
        norm_forward(scale, shift, &of->norm, last);
        boost(of, scale, shift, b);
    }
    free(scale);
    return enough;
}

/* The gradient of y is by.of_g·g + of_h·(gradient of h) + by.of_y·y + by.constant. */
typedef struct {
    combination by;
    const REAL *of_h;
} merge_combination;

INLINE void merged_gradient(
    vec *dy, const merge *of, merge_combination from, long first, long count, batch b, long k,
    long lanes
) {
    long c = k * LANES;
    vec of_g = load(from.by.of_g + c, lanes), of_y = load(from.by.of_y + c, lanes);
    vec constant = load(from.by.constant + c, lanes), of_h = load(from.of_h + c, lanes);
    for (long j = 0; j < count; j++) {
        long at = (first + j) * b.channels + c;
        vec value = of_g * load(of->g + at, lanes) + constant + of_y * load(of->y + at, lanes);
        if (of->of_h) value += of_h * load(of->of_h + at, lanes);
        dy[j * blocks(b) + k] = value;
    }
}

/* Write one block of the gradient of a shortcut, and add Σ of it, alone and times (u − mean). */
INLINE void take_block(
    vec *sums, const shortcut *to, const vec *from, long step, REAL factor, long first, long count,
    batch b, long k, long lanes
) {
    vec total = sums[0], products = sums[1], center = {0};
    if (to->mean) center = load(to->mean + k * LANES, lanes);
    for (long j = 0; j < count; j++) {
        long at = (first + j) * b.channels + k * LANES;
        vec value = factor * from[j * step];
        store(to->dvalue + at, value, lanes);
        total += value;
        products += value * (load(to->u + at, lanes) - center);
    }
    sums[0] = total, sums[1] = products;
}

/* The same for all shortcuts and some pixels from the first. */
static void take_shortcuts(
    vec *sums, const merge *of, const vec *from, long image, long first, long count, batch b
) {
    long n = blocks(b), step = of->count * n;
    for (long p = 0; p < of->count; p++) {
        const shortcut *to = of->shortcuts + p;
        REAL factor = to->factors ? to->factors[image] : 1;
        if (!to->dvalue) continue;
        for (long k = 0; k < n; k++) {
            vec *own = sums + 2 * (p * n + k);
            const vec *at = from + p * n + k;
            if (lanes_of(k, b) == LANES)
                take_block(own, to, at, step, factor, first, count, b, k, LANES);
            else take_block(own, to, at, step, factor, first, count, b, k, lanes_of(k, b));
        }
    }
}

/* Scratch memory of a thread for the backward pass: sums of shortcuts, inputs and dy of an image. */
typedef struct {
    vec *rows, *affine, *sums, *strip, *inputs, *dy;
} merge_workplace;

static void merge_image_backward(
    double *sums, merge_workplace at, const merge *of, merge_combination from, long image, batch b,
    settings s
) {
    shape by = merge_shape(of, b);
    long n = blocks(b), all = pixels(b), first = image * all;
    load_affine(at.affine, of, image, b, s);
    load_inputs(at.inputs, of, at.affine, first, all, b);
    for (long k = 0; k < n; k++)
        if (lanes_of(k, b) == LANES) merged_gradient(at.dy, of, from, first, all, b, k, LANES);
        else merged_gradient(at.dy, of, from, first, all, b, k, lanes_of(k, b));
    accumulate(sums + 2 * by.inputs, at.dy, n, at.inputs, by.in_blocks, all, by);
    memset(at.sums, 0, 2 * by.in_blocks * sizeof(vec));
    for (long pixel = 0; pixel < all; pixel += STRIP) {
        long count = strip_at(pixel, b);
        multiply(
            at.strip, by.in_blocks, 1, at.dy + pixel * n, n, at.rows, count, transposed(by)
        );
        take_shortcuts(at.sums, of, at.strip, image, first + pixel, count, b);
    }
    for (long k = 0; k < 2 * by.in_blocks; k++) add_lanes(sums + k * LANES, at.sums[k]);
}

/* The totals of all parts: the gradient of the weights, and the combination of each shortcut. */
static void finish_shortcuts(const merge *of, double *const *found, batch b, settings s) {
    shape by = merge_shape(of, b);
    long n = b.channels;
    REAL totals[n], products[n];
    for (long o = 0; o < n; o++)
        for (long p = 0; p < of->count; p++)
            for (long c = 0; c < n; c++) {
                long at = 2 * by.inputs + o * by.inputs + p * blocks(b) * LANES + c;
                of->dweight[(o * of->count + p) * n + c] = total_of(found, at, b.parts);
            }
    for (long p = 0; p < of->count; p++) {
        const shortcut *to = of->shortcuts + p;
        if (!to->mean || !to->dvalue) continue;
        for (long c = 0; c < n; c++) {
            long at = 2 * (p * blocks(b) + c / LANES) * LANES + c % LANES;
            totals[c] = total_of(found, at, b.parts);
            products[c] = total_of(found, at + LANES, b.parts);
        }
        norm own = merge_norm(to->mean, to->variance, b, s);
        own.totals = totals, own.products = products;
        norm_backward(to->of_g, to->of_u, to->constant, own, NULL, 1);
    }
}

static int shortcut_gradients(
    const merge *of, merge_combination from, batch b, settings s
) {
    shape by = merge_shape(of, b);
    long n = blocks(b), weights = by.outputs * by.in_blocks;
    long sums_size = by.inputs * (2 + by.outputs);
    long own = weights + (4 + STRIP) * by.in_blocks + pixels(b) * (by.in_blocks + n);
    double **found = zeros(b.parts * sizeof *found);
    if (!found) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        merge_workplace at = {.rows = own_sums(found, sums_size, own, b)};
        share parts = own_parts(b);
        at.affine = at.rows + weights, at.sums = at.affine + 2 * by.in_blocks;
        at.strip = at.sums + 2 * by.in_blocks, at.inputs = at.strip + STRIP * by.in_blocks;
        at.dy = at.inputs + pixels(b) * by.in_blocks;
        if (at.rows) load_merge(at.rows, of, b, 1);
        else missing(&enough);
        for (long p = parts.first; at.rows && p < parts.end; p++)
            for (long image = images_of(p, b).first; image < images_of(p, b).end; image++)
                merge_image_backward(found[p], at, of, from, image, b, s);
#pragma omp barrier
#pragma omp single
        finish_shortcuts(of, found, b, s);
    }
    free(found);
    return enough;
}

/* The gradients of η, γ and β, of the weights, and of every shortcut. */
int merge_backward(const merge *of, batch b, double eps, double momentum) {
    settings s = {eps, momentum};
    const norm_parameters *p = &of->norm;
    long n = b.channels;
    REAL *v = zeros(8 * n * sizeof(REAL)), *totals = v, *products = v + n, eta = *of->eta;
    REAL *of_h = v + 4 * n, *of_g = v + 5 * n, *of_y = v + 6 * n, *constant = v + 7 * n;
    norm last = merge_norm(of->mean, of->variance, b, s);
    int enough = v && correlations(totals, products, of->g, of->y, of->mean, b);
    if (enough && of->of_h)
        enough = correlations(v + 2 * n, v + 3 * n, of->of_h, of->y, of->mean, b);
    if (enough) {
        double deta = 0;
        for (long k = 0; k < n; k++) {
            double inv_std = inverse_deviation(last, k);
            deta += p->gamma[k] * inv_std * products[k] + p->beta[k] * totals[k];
            totals[k] = eta * totals[k] + v[2 * n + k];
            products[k] = eta * products[k] + v[3 * n + k];
            p->dbeta[k] = totals[k], p->dgamma[k] = products[k] * inv_std;
        }
        *of->deta = deta;
        last.totals = totals, last.products = products;
        norm_backward(of_h, of_y, constant, last, p->gamma, 0);
        for (long k = 0; k < n; k++) of_g[k] = eta * of_h[k];
        enough = shortcut_gradients(
            of, (merge_combination){{of_g, of_y, constant}, of_h}, b, s
        );
    }
    free(v);
    return enough;
}
