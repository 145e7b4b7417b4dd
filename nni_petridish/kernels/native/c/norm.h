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
