/* ReLU and a 1x1 conv to another number of channels. With two parts the resolution is halved: the
first half of the outputs reads the pixels of even rows and columns, the second half the odd ones. */

#pragma once
#include "product.h"

typedef struct {
    long parts, outputs; /* of all parts together */
    const REAL *x, *weights[2]; /* the weights of each part */
    REAL *y, *mean, *variance; /* the output, and its moments */
    const REAL *g; /* the gradient of the output is a combination of g and y */
    combination of;
    REAL *dx, *dweights[2]; /* the gradient before the ReLU (NULL if not needed); those of the weights */
    long adds; /* whether to add to dx instead of writing it */
    REAL *totals, *products; /* in the forward pass, if g is given: Σ g and Σ g·(y − mean) */
} projection;

INLINE long halved(long size, long parts) { return (size - 1) / parts + 1; }

/* The batch of outputs. */
static batch projected(const projection *of, batch b) {
    return (batch){
        b.images, halved(b.height, of->parts), halved(b.width, of->parts), of->outputs, b.parts,
        b.threads
    };
}

/* The products to compute. Two parts are one product over the channels of both pixels, with zeros
among its weights, unless the outputs of each part are whole blocks. */
typedef struct {
    long groups, in_blocks, out_blocks; /* the blocks of all groups */
    shape s; /* of one group */
} products;

static products products_of(const projection *of, batch b) {
    products p = {1, of->parts * blocks(b), blocks(projected(of, b)), {0, 0, 0, 0}};
    if (of->outputs % (of->parts * LANES) == 0) p.groups = of->parts;
    long in_blocks = p.in_blocks / p.groups;
    long inputs = p.groups == of->parts ? b.channels : in_blocks * LANES;
    p.s = (shape){inputs, of->outputs / p.groups, in_blocks, p.out_blocks / p.groups};
    return p;
}

/* A weight of a part, and its position in the product. */
typedef struct {
    long part, at; /* in weights */
    long group, input, output;
} place;

static place place_of(long output, long channel, const projection *of, products p, batch b) {
    long half = of->parts == 1 ? of->outputs : of->outputs / 2, part = output >= half;
    long group = p.groups == 1 ? 0 : part;
    return (place){
        part, (output - part * half) * b.channels + channel, group,
        (part - group) * blocks(b) * LANES + channel, output - group * p.s.outputs
    };
}

/* For each group, rows[input·out_blocks] are the weights of an input in all outputs; or, transposed,
rows[output·in_blocks] the weights of all inputs in an output. */
static void load_weights(vec *rows, const projection *of, products p, batch b, int is_transposed) {
    long row = (is_transposed ? p.s.in_blocks : p.s.out_blocks) * LANES;
    long size = (is_transposed ? p.s.outputs : p.s.inputs) * row;
    memset(rows, 0, p.groups * size * sizeof(REAL));
    for (long o = 0; o < of->outputs; o++)
        for (long c = 0; c < b.channels; c++) {
            place w = place_of(o, c, of, p, b);
            long at = is_transposed ? w.output * row + w.input : w.input * row + w.output;
            ((REAL *)rows)[w.group * size + at] = of->weights[w.part][w.at];
        }
}

/* The index of the pixel that an output reads in this part; past the end if there is none. */
INLINE long pixel_of(const projection *of, long row, long column, long part, batch b) {
    long i = row * of->parts + part, j = column * of->parts + part;
    return i < b.height && j < b.width ? i * b.width + j : pixels(b);
}

/* The inputs of one row of outputs, rectified; x is an image. */
INLINE void rectify_block(
    vec *to, const projection *of, const REAL *x, long row, long part, batch b, long k, long lanes
) {
    long width = halved(b.width, of->parts), n = blocks(b);
    for (long j = 0; j < width; j++) {
        long at = pixel_of(of, row, j, part, b);
        vec value = {0};
        if (at < pixels(b)) value = load(x + at * b.channels + k * LANES, lanes);
        to[(j * of->parts + part) * n + k] = keep(value, ~(value < (vec){0}));
    }
}

static void rectify_parts(vec *to, const projection *of, const REAL *x, long row, batch b) {
    for (long part = 0; part < of->parts; part++)
        for (long k = 0; k < blocks(b); k++)
            if (lanes_of(k, b) == LANES) rectify_block(to, of, x, row, part, b, k, LANES);
            else rectify_block(to, of, x, row, part, b, k, lanes_of(k, b));
}

/* y, and its moments; if g is given, totals and products too. */
int projection_forward(const projection *of, batch b) {
    batch out = projected(of, b);
    products p = products_of(of, b);
    long count = pixels(out), of_sums = p.out_blocks * sizeof(sums_of_block) / sizeof(vec);
    long weights_size = p.s.inputs * p.s.out_blocks; /* of a group */
    long own = p.groups * weights_size + out.width * (p.in_blocks + p.out_blocks) + of_sums;
    sums_of_channel *sums = room(b.images * of->outputs * sizeof(sums_of_channel));
    if (!sums) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *rows = own_room(own * sizeof(vec)), *inputs = rows + p.groups * weights_size;
        vec *row = inputs + out.width * p.in_blocks;
        sums_of_block *of_image = (sums_of_block *)(row + out.width * p.out_blocks);
        if (rows) load_weights(rows, of, p, b, 0);
        else missing(&enough);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++) {
            if (!rows) continue;
            const REAL *x = of->x + image * pixels(b) * b.channels;
            for (long i = 0; i < out.height; i++) {
                long at = (image * count + i * out.width) * of->outputs;
                rectify_parts(inputs, of, x, i, b);
                for (long q = 0; q < p.groups; q++)
                    multiply(
                        row + q * p.s.out_blocks, p.out_blocks, 1, inputs + q * p.s.in_blocks,
                        p.in_blocks, rows + q * weights_size, out.width, p.s
                    );
                observe_row(of_image, of->y, row, of->g, at, out.width, out, i == 0);
            }
            finish_image(sums + image * of->outputs, of_image, count, out);
        }
        REAL *totals = of->g ? of->totals : NULL;
        finish_batch(of->mean, of->variance, totals, of->products, sums, count, out);
    }
    free(sums);
    return enough;
}

/* Add the gradients of a row's inputs to the pixels. */
INLINE void scatter_parts(
    REAL *dx, const vec *gradients, const vec *inputs, const projection *of, long row, batch b
) {
    long width = halved(b.width, of->parts), n = blocks(b);
    for (long j = 0; j < width; j++)
        for (long part = 0; part < of->parts; part++) {
            long at = pixel_of(of, row, j, part, b), from = (j * of->parts + part) * n;
            for (long k = 0; k < n && at < pixels(b); k++) {
                vec value = keep(gradients[from + k], inputs[from + k] > (vec){0});
                REAL *to = dx + at * b.channels + k * LANES;
                if (of->adds) value += load(to, lanes_of(k, b));
                store(to, value, lanes_of(k, b));
            }
        }
}

/* Scratch memory of a thread for the backward pass: the weights, and inputs and dy of an image. */
typedef struct {
    vec *rows, *inputs, *dy, *du;
} projection_workplace;

/* The gradients of the weights from one image, and dx. */
static void project_image_backward(
    double *sums, projection_workplace at, const projection *of, products p, long image, batch b
) {
    batch out = projected(of, b);
    long count = pixels(out), sums_size = p.s.outputs * p.s.in_blocks * LANES; /* of a group */
    long weights_size = p.s.outputs * p.s.in_blocks, row_size = out.width * p.in_blocks;
    long x_at = image * pixels(b) * b.channels, y_at = image * count * of->outputs;
    for (long i = 0; i < out.height; i++)
        rectify_parts(at.inputs + i * row_size, of, of->x + x_at, i, b);
    output_gradient(at.dy, of->g + y_at, of->y + y_at, of->of, count, out);
    for (long q = 0; q < p.groups; q++)
        accumulate(
            sums + q * sums_size, at.dy + q * p.s.out_blocks, p.out_blocks,
            at.inputs + q * p.s.in_blocks, p.in_blocks, count, p.s
        );
    if (!of->dx) return;
    REAL *dx = of->dx + x_at;
    if (of->parts > 1 && !of->adds) memset(dx, 0, pixels(b) * b.channels * sizeof(REAL));
    for (long i = 0; i < out.height; i++) {
        for (long q = 0; q < p.groups; q++)
            multiply(
                at.du + q * p.s.in_blocks, p.in_blocks, 1,
                at.dy + i * out.width * p.out_blocks + q * p.s.out_blocks, p.out_blocks,
                at.rows + q * weights_size, out.width, transposed(p.s)
            );
        scatter_parts(dx, at.du, at.inputs + i * row_size, of, i, b);
    }
}

/* The gradients of the weights, and dx if needed. */
int projection_backward(const projection *of, batch b) {
    batch out = projected(of, b);
    products p = products_of(of, b);
    long count = pixels(out), sums_size = p.s.outputs * p.s.in_blocks * LANES; /* of a group */
    long weights_size = p.s.outputs * p.s.in_blocks, row_size = out.width * p.in_blocks;
    long own = p.groups * weights_size + count * (p.in_blocks + p.out_blocks) + row_size;
    double **found = zeros(b.parts * sizeof *found);
    if (!found) return 0;
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        vec *rows = own_sums(found, p.groups * sums_size, own, b);
        share parts = own_parts(b);
        vec *inputs = rows + p.groups * weights_size, *dy = inputs + count * p.in_blocks;
        vec *du = dy + count * p.out_blocks;
        if (rows) load_weights(rows, of, p, b, 1);
        else missing(&enough);
        for (long part = parts.first; rows && part < parts.end; part++)
            for (long image = images_of(part, b).first; image < images_of(part, b).end; image++)
                project_image_backward(
                    found[part], (projection_workplace){rows, inputs, dy, du}, of, p, image, b
                );
#pragma omp barrier
#pragma omp for schedule(static)
        for (long o = 0; o < of->outputs; o++)
            for (long c = 0; c < b.channels; c++) {
                place w = place_of(o, c, of, p, b);
                long at = w.group * sums_size + w.output * p.s.in_blocks * LANES + w.input;
                of->dweights[w.part][w.at] = total_of(found, at, b.parts);
            }
    }
    free(found);
    return enough;
}
