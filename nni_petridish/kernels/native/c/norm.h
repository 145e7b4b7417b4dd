/* Batch norms: their parameters and running statistics. */

#pragma once
#include "sums.h"

/* The parameters of a norm (NULL for one without γ and β) and its running statistics (NULL if not to
be updated). */
typedef struct {
    const REAL *gamma, *beta;
    REAL *dgamma, *dbeta;
    REAL *running_mean, *running_variance;
    long long *batches;
} norm_parameters;

/* The settings of all norms. */
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

/* scale and shift such that the norm of x is scale·x + shift. */
static void norm_forward(REAL *scale, REAL *shift, const norm_parameters *p, norm of) {
    for (long k = 0; k < of.channels; k++) {
        scale[k] = (p->gamma ? p->gamma[k] : 1) * inverse_deviation(of, k);
        shift[k] = (p->beta ? p->beta[k] : 0) - scale[k] * of.mean[k];
    }
}

/* Σ g·x̂, the gradient of α. */
static double correlation(norm of) {
    double sum = 0;
    for (long k = 0; k < of.channels; k++) sum += of.products[k] * inverse_deviation(of, k);
    return sum;
}

/* The norm of a layer whose input x has known moments, with outputs of its forward pass (scale and
shift) and of its backward pass. */
typedef struct {
    norm_parameters own;
    const REAL *mean, *variance;
    long count; /* of values of a channel */
    REAL *scale, *shift;
    REAL *totals, *products; /* Σ g and Σ g·(x − mean), with g the gradient of the norm's output */
    REAL *of_g, *of_x, *constant; /* the gradient of x is this combination of g and x */
} layer_norm;

static norm of_layer(const layer_norm *of, long channels, double eps) {
    return (norm){of->mean, of->variance, of->totals, of->products, eps, of->count, channels};
}

/* Update the running statistics; return scale and shift such that the norm of x is scale·x + shift. */
void norm_affine(const layer_norm *of, long channels, double eps, double momentum) {
    norm known = of_layer(of, channels, eps);
    show(&of->own, known, (settings){eps, momentum});
    norm_forward(of->scale, of->shift, &of->own, known);
}

/* The same, and y = scale·x + shift, plus images to add if given. */
void normalize(
    const layer_norm *of, REAL *y, const REAL *x, const REAL *added, batch b, double eps,
    double momentum
) {
    norm_affine(of, b.channels, eps, momentum);
#pragma omp parallel for num_threads(b.threads) schedule(static)
    for (long p = 0; p < b.images * pixels(b); p++)
        for (long k = 0; k < blocks(b); k++) {
            long first = k * LANES, at = p * b.channels + first, lanes = lanes_of(k, b);
            vec value = load(of->scale + first, lanes) * load(x + at, lanes);
            value += load(of->shift + first, lanes);
            if (added) value += load(added + at, lanes);
            store(y + at, value, lanes);
        }
}

/* The gradients of γ and β, unless NULL, and the coefficients of that of x, from totals and products. */
void norm_gradients(const layer_norm *of, long channels, double eps) {
    norm known = of_layer(of, channels, eps);
    for (long k = 0; of->own.dgamma && k < channels; k++) {
        of->own.dgamma[k] = of->products[k] * inverse_deviation(known, k);
        of->own.dbeta[k] = of->totals[k];
    }
    norm_backward(of->of_g, of->of_x, of->constant, known, of->own.gamma, 1);
}

/* The same from g and x: totals and products are computed. */
int norm_image_gradients(
    const layer_norm *of, const REAL *g, const REAL *x, batch b, double eps
) {
    if (!correlations(of->totals, of->products, g, x, of->mean, b)) return 0;
    norm_gradients(of, b.channels, eps);
    return 1;
}
