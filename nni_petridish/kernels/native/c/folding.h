/* Evaluation: a batch norm is a scale and a shift, by its running statistics, and folds into products.

An op is op(z) = M·u + b, where u is the output of its last depthwise conv, its pooling or its ReLU: a term.
A merge h = norm(W·concat(op_1(z_1), ...)) is then linear in all u, too: h = bias + Σ matrix_t·u_t. */

#pragma once
#include "pool.h"
#include "product.h"

/* A norm in evaluation; without a mean, the identity. */
typedef struct {
    const REAL *gamma, *beta, *mean, *variance; /* γ and β may be NULL */
    double eps;
} fixed_norm;

/* The input x itself, poolings (pool.h), ReLU(x), and ReLU of the even and of the odd pixels. */
enum { RECTIFIED = MAXIMUM + 1, HALVES };

typedef struct {
    long length, kind; /* the number of units; without units, one of the above */
    conv convs[2]; /* of the units; the first is the geometry of a pooling */
    long height, width, channels; /* of x */
    const REAL *x, *depthwise[2];
    const REAL *between; /* the pointwise conv between two units; its norm is the first */
    const REAL *weights[2]; /* the last conv, or those of even and odd pixels; NULL without one */
    fixed_norm norms[2]; /* the second is at the end */
} term;

typedef struct {
    long count;
    const term *terms;
    const REAL *weight; /* W; NULL for the sum of the ops themselves */
    fixed_norm norm; /* of the merge */
    const REAL *eta, *added; /* out = added + η·h; without them, 1 and 0 */
    REAL *h, *out; /* h is NULL if not needed */
} sum_of_terms;

INLINE batch input_of(const term *t, batch out) {
    return (batch){out.images, t->height, t->width, t->channels, out.parts, out.threads};
}

INLINE long parts_of(const term *t) { return !t->length && t->kind == HALVES ? 2 : 1; }
INLINE long term_blocks(const term *t, batch out) {
    return parts_of(t) * blocks(input_of(t, out));
}

INLINE double scale_of(const fixed_norm *of, long c) {
    if (!of->mean) return 1;
    return (of->gamma ? of->gamma[c] : 1) / __builtin_sqrt(of->variance[c] + of->eps);
}

INLINE double shift_of(const fixed_norm *of, long c) {
    if (!of->mean) return 0;
    return (of->beta ? of->beta[c] : 0) - scale_of(of, c) * of->mean[c];
}

/* The matrix and the shift of the sum, and scratch memory to compute them. */
typedef struct {
    vec *rows; /* rows[input·blocks + block]: the weights of an input in all outputs */
    vec *bias;
    vec *merged, *own; /* the weights of the merge; the matrix of one op */
} folding;

static long folding_at(folding *at, vec *memory, const sum_of_terms *of, batch out) {
    long n = blocks(out), all = 0, most = 0;
    for (const term *t = of->terms; t < of->terms + of->count; t++) {
        long inputs = term_blocks(t, out) * LANES;
        all += inputs, most = inputs > most ? inputs : most;
    }
    at->rows = memory, at->bias = memory + all * n, at->merged = at->bias + n;
    at->own = at->merged + of->count * out.channels * n;
    return all * n + n + (of->weight ? of->count * out.channels + most : 0) * n;
}

/* The matrix of an op, with the norm at its end: to[input·blocks + block]. */
static void load_op(vec *to, const term *t, batch out) {
    long n = blocks(out), inputs = t->channels, part_blocks = blocks(input_of(t, out));
    const fixed_norm *norm = t->norms + 1;
    memset(to, 0, term_blocks(t, out) * LANES * n * sizeof(vec));
    for (long o = 0; o < out.channels; o++) {
        double scale = scale_of(norm, o);
        long half = parts_of(t) == 1 ? out.channels : out.channels / 2, part = o >= half;
        REAL *column = (REAL *)(to + part * part_blocks * LANES * n) + o;
        if (!t->weights[0]) column[o * n * LANES] = scale;
        else
            for (long c = 0; c < inputs; c++)
                column[c * n * LANES] = scale * t->weights[part][(o - part * half) * inputs + c];
    }
}

/* merged[input·blocks + block] = the weights of the merge with its norm. */
static void load_merged(vec *merged, const sum_of_terms *of, batch out) {
    long n = blocks(out), inputs = of->count * out.channels;
    memset(merged, 0, inputs * n * sizeof(vec));
    for (long o = 0; o < out.channels; o++) {
        double scale = scale_of(&of->norm, o);
        for (long c = 0; c < inputs; c++)
            ((REAL *)(merged + c * n))[o] = scale * of->weight[o * inputs + c];
    }
}

static void fold_terms(const folding *at, const sum_of_terms *of, batch out) {
    long n = blocks(out), first = 0;
    REAL *bias = (REAL *)at->bias;
    memset(bias, 0, n * sizeof(vec));
    if (of->weight) load_merged(at->merged, of, out);
    for (long o = 0; of->weight && o < out.channels; o++) bias[o] = shift_of(&of->norm, o);
    for (long i = 0; i < of->count; i++) {
        const term *t = of->terms + i;
        const vec *merged = at->merged + i * out.channels * n;
        vec *rows = at->rows + first * n;
        long inputs = term_blocks(t, out) * LANES;
        load_op(of->weight ? at->own : rows, t, out);
        if (of->weight) multiply(rows, n, 1, at->own, n, merged, inputs, square(out));
        for (long c = 0; c < out.channels; c++) {
            REAL shift = shift_of(t->norms + 1, c);
            if (!of->weight) bias[c] += shift;
            else
                for (long k = 0; k < n; k++) at->bias[k] += shift * merged[c * n + k];
        }
        first += inputs;
    }
}
