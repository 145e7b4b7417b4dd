/* A recurrent cell over all steps in time, and its candidate nodes. A node with predecessor z is
s = z + σ(c)·(f(a) − z) with [c, a] = (m∘z) W and the locked dropout mask m.

Rows of a batch never meet in a cell, so each thread takes some rows through all steps. Vectors over
hidden units fill whole blocks; the units that pad the last one have gradient 0. */

#pragma once
#include "activations.h"
#include "norm.h"
#include "product.h"

/* The sizes of a cell; the width is the number of hidden units in whole blocks. */
typedef struct {
    long steps, rows, hidden, width, nodes, threads;
} cell_size;

INLINE long state_blocks(cell_size s) { return s.width / LANES; }

/* The cell. Product 0 computes s_0 from h(t-1), product i ≥ 1 node i. Arrays over products or states
hold (steps, rows, width) or, for gates, (steps, rows, 2, width) for each. */
typedef struct {
    const long *sources, *activations; /* of each product; sources[0] is not used */
    const REAL *const *weights; /* (hidden, 2·hidden) of each product */
    const REAL *shares; /* of each state in the output; that of s_0 is 0 */
    const REAL *mask, *first; /* (rows, width); the mask may be NULL */
    REAL *gates; /* [σ(c), f(a)]; those of product 0 come with the projected input */
    REAL *states, *outputs;
    REAL *masked; /* m∘h(t-1), then m∘s of each state */
    const REAL *g; /* the gradient of the outputs at each step alone */
    REAL *total; /* the gradient of the outputs, through later steps too */
    REAL *dgates; /* the gradient of [c, a] */
    REAL *dfirst;
} cell;

/* The shape of the product of a node. */
INLINE shape gates_shape(cell_size s) {
    return (shape){s.hidden, 2 * s.width, state_blocks(s), 2 * state_blocks(s)};
}

/* The shape of the product of the gradients of the gates, which fill whole blocks, with Wᵀ. */
INLINE shape back_shape(cell_size s) {
    return (shape){2 * s.width, s.hidden, 2 * state_blocks(s), state_blocks(s)};
}

INLINE long packed_size(cell_size s) { return 2 * s.width * state_blocks(s); }

/* Pack W for multiply, each half of the gates in whole blocks; or its transpose. */
static void pack_gates(vec *to, const REAL *weight, cell_size s, int is_transposed) {
    long h = s.hidden, width = s.width;
    memset(to, 0, packed_size(s) * sizeof(vec));
    for (long i = 0; i < h; i++)
        for (long o = 0; o < 2 * h; o++) {
            long gate = o / h * width + o % h;
            long at = is_transposed ? gate * width + i : i * 2 * width + gate;
            ((REAL *)to)[at] = weight[i * 2 * h + o];
        }
}

/* Some rows of a node: [c, a], to which those in the gates are added if wanted, become [σ(c), f(a)];
s is written, and m∘s if wanted. The kind is a constant. */
INLINE void open_rows(
    vec *s, vec *masked, vec *gates, const vec *product, const vec *z, const vec *by, long rows,
    cell_size size, long kind, int adds
) {
    long n = state_blocks(size);
    for (long r = 0; r < rows; r++)
        for (long k = 0; k < n; k++) {
            long at = 2 * r * n + k;
            vec c = product[at], a = product[at + n], from = z[r * n + k];
            if (adds) c += gates[at], a += gates[at + n];
            c = sigmoid(c), a = activated(a, kind);
            gates[at] = c, gates[at + n] = a;
            vec state = from + c * (a - from);
            s[r * n + k] = state;
            if (masked) masked[r * n + k] = by ? state * by[r * n + k] : state;
        }
}

static void open_gates(
    vec *s, vec *masked, vec *gates, const vec *product, const vec *z, const vec *by, long rows,
    cell_size size, long kind, int adds
) {
    if (adds) open_rows(s, masked, gates, product, z, by, rows, size, TANH, 1); /* s_0 */
    else if (kind == RELU) open_rows(s, masked, gates, product, z, by, rows, size, RELU, 0);
    else if (kind == TANH) open_rows(s, masked, gates, product, z, by, rows, size, TANH, 0);
    else if (kind == SIGMOID) open_rows(s, masked, gates, product, z, by, rows, size, SIGMOID, 0);
    else open_rows(s, masked, gates, product, z, by, rows, size, IDENTITY, 0);
}

/* The gradient of [c, a] from that of s, and the direct one of z, ds·(1 − σ(c)), if wanted: added to
dz or written. */
INLINE void close_rows(
    vec *dgates, vec *dz, const vec *gates, const vec *ds, const vec *z, long rows, cell_size size,
    long kind, int adds
) {
    long n = state_blocks(size);
    for (long r = 0; r < rows; r++)
        for (long k = 0; k < n; k++) {
            long at = 2 * r * n + k, here = r * n + k;
            vec c = gates[at], a = gates[at + n], g = ds[here], opened = g * c;
            dgates[at] = g * (a - z[here]) * (c * (1 - c));
            dgates[at + n] = times_slope(opened, a, kind);
            dz[here] = adds ? dz[here] + (g - opened) : g - opened;
        }
}

static void close_gates(
    vec *dgates, vec *dz, const vec *gates, const vec *ds, const vec *z, long rows, cell_size size,
    long kind, int adds
) {
    if (kind == RELU) close_rows(dgates, dz, gates, ds, z, rows, size, RELU, adds);
    else if (kind == TANH) close_rows(dgates, dz, gates, ds, z, rows, size, TANH, adds);
    else if (kind == SIGMOID) close_rows(dgates, dz, gates, ds, z, rows, size, SIGMOID, adds);
    else close_rows(dgates, dz, gates, ds, z, rows, size, IDENTITY, adds);
}

/* Copy some rows, times the mask if there is one. */
INLINE void mask_rows(vec *to, const vec *from, const vec *by, long count) {
    for (long k = 0; k < count; k++) to[k] = by ? from[k] * by[k] : from[k];
}

/* Some rows from the first through all steps, forward. */
static void unroll_rows(
    const cell *of, const vec *weights, vec *product, long first, long rows, cell_size s
) {
    long n = state_blocks(s), all = s.steps * s.rows * n, from = first * n, count = rows * n;
    const vec *by = of->mask ? (const vec *)of->mask + from : NULL;
    const vec *h = (const vec *)of->first + from;
    vec *states = (vec *)of->states + from, *masked = (vec *)of->masked + from;
    for (long t = 0; t < s.steps; t++) {
        long at = t * s.rows * n;
        vec *out = (vec *)of->outputs + from + at;
        mask_rows(masked + at, h, by, count);
        for (long i = 0; i <= s.nodes; i++) {
            const vec *z = i ? states + of->sources[i] * all + at : h;
            const vec *in = masked + (i ? of->sources[i] + 1 : 0) * all + at;
            vec *gates = (vec *)of->gates + 2 * (i * all + from + at);
            multiply(
                product, 2 * n, 1, in, n, weights + i * packed_size(s), rows, gates_shape(s)
            );
            open_gates(
                states + i * all + at, masked + (i + 1) * all + at, gates, product, z, by, rows, s,
                of->activations[i], i == 0
            );
        }
        for (long k = 0; k < count; k++) {
            vec sum = {0};
            for (long i = 1; i <= s.nodes; i++) sum += of->shares[i] * states[i * all + at + k];
            out[k] = sum;
        }
        h = out;
    }
}

/* The same rows backward. ds has room for the gradients of all states, dh for that of h(t-1). */
static void roll_up_rows(
    const cell *of, const vec *weights, vec *product, vec *ds, vec *dh, long first, long rows,
    cell_size s
) {
    long n = state_blocks(s), all = s.steps * s.rows * n, from = first * n, count = rows * n;
    const vec *by = of->mask ? (const vec *)of->mask + from : NULL;
    const vec *states = (const vec *)of->states + from;
    memset(dh, 0, count * sizeof(vec));
    for (long t = s.steps - 1; t >= 0; t--) {
        long at = t * s.rows * n;
        vec *total = (vec *)of->total + from + at;
        const vec *g = (const vec *)of->g + from + at;
        const vec *h = t ? (const vec *)of->outputs + from + at - s.rows * n
                         : (const vec *)of->first + from;
        for (long k = 0; k < count; k++) total[k] = g[k] + dh[k];
        for (long i = 0; i <= s.nodes; i++)
            for (long k = 0; k < count; k++) ds[i * count + k] = of->shares[i] * total[k];
        for (long i = s.nodes; i >= 0; i--) {
            const vec *z = i ? states + of->sources[i] * all + at : h;
            vec *dz = i ? ds + of->sources[i] * count : dh;
            long gates = 2 * (i * all + from + at);
            vec *dgates = (vec *)of->dgates + gates;
            close_gates(
                dgates, dz, (const vec *)of->gates + gates, ds + i * count, z, rows, s,
                of->activations[i], i > 0
            );
            multiply(
                product, n, 1, dgates, 2 * n, weights + i * packed_size(s), rows, back_shape(s)
            );
            for (long k = 0; k < count; k++) dz[k] += by ? product[k] * by[k] : product[k];
        }
    }
    memcpy((vec *)of->dfirst + from, dh, count * sizeof(vec));
}

/* Pack the weights of all products, for the forward or the backward pass. */
static vec *packed_cell(const cell *of, cell_size s, int is_transposed) {
    vec *weights = room((s.nodes + 1) * packed_size(s) * sizeof(vec));
    if (weights)
#pragma omp parallel for num_threads(s.threads) schedule(static)
        for (long i = 0; i <= s.nodes; i++)
            pack_gates(weights + i * packed_size(s), of->weights[i], s, is_transposed);
    return weights;
}

/* The rows of thread "part" begin here; those of one thread are whole tiles of a product. */
INLINE long first_row(long part, cell_size s) {
    long tiles = (s.rows + PAIR_PIXELS - 1) / PAIR_PIXELS;
    long row = tiles * part / s.threads * PAIR_PIXELS;
    return row < s.rows ? row : s.rows;
}

/* All steps, forward, or the gradients of all outputs and gates. */
static int run_cell(const cell *of, cell_size s, int is_backward) {
    long n = state_blocks(s), own = n * (is_backward ? s.nodes + 3 : 2);
    vec *weights = packed_cell(of, s, is_backward);
    if (!weights) return 0;
    int enough = 1;
#pragma omp parallel for num_threads(s.threads) schedule(static)
    for (long part = 0; part < s.threads; part++) {
        long first = first_row(part, s), rows = first_row(part + 1, s) - first;
        vec *memory = rows ? own_room(rows * own * sizeof(vec)) : NULL;
        if (!rows) continue;
        if (!memory) missing(&enough);
        else if (!is_backward) unroll_rows(of, weights, memory, first, rows, s);
        else
            roll_up_rows(
                of, weights, memory, memory + 2 * rows * n, memory + rows * n, first, rows, s
            );
    }
    free(weights);
    return enough;
}

int cell_forward(const cell *of, cell_size s) { return run_cell(of, s, 0); }
int cell_backward(const cell *of, cell_size s) { return run_cell(of, s, 1); }

/* A candidate node with a norm over all steps, forward and backward in one go. */
typedef struct {
    long activation;
    const REAL *weight, *z, *masked, *g; /* z and g: (steps, rows, width) */
    REAL *dgates; /* (steps, rows, 2, width) */
    norm_parameters norm;
    double alpha, dalpha;
} candidate_node;

/* The gates and the moments of the node at all steps, and its correlation with g. */
static int node_forward(const candidate_node *of, norm to, cell_size s) {
    long n = state_blocks(s), own = 3 * s.rows * n + n * sizeof(sums_of_block) / sizeof(vec);
    batch b = {s.steps, 1, s.rows, s.width, s.threads, s.threads};
    vec *weights = room(packed_size(s) * sizeof(vec));
    sums_of_channel *sums = room(s.steps * s.width * sizeof(sums_of_channel));
    if (!weights || !sums) return free(weights), free(sums), 0;
    pack_gates(weights, of->weight, s, 0);
    int enough = 1;
#pragma omp parallel num_threads(s.threads)
    {
        vec *product = own_room(own * sizeof(vec)), *state = product + 2 * s.rows * n;
        sums_of_block *of_step = (sums_of_block *)(state + s.rows * n);
        if (!product) missing(&enough);
#pragma omp for schedule(static)
        for (long t = 0; t < s.steps; t++) {
            if (!product) continue;
            long at = t * s.rows * n;
            const vec *z = (const vec *)of->z + at, *in = (const vec *)of->masked + at;
            multiply(product, 2 * n, 1, in, n, weights, s.rows, gates_shape(s));
            open_gates(
                state, NULL, (vec *)of->dgates + 2 * at, product, z, NULL, s.rows, s,
                of->activation, 0
            );
            observe_row(of_step, NULL, state, of->g, at * LANES, s.rows, b, 1);
            finish_image(sums + t * b.channels, of_step, s.rows, b);
        }
        finish_batch(
            (REAL *)to.mean, (REAL *)to.variance, (REAL *)to.totals, (REAL *)to.products, sums,
            s.rows, b
        );
    }
    free(weights), free(sums);
    return enough;
}

/* The gradients of [c, a], in place of [σ(c), f(a)]; the kind is a constant. */
INLINE void node_rows_backward(
    vec *gates, const vec *z, const vec *g, const vec *by, long rows, cell_size s, long kind
) {
    long n = state_blocks(s);
    for (long r = 0; r < rows; r++)
        for (long k = 0; k < n; k++) {
            long at = 2 * r * n + k, here = r * n + k;
            vec c = gates[at], a = gates[at + n], opens = a - z[here];
            vec ds = by[k] * g[here] + by[n + k] * (z[here] + c * opens) + by[2 * n + k];
            gates[at] = ds * opens * (c * (1 - c));
            gates[at + n] = times_slope(ds * c, a, kind);
        }
}

static void node_backward(const candidate_node *of, const vec *by, cell_size s) {
    long n = state_blocks(s);
#pragma omp parallel for num_threads(s.threads) schedule(static)
    for (long t = 0; t < s.steps; t++) {
        long at = t * s.rows * n;
        vec *gates = (vec *)of->dgates + 2 * at;
        const vec *z = (const vec *)of->z + at, *g = (const vec *)of->g + at;
        if (of->activation == RELU) node_rows_backward(gates, z, g, by, s.rows, s, RELU);
        else if (of->activation == TANH) node_rows_backward(gates, z, g, by, s.rows, s, TANH);
        else if (of->activation == SIGMOID) node_rows_backward(gates, z, g, by, s.rows, s, SIGMOID);
        else node_rows_backward(gates, z, g, by, s.rows, s, IDENTITY);
    }
}

/* The gradients of the gates of a candidate node and of its α, for g = ∇_h L. */
int node_gradients(candidate_node *of, cell_size s, double eps, double momentum) {
    long width = s.width;
    REAL *v = zeros(7 * width * sizeof(REAL)), *by = v + 4 * width;
    if (!v) return 0;
    norm end = {v, v + width, v + 2 * width, v + 3 * width, eps, s.steps * s.rows, s.hidden};
    int enough = node_forward(of, end, s);
    if (enough) {
        show(&of->norm, end, (settings){eps, momentum});
        of->dalpha = correlation(end);
        norm_backward(by, by + width, by + 2 * width, end, NULL, of->alpha);
        node_backward(of, (const vec *)by, s);
    }
    free(v);
    return enough;
}
