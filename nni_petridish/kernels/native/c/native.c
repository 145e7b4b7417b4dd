/* Kernels for training on images in channels_last on the CPU, called by calls.py and candidates.py.
Compiled once for each REAL.

A candidate is computed in the backward pass, forward and backward in one go, while intermediate values
are in the cache. Functions that allocate memory return 0 if they fail to. */

#include "evaluation.h"
#include "merge.h"
#include "norm.h"
#include "pool.h"
#include "projection.h"
#include "recurrence.h"
#include "unit.h"

/* The two weights of a unit (depthwise, pointwise) or of the parts of a reduction, and outputs for
their gradients. */
typedef struct {
    conv c;
    const REAL *weights[2];
    REAL *gradients[2];
} parameters;

/* A candidate: one or two units, each followed by a norm; or, without units, a pooling or a reduction
(a projection of two parts) and a norm. */
typedef struct {
    batch b; /* of its input */
    const REAL *x;
    REAL *dx; /* NULL if not needed */
    long adds; /* whether to add to dx instead of writing it */
    long length, kind; /* the number of units; without units, which pooling, or REDUCTION */
    parameters units[2]; /* the second has stride 1 */
    norm_parameters norms[2];
    double alpha, dalpha;
} candidate;

/* The sizes of the structures, compared with those in structures.py. */
const long size_of_batch = sizeof(batch), size_of_unit = sizeof(unit), size_of_pool = sizeof(pool);
const long size_of_projection = sizeof(projection), size_of_candidate = sizeof(candidate);
const long size_of_merge = sizeof(merge), size_of_shortcut = sizeof(shortcut);
const long size_of_cell = sizeof(cell), size_of_cell_size = sizeof(cell_size);
const long size_of_candidate_node = sizeof(candidate_node), size_of_term = sizeof(term);
const long size_of_sum_of_terms = sizeof(sum_of_terms), size_of_layer_norm = sizeof(layer_norm);

/* The vectors over channels that a chain of units needs. */
enum { TOTALS, PRODUCTS, OF_G, OF_X, CONSTANT, SCALE, SHIFT, MOMENTS, VECTORS = MOMENTS + 4 };

/* The state of a chain of units. */
typedef struct {
    candidate *of;
    batch inner; /* the output of the first unit */
    unit units[2];
    norm norms[2];
    REAL *vectors;
} chain;

/* The output of the first unit. */
static batch inner_of(const candidate *of) {
    batch b = of->b;
    b.height = strided(b.height, of->units[0].c), b.width = strided(b.width, of->units[0].c);
    return b;
}

static size_t chain_room(const candidate *of) {
    batch inner = inner_of(of);
    size_t count = of->length * inner.images * pixels(inner), n = inner.channels;
    return count * (blocks(inner) * sizeof(vec) + n * sizeof(REAL)) + VECTORS * n * sizeof(REAL);
}

static chain make_chain(candidate *of, vec *kept, settings s) {
    chain made = {of, inner_of(of), .vectors = NULL};
    long n = of->b.channels, count = of->b.images * pixels(made.inner);
    long kept_size = count * blocks(of->b);
    REAL *y = (REAL *)(kept + of->length * kept_size), *v = y + of->length * count * n;
    made.vectors = v;
    for (long i = 0; i < of->length; i++) {
        const parameters *p = of->units + i;
        REAL *mean = v + (MOMENTS + 2 * i) * n;
        made.units[i] = (unit){
            .c = p->c, .depthwise = p->weights[0], .pointwise = p->weights[1],
            .ddepthwise = p->gradients[0], .dpointwise = p->gradients[1], .y = y + i * count * n,
            .mean = mean, .variance = mean + n, .totals = v + TOTALS * n,
            .products = v + PRODUCTS * n, .kept = kept + i * kept_size,
            .of = {v + OF_G * n, v + OF_X * n, v + CONSTANT * n}
        };
        made.norms[i] = (norm){mean, mean + n, v + TOTALS * n, v + PRODUCTS * n, s.eps, count, n};
    }
    made.units[0].x = of->x, made.units[0].dx = of->dx, made.units[0].adds = of->adds;
    return made;
}

/* The input gradient of a norm is computed by the unit before it. */
static void leave_gradient(const chain *c, norm of, const REAL *gammas, double gamma) {
    REAL *of_g = c->vectors + OF_G * of.channels, *of_x = c->vectors + OF_X * of.channels;
    norm_backward(of_g, of_x, c->vectors + CONSTANT * of.channels, of, gammas, gamma);
}

/* The last unit, forward and backward; its input is a batch. */
static int last_unit(chain *c, batch b, const REAL *g, settings s) {
    candidate *of = c->of;
    unit *last = c->units + of->length - 1;
    norm end = c->norms[of->length - 1];
    last->g = g;
    if (!unit_forward(last, b)) return 0;
    show(of->norms + of->length - 1, end, s);
    of->dalpha = correlation(end);
    leave_gradient(c, end, NULL, of->alpha);
    return unit_backward(last, b);
}

/* Two units, with a norm between them. */
static int two_units(chain *c, const REAL *g, settings s) {
    const norm_parameters *between = c->of->norms;
    unit *first = c->units, *last = first + 1;
    norm middle = c->norms[0];
    REAL *scale = c->vectors + SCALE * middle.channels, *shift = scale + middle.channels;
    if (!unit_forward(first, c->of->b)) return 0;
    show(between, middle, s);
    norm_forward(scale, shift, between, middle);
    last->x = first->y, last->center = middle.mean, last->scale = scale, last->shift = shift;
    last->dx = last->y; /* in place: each image is read before it is written */
    if (!last_unit(c, c->inner, g, s)) return 0;
    for (long k = 0; k < middle.channels; k++) {
        between->dgamma[k] = middle.products[k] * inverse_deviation(middle, k);
        between->dbeta[k] = middle.totals[k];
    }
    leave_gradient(c, middle, between->gamma, 0);
    first->g = last->dx;
    return unit_backward(first, c->of->b);
}

/* The gradients of all weights of a chain of units and of α, for g = ∇_{x_k} L. */
static int chain_gradients(candidate *of, vec *memory, const REAL *g, settings s) {
    chain c = make_chain(of, memory, s);
    return of->length > 1 ? two_units(&c, g, s) : last_unit(&c, of->b, g, s);
}

/* The same for several poolings of one input. */
static int pool_gradients(candidate *candidates, long count, const REAL *g, settings s) {
    batch b = candidates->b;
    conv c = candidates->units[0].c;
    long n = b.channels, own = 4 * n;
    REAL *memory = room((count * own + 3 * n) * sizeof(REAL));
    pool *pools = room(count * sizeof(pool));
    if (!memory || !pools) return free(memory), free(pools), 0;
    REAL *of_g = memory + count * own, *of_x = of_g + n, *constant = of_x + n;
    for (long i = 0; i < count; i++) {
        REAL *mean = memory + i * own;
        pools[i] = (pool){
            .kind = candidates[i].kind, .stride = c.stride, .x = candidates->x, .mean = mean,
            .variance = mean + n, .g = g, .totals = mean + 2 * n, .products = mean + 3 * n,
            .dx = candidates[i].dx, .adds = candidates[i].adds
        };
    }
    int enough = pool_forward(pools, count, b);
    for (long i = 0; enough && i < count; i++) {
        candidate *of = candidates + i;
        const pool *p = pools + i;
        norm end = {
            p->mean, p->variance, p->totals, p->products, s.eps, b.images * outputs(b, c), n
        };
        show(of->norms, end, s);
        of->dalpha = correlation(end);
        norm_backward(of_g, of_x, constant, end, NULL, of->alpha);
        if (of->dx) enough = pool_backward(p, (combination){of_g, of_x, constant}, b);
    }
    free(memory), free(pools);
    return enough;
}

enum { REDUCTION = MAXIMUM + 1 };

/* The same for a reduction. */
static int reduction_gradients(candidate *of, const REAL *g, settings s) {
    const parameters *w = of->units;
    projection p = {
        .parts = 2, .outputs = of->b.channels, .x = of->x,
        .weights = {w->weights[0], w->weights[1]}, .dweights = {w->gradients[0], w->gradients[1]},
        .g = g, .dx = of->dx, .adds = of->adds
    };
    batch out = projected(&p, of->b);
    long n = of->b.channels, count = out.images * pixels(out);
    REAL *memory = room((count + 7) * n * sizeof(REAL));
    if (!memory) return 0;
    REAL *vectors = memory + count * n, *by = vectors + 4 * n;
    p.y = memory, p.mean = vectors, p.variance = vectors + n;
    p.totals = vectors + 2 * n, p.products = vectors + 3 * n;
    norm end = {p.mean, p.variance, p.totals, p.products, s.eps, count, n};
    int enough = projection_forward(&p, of->b);
    if (enough) {
        show(of->norms, end, s);
        of->dalpha = correlation(end);
        norm_backward(by, by + n, by + 2 * n, end, NULL, of->alpha);
        p.of = (combination){by, by + n, by + 2 * n};
        enough = projection_backward(&p, of->b);
    }
    free(memory);
    return enough;
}

INLINE int is_pooling(const candidate *c) { return !c->length && c->kind != REDUCTION; }

/* The number of consecutive candidates from the first that are poolings of the same input. */
static long poolings(const candidate *first, const candidate *end) {
    const candidate *c = first;
    while (
        c < end && is_pooling(c) && c->x == first->x && !memcmp(&c->b, &first->b, sizeof(batch))
        && c->units[0].c.stride == first->units[0].c.stride
    )
        c++;
    return c - first;
}

/* The gradients of a site's candidates. All chains of units use the same memory, so that it stays in
the cache. */
int candidate_gradients(candidate *candidates, long n, const REAL *g, double eps, double momentum) {
    settings s = {eps, momentum};
    size_t size = sizeof(vec);
    for (candidate *c = candidates; c < candidates + n; c++)
        if (c->length && chain_room(c) > size) size = chain_room(c);
    vec *memory = room(size);
    int enough = memory != NULL;
    for (long i = 0; enough && i < n;) {
        candidate *c = candidates + i;
        long count = poolings(c, candidates + n);
        if (count) enough = pool_gradients(c, count, g, s);
        else if (c->length) enough = chain_gradients(c, memory, g, s);
        else enough = reduction_gradients(c, g, s);
        i += count ? count : 1;
    }
    free(memory);
    return enough;
}
