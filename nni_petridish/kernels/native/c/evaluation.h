/* Evaluation: h = bias + Σ matrix_t·u_t and out = added + η·h (folding.h) in one pass over the images. The
terms u_t of some rows are laid out side by side and multiplied while they are in the cache. */

#pragma once
#include "folding.h"
#include "unit.h"

/* The input of the second unit. */
INLINE batch middle_of(const term *t, batch out) {
    return (batch){out.images, out.height, out.width, t->channels, out.parts, out.threads};
}

/* Scratch memory of a term: the weights of its units, and frames or pooled columns. */
typedef struct {
    vec *taps[2], *rows, *shift, *frames[2], *row;
    columns from;
} term_workplace;

/* Lay out the workplace in memory and return its size; without memory, the size alone. */
static long term_at(term_workplace *at, vec *memory, const term *t, batch out) {
    batch in = input_of(t, out), middle = middle_of(t, out);
    long n = blocks(in), size = 0;
    at->from = (columns){memory, memory + n * (in.width + 2)};
    if (!t->length) return 2 * n * (in.width + 2);
    for (long i = 0; i < t->length; i++) {
        long area = t->convs[i].kernel * t->convs[i].kernel;
        at->taps[i] = memory + size, size += n * area;
        at->frames[i] = memory + size;
        size += n * frame_in(0, i ? middle : in, t->convs[i]).size;
    }
    if (t->length == 1) return size;
    at->rows = memory + size, size += n * in.channels;
    at->shift = memory + size, size += n;
    at->row = memory + size, size += n * out.width;
    return size;
}

/* Load the weights of the units, and clear the padding of their frames. */
static void prepare_term(const term_workplace *at, const term *t, batch out) {
    batch in = input_of(t, out);
    for (long i = 0; i < t->length; i++) {
        long area = t->convs[i].kernel * t->convs[i].kernel;
        memset(at->taps[i], 0, blocks(in) * area * sizeof(vec));
        load_depthwise(at->taps[i], t->depthwise[i], in, area);
        clear_padding(at->frames[i], i ? middle_of(t, out) : in, t->convs[i]);
    }
    if (t->length < 2) return;
    memset(at->rows, 0, blocks(in) * (in.channels + 1) * sizeof(vec));
    for (long o = 0; o < in.channels; o++) {
        double scale = scale_of(t->norms, o);
        ((REAL *)at->shift)[o] = shift_of(t->norms, o);
        for (long c = 0; c < in.channels; c++)
            ((REAL *)(at->rows + c * blocks(in)))[o] = scale * t->between[o * in.channels + c];
    }
}

/* Bring one image into the frames of the last unit. */
static void fill_frames(const term_workplace *at, const term *t, long image, batch out) {
    batch in = input_of(t, out), middle = middle_of(t, out);
    unit first = {.c = t->convs[0], .x = t->x};
    if (!t->length) return;
    rectify_image(at->frames[0], &first, image, in);
    if (t->length == 1) return;
    long n = blocks(in), area = first.c.kernel * first.c.kernel;
    frame from = frame_in(0, in, first.c), to = frame_in(at->frames[1], middle, t->convs[1]);
    for (long i = 0; i < out.height; i++) {
        for (long k = 0; k < n; k++)
            convolve_row(
                at->row + k, n, at->frames[0] + k * from.size + i * first.c.stride * from.width,
                at->taps[0] + k * area, from, out.width, first.c
            );
        multiply_and_rectify(
            to.inside + i * to.width, 1, to.size, at->row, n, at->rows, at->shift, out.width,
            square(in)
        );
    }
}

INLINE void load_half(
    vec *to, long step, const REAL *x, long row, long parts, long part, batch in, batch out, long k,
    long lanes
) {
    long i = row * parts + part;
    for (long j = 0; j < out.width; j++) {
        long column = j * parts + part;
        vec value = {0};
        if (i < in.height && column < in.width)
            value = load(x + (i * in.width + column) * in.channels + k * LANES, lanes);
        to[j * step] = keep(value, ~(value < (vec){0}));
    }
}

/* The even or the odd pixels of a row of outputs, rectified; or all pixels, if there is one part. */
static void load_part(
    vec *to, long step, const term *t, const REAL *x, long row, long part, batch out
) {
    batch in = input_of(t, out);
    for (long k = 0; k < blocks(in); k++)
        if (lanes_of(k, in) == LANES)
            load_half(to + k, step, x, row, parts_of(t), part, in, out, k, LANES);
        else load_half(to + k, step, x, row, parts_of(t), part, in, out, k, lanes_of(k, in));
}

/* u_t of row i of the outputs of an image. */
static void term_row(
    vec *to, long step, const term_workplace *at, const term *t, long image, long i, batch out
) {
    batch in = input_of(t, out);
    const REAL *x = t->x + image * pixels(in) * in.channels;
    long n = blocks(in), last = t->length - 1;
    if (t->length) {
        conv c = t->convs[last];
        frame f = frame_in(0, last ? middle_of(t, out) : in, c);
        for (long k = 0; k < n; k++)
            convolve_row(
                to + k, step, at->frames[last] + k * f.size + i * c.stride * f.width,
                at->taps[last] + k * c.kernel * c.kernel, f, out.width, c
            );
    } else if (t->kind == NONE)
        for (long k = 0; k < n; k++)
            load_row(to + k, step, x + i * in.width * in.channels, in.width, in, k);
    else if (t->kind == RECTIFIED || t->kind == HALVES)
        for (long part = 0; part < parts_of(t); part++)
            load_part(to + part * n, step, t, x, i, part, out);
    else {
        pool p = {.kind = t->kind, .stride = t->convs[0].stride};
        pool_all_columns(at->from, x, i * p.stride, in);
        for (long k = 0; k < n; k++)
            pooled_row(to + k, step, columns_of(at->from, k, in), &p, i, in);
    }
}

INLINE void finish_block(
    const sum_of_terms *of, const vec *strip, vec bias, REAL eta, long at, long count, batch out,
    long k, long lanes
) {
    for (long j = 0; j < count; j++, at += out.channels) {
        vec h = strip[j * blocks(out) + k] + bias, value = eta * h;
        if (of->h) store(of->h + at, h, lanes);
        if (of->added) value += load(of->added + at, lanes);
        store(of->out + at, value, lanes);
    }
}

/* h and out of some pixels from the first. */
static void finish_strip(
    const sum_of_terms *of, const vec *strip, const vec *bias, long first, long count, batch out
) {
    REAL eta = of->eta ? *of->eta : 1;
    for (long k = 0; k < blocks(out); k++) {
        long at = first * out.channels + k * LANES;
        if (lanes_of(k, out) == LANES)
            finish_block(of, strip, bias[k], eta, at, count, out, k, LANES);
        else finish_block(of, strip, bias[k], eta, at, count, out, k, lanes_of(k, out));
    }
}

INLINE long strip_rows(batch out) { return out.width < STRIP ? STRIP / out.width : 1; }

static void sum_image(
    const sum_of_terms *of, const folding *by, const term_workplace *at, vec *inputs, vec *strip,
    shape s, long image, batch out
) {
    for (long t = 0; t < of->count; t++) fill_frames(at + t, of->terms + t, image, out);
    for (long i = 0; i < out.height; i += strip_rows(out)) {
        long end = i + strip_rows(out) < out.height ? i + strip_rows(out) : out.height;
        long count = (end - i) * out.width;
        vec *to = inputs;
        for (long t = 0; t < of->count; t++) {
            for (long row = i; row < end; row++)
                term_row(
                    to + (row - i) * out.width * s.in_blocks, s.in_blocks, at + t, of->terms + t,
                    image, row, out
                );
            to += term_blocks(of->terms + t, out);
        }
        multiply(strip, s.out_blocks, 1, inputs, s.in_blocks, by->rows, count, s);
        finish_strip(of, strip, by->bias, (image * out.height + i) * out.width, count, out);
    }
}

/* b is the batch of outputs. */
int sum_terms(const sum_of_terms *of, batch b) {
    long in_blocks = 0, own = 0, n = blocks(b);
    for (const term *t = of->terms; t < of->terms + of->count; t++) {
        term_workplace none;
        in_blocks += term_blocks(t, b), own += term_at(&none, 0, t, b);
    }
    long empty = blocks(input_of(of->terms + of->count - 1, b)) * LANES; /* lanes at the end */
    empty -= of->terms[of->count - 1].channels;
    shape s = {in_blocks * LANES - empty, b.channels, in_blocks, n};
    long most = strip_rows(b) * b.width;
    folding by;
    vec *memory = room(folding_at(&by, 0, of, b) * sizeof(vec));
    if (!memory) return 0;
    folding_at(&by, memory, of, b), fold_terms(&by, of, b);
    int enough = 1;
#pragma omp parallel num_threads(b.threads)
    {
        term_workplace at[of->count];
        vec *inputs = own_room((own + most * (in_blocks + n)) * sizeof(vec));
        vec *strip = inputs + most * in_blocks, *next = strip + most * n;
        for (long t = 0; inputs && t < of->count; t++) {
            next += term_at(at + t, next, of->terms + t, b);
            prepare_term(at + t, of->terms + t, b);
        }
        if (!inputs) missing(&enough);
#pragma omp for schedule(static)
        for (long image = 0; image < b.images; image++)
            if (inputs) sum_image(of, &by, at, inputs, strip, s, image, b);
    }
    free(memory);
    return enough;
}
