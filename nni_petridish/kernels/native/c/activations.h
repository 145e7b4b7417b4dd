/* Activation functions of recurrent nodes, and their slopes. */

#pragma once
#include "images.h"

enum { IDENTITY, RELU, TANH, SIGMOID };

INLINE vec chosen(mask where, vec yes, vec no) {
    return (vec)(((mask)yes & where) | ((mask)no & ~where));
}

/* exp(x) − 1 = 2^n·(exp(r) − 1) + (2^n − 1) with |r| ≤ ln(2)/2, exact to rounding near 0 too. The limit
keeps 2^n finite. */
INLINE vec exponential_minus_one(vec x, REAL limit) {
    const int is_float = sizeof(REAL) == 4;
    const REAL shift = is_float ? 12582912.0 : 6755399441055744.0; /* rounds to whole numbers */
    const REAL high = is_float ? 0.693145751953125 : 6.93147180369123816490e-01;
    const REAL low = is_float ? 1.42860682030941723212e-6 : 1.90821492927058770002e-10;
    x = chosen(x > limit, (vec){0} + limit, x);
    x = chosen(x < -limit, (vec){0} - limit, x);
    vec n = (x * (REAL)1.44269504088896340736 + shift) - shift, r = x - n * high - n * low;
    long degree = is_float ? 7 : 13;
    REAL coefficient = 1;
    for (long k = 2; k <= degree; k++) coefficient /= k;
    vec p = (vec){0} + coefficient;
#pragma GCC unroll 13
    for (long k = degree; k > 1; k--) coefficient *= k, p = p * r + coefficient;
    vec power = (vec)((__builtin_convertvector(n, mask) + (is_float ? 127 : 1023))
        << (is_float ? 23 : 52));
    return power * (p * r) + (power - 1);
}

INLINE vec sigmoid(vec x) {
    return (REAL)1 / (exponential_minus_one(-x, sizeof(REAL) == 4 ? 87 : 700) + 2);
}

INLINE vec hyperbolic_tangent(vec x) {
    vec e = exponential_minus_one(x + x, 40);
    return e / (e + 2);
}

/* f(x); the kind is a constant. */
INLINE vec activated(vec x, long kind) {
    if (kind == RELU) return keep(x, ~(x < (vec){0}));
    if (kind == TANH) return hyperbolic_tangent(x);
    return kind == SIGMOID ? sigmoid(x) : x;
}

/* g·f'(x), given y = f(x). */
INLINE vec times_slope(vec g, vec y, long kind) {
    if (kind == RELU) return keep(g, y > (vec){0});
    if (kind == TANH) return g * (1 - y * y);
    return kind == SIGMOID ? g * y * (1 - y) : g;
}
