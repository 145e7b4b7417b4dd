/* The inner loops of training on images in channels_last, on the CPU; see native.py. Compiled once for
each REAL.

A candidate is computed in the backward pass, forward and backward in one go: what is between the two
is in the cache. What needs memory returns whether there was some. */

#include "pool.h"
#include "unit.h"

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
    REAL *memory = room((2 * size + 7 * n) * sizeof(REAL));
    if (!memory) return 0;
    REAL *totals = memory + 2 * size, *products = totals + n, *of_g = products + n;
    REAL *of_x = of_g + n, *constant = of_x + n, *scale = constant + n, *shift = scale + n;
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
