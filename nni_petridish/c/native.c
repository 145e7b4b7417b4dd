/* The inner loops of training on images in channels_last, on the CPU; see native.py. Compiled once for
each REAL.

A candidate is computed in the backward pass, forward and backward in one go: what is between the two
is in the cache. What needs memory returns whether there was some. */

#include "pool.h"
#include "projection.h"
#include "unit.h"

/* A unit's weights, and where their gradients go. */
typedef struct {
    conv c;
    const REAL *depthwise, *pointwise;
    REAL *ddepthwise, *dpointwise;
} weights;

/* A norm's parameters, which the last one of a candidate lacks; and its running statistics, if they
are to see the batch. */
typedef struct {
    const REAL *gamma, *beta;
    REAL *dgamma, *dbeta;
    REAL *running_mean, *running_variance;
    long long *batches;
} norm_parameters;

/* A candidate: a chain of one or two units, each followed by a norm, or if there is none a pooling and
a norm. */
typedef struct {
    batch b; /* of its input */
    const REAL *x;
    REAL *dx; /* if it is wanted */
    long adds; /* whether it is added to what is there */
    long length, pooling; /* the number of units; else, which pooling */
    weights units[2];
    norm_parameters norms[2];
    double alpha, dalpha;
} candidate;

/* What all norms have. */
typedef struct {
    double eps, momentum;
} settings;

static void show(const norm_parameters *to, norm of, settings s) {
    if (!to->batches) return;
    for (long k = 0; k < of.channels; k++) {
        double unbiased = of.variance[k] * of.count / (of.count - 1);
        to->running_mean[k] += s.momentum * (of.mean[k] - to->running_mean[k]);
        to->running_variance[k] += s.momentum * (unbiased - to->running_variance[k]);
    }
    ++*to->batches;
}

/* Σ g·x̂, the gradient of α. */
static double correlation(norm of) {
    double sum = 0;
    for (long k = 0; k < of.channels; k++) sum += of.products[k] * inverse_deviation(of, k);
    return sum;
}

/* The gradients of all weights of a chain of units and of α, g being the gradient of x_k. */
static int chain_gradients(candidate *of, const REAL *g, settings s) {
    batch b = of->b, inner = b;
    inner.height = strided(b.height, of->units[0].c), inner.width = strided(b.width, of->units[0].c);
    long n = b.channels, count = b.images * pixels(inner), size = count * n;
    REAL *memory = room((of->length * size + 11 * n) * sizeof(REAL));
    if (!memory) return 0;
    REAL *vectors = memory + of->length * size;
    REAL *totals = vectors, *products = totals + n, *of_g = products + n, *of_x = of_g + n;
    REAL *constant = of_x + n, *scale = constant + n, *shift = scale + n, *moments = shift + n;
    unit units[2], *first = units, *last = first + of->length - 1;
    norm norms[2];
    for (long i = 0; i < of->length; i++) {
        const weights *w = of->units + i;
        REAL *mean = moments + 2 * i * n, *variance = mean + n;
        units[i] = (unit){
            .c = w->c, .depthwise = w->depthwise, .pointwise = w->pointwise, .mean = mean,
            .variance = variance, .y = memory + i * size, .ddepthwise = w->ddepthwise,
            .dpointwise = w->dpointwise, .totals = totals, .products = products,
            .of = {of_g, of_x, constant}
        };
        norms[i] = (norm){mean, variance, totals, products, s.eps, count, n};
    }
    first->x = of->x, first->dx = of->dx, first->adds = of->adds, last->g = g;
    const norm_parameters *between = of->norms;
    int enough = 1;
    if (last != first) {
        enough = unit_forward(first, b);
        show(between, norms[0], s);
        for (long k = 0; k < n; k++) {
            scale[k] = between->gamma[k] * inverse_deviation(norms[0], k);
            shift[k] = between->beta[k] - scale[k] * first->mean[k];
        }
        last->x = first->y, last->centre = first->mean;
        last->dx = last->y; /* of which each image is read before it is written */
        last->scale = scale, last->shift = shift;
    }
    enough = enough && unit_forward(last, last == first ? b : inner);
    norm end = norms[of->length - 1];
    show(of->norms + of->length - 1, end, s);
    of->dalpha = correlation(end);
    norm_backward(of_g, of_x, constant, end, NULL, of->alpha);
    enough = enough && unit_backward(last, last == first ? b : inner);
    if (last != first) {
        for (long k = 0; k < n; k++) {
            between->dgamma[k] = products[k] * inverse_deviation(norms[0], k);
            between->dbeta[k] = totals[k];
        }
        norm_backward(of_g, of_x, constant, norms[0], between->gamma, 0);
        first->g = last->dx;
        enough = enough && unit_backward(first, b);
    }
    free(memory);
    return enough;
}

/* The same of several poolings of one input. */
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
            .kind = candidates[i].pooling, .stride = c.stride, .x = candidates->x, .mean = mean,
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

/* How many candidates, from the first, are poolings of the same input. */
static long poolings(const candidate *first, const candidate *end) {
    const candidate *c = first;
    long stride = first->units[0].c.stride;
    while (c < end && !c->length && c->x == first->x && c->units[0].c.stride == stride) c++;
    return c - first;
}

/* The gradients of a site's candidates, one after the other. */
int candidate_gradients(candidate *candidates, long n, const REAL *g, double eps, double momentum) {
    settings s = {eps, momentum};
    candidate *c = candidates, *end = c + n;
    int enough = 1;
    while (enough && c < end) {
        long count = poolings(c, end);
        enough = count ? pool_gradients(c, count, g, s) : chain_gradients(c, g, s);
        c += count ? count : 1;
    }
    return enough;
}
