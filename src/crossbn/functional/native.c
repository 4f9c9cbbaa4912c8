/* The small work of a training step, one call for each of its parts, on the CPU.
 *
 * Every function has a twin written with torch's operators; `native.py` says which and calls it instead where this file
 * was not compiled. Arrays are dense, in C order, but for the batch stride of x and y. n images, c channels, s
 * positions of an image, r remembered steps, i numbers of a patch. Loops over channels run on `threads` threads; each
 * channel is one thread's, so results do not depend on their number.
 *
 * The file includes itself, once for each type of numbers.
 */
#ifndef REAL

/* Python may import the library, though ctypes alone uses it; its headers are not needed for that. */
#if defined(__has_include)
#if __has_include(<Python.h>)
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "See native.py.", -1, 0, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
#endif
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Raised whenever an argument changes: a library compiled from an older file is not used. */
int crossbn_interface(void) { return 4; }

/* Two versions of the loops, chosen when the library is loaded: for processors with AVX2, and for all. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FAST
#endif

/* An operator at one size of its input and output: what does not change from step to step. */
struct site {
    int64_t n, c, s;              /* of the output */
    int64_t y_channels, size[3];  /* of the input */
    int64_t groups, k[3];         /* of the operator: taps along each dimension */
    const void *often[3];         /* how often each tap reads each index, per position: [size, k], the last [k, size] */
    int64_t amount, jump;         /* positions to look at, m, and how far apart they are (see sensitivity.py) */
    const int64_t *tap;           /* the inputs that each position reads; null: the one at its own place */
    const uint8_t *inside;        /* which of them count; null: all */
};

/* Threads for work of that size, of those that there are. */
static int worth(int threads, int64_t numbers) { return numbers < 32768 ? 1 : threads; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#define REAL float
#define NAME(name) name##_float32
#include "native.c"
#undef REAL
#undef NAME
#define REAL double
#define NAME(name) name##_float64
#include "native.c"

#else

typedef const REAL *restrict NAME(in);
typedef REAL *restrict NAME(out);
#define IN NAME(in)
#define OUT NAME(out)
#define BLOCK 1024 /* numbers added in their own type before the sum goes on in double */
#define MOST_STEPS 64
#define WIDE 16 /* channels whose samples are looked at together */
/* Products of rows with weights: ROWS by CHANNELS sums are kept in registers, SECTION numbers of a row at a time. */
#define ROWS 3
#define CHANNELS 4
#define SECTION 1024
#define MOST_ROWS 256 /* of a panel, see `spread` */
#define PANEL 16384
#define LANES (32 / (int64_t)sizeof(REAL))
typedef REAL NAME(lanes) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(lanes)

FAST static double NAME(sum)(IN x, int64_t s) {
    double total = 0;
    for (int64_t start = 0; start < s; start += BLOCK) {
        int64_t stop = start + BLOCK < s ? start + BLOCK : s;
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t p = start; p < stop; p++) part += x[p];
        total += part;
    }
    return total;
}

FAST static double NAME(sum_of_squares)(IN x, REAL mean, int64_t s) {
    double total = 0;
    for (int64_t start = 0; start < s; start += BLOCK) {
        int64_t stop = start + BLOCK < s ? start + BLOCK : s;
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t p = start; p < stop; p++) part += (x[p] - mean) * (x[p] - mean);
        total += part;
    }
    return total;
}

/* Add to sum(g) and sum(g (x - mean)). */
FAST static void NAME(add_sums)(IN grad, IN x, REAL mean, int64_t s, double *sum_grad, double *sum_product) {
    for (int64_t start = 0; start < s; start += BLOCK) {
        int64_t stop = start + BLOCK < s ? start + BLOCK : s;
        REAL part = 0, product = 0;
#pragma omp simd reduction(+ : part, product)
        for (int64_t p = start; p < stop; p++) {
            part += grad[p];
            product += grad[p] * (x[p] - mean);
        }
        *sum_grad += part;
        *sum_product += product;
    }
}

FAST static void NAME(combine)(IN grad, IN x, REAL scale, REAL slope, REAL mean, REAL level, int64_t s, OUT dx) {
    for (int64_t p = 0; p < s; p++) dx[p] = scale * grad[p] - slope * (x[p] - mean) - level;
}

FAST static void NAME(scale)(IN x, REAL factor, REAL offset, int64_t s, OUT y) {
    for (int64_t p = 0; p < s; p++) y[p] = factor * x[p] + offset;
}

FAST static void NAME(add_multiple)(IN x, REAL factor, int64_t size, OUT result) {
    for (int64_t p = 0; p < size; p++) result[p] += factor * x[p];
}

/* Add to `product` the products of `rows` rows with `channels` weights, both known where this is called. */
static inline __attribute__((always_inline)) void NAME(add_dots)(const int rows, IN row, int64_t row_stride,
                                                                 const int channels, IN weight, int64_t weight_stride,
                                                                 int64_t size, OUT product, int64_t stride) {
    VECTOR sums[ROWS][CHANNELS];
    int64_t p = 0;
    for (int q = 0; q < rows; q++)
        for (int j = 0; j < channels; j++) sums[q][j] = (VECTOR){0};
    for (; p + LANES <= size; p += LANES)
        for (int j = 0; j < channels; j++) {
            const VECTOR value = *(const VECTOR *)(weight + j * weight_stride + p);
            for (int q = 0; q < rows; q++) sums[q][j] += value * *(const VECTOR *)(row + q * row_stride + p);
        }
    for (int q = 0; q < rows; q++)
        for (int j = 0; j < channels; j++) {
            REAL total = 0;
            for (int64_t lane = 0; lane < LANES; lane++) total += sums[q][j][lane];
            for (int64_t rest = p; rest < size; rest++)
                total += weight[j * weight_stride + rest] * row[q * row_stride + rest];
            product[q * stride + j] += total;
        }
}

/* <row, W> [count, c] of the channels from `start` to `stop`; rows are [count, groups, i], weights [c, i]. */
FAST static void NAME(project)(IN rows, int64_t count, int64_t groups, int64_t i, IN weight, int64_t c, int64_t start,
                               int64_t stop, OUT product) {
    const int64_t stride = groups * i, of_group = c / groups;
    for (int64_t q = 0; q < count; q++) memset(product + q * c + start, 0, (size_t)(stop - start) * sizeof(REAL));
    for (int64_t from = 0; from < i; from += SECTION) {
        const int64_t size = least(SECTION, i - from);
        for (int64_t j = start, wide; j < stop; j += wide) {
            const int64_t group = j / of_group;
            IN row = rows + group * i + from, mine = weight + j * i + from;
            int64_t q = 0;
            wide = least(stop, (group + 1) * of_group) - j >= CHANNELS ? CHANNELS : 1;
            if (wide == CHANNELS) {
                for (; q + ROWS <= count; q += ROWS)
                    NAME(add_dots)(ROWS, row + q * stride, stride, CHANNELS, mine, i, size, product + q * c + j, c);
                for (; q < count; q++)
                    NAME(add_dots)(1, row + q * stride, stride, CHANNELS, mine, i, size, product + q * c + j, c);
            } else
                for (; q < count; q++)
                    NAME(add_dots)(1, row + q * stride, stride, 1, mine, i, size, product + q * c + j, c);
        }
    }
}

/* Add CHANNELS coefficients [count, CHANNELS] times rows to `result`. The rows lie in a panel, [., count, 2 LANES]. */
FAST static void NAME(add_panel)(IN coefficient, int64_t count, IN panel, int64_t size, OUT result, int64_t stride) {
    for (int64_t p = 0; p < size; p += 2 * LANES) {
        VECTOR sums[CHANNELS][2];
        for (int j = 0; j < CHANNELS; j++)
            for (int half = 0; half < 2; half++)
                sums[j][half] = *(const VECTOR *)(result + j * stride + p + half * LANES);
        for (int64_t q = 0; q < count; q++) {
            IN row = panel + p * count + q * 2 * LANES;
            const VECTOR first = *(const VECTOR *)row, second = *(const VECTOR *)(row + LANES);
            for (int j = 0; j < CHANNELS; j++) {
                sums[j][0] += coefficient[q * CHANNELS + j] * first;
                sums[j][1] += coefficient[q * CHANNELS + j] * second;
            }
        }
        for (int j = 0; j < CHANNELS; j++)
            for (int half = 0; half < 2; half++) *(VECTOR *)(result + j * stride + p + half * LANES) = sums[j][half];
    }
}

/* Add rows [count, groups, i] times their coefficients [count, c] to the channels of a group from `start` to `stop` of
 * `result` [c, i]. Rows far apart would push each other out of the cache: a section of them is put together first. */
static void NAME(spread)(IN rows, int64_t count, int64_t groups, int64_t i, IN coefficient, int64_t c, int64_t start,
                         int64_t stop, OUT result) {
    REAL panel[PANEL], some[MOST_ROWS * CHANNELS];
    IN group = rows + start / (c / groups) * i;
    const int64_t stride = groups * i, whole = i / (2 * LANES) * 2 * LANES;
    const int64_t paired = start + (stop - start) / CHANNELS * CHANNELS;
    for (int64_t first = 0; first < count; first += MOST_ROWS) {
        const int64_t part = least(MOST_ROWS, count - first), section = PANEL / part / (2 * LANES) * 2 * LANES;
        IN begin = group + first * stride, mine = coefficient + first * c;
        for (int64_t from = 0; from < whole; from += section) {
            const int64_t size = least(section, whole - from);
            for (int64_t p = 0; p < size && paired > start; p += 2 * LANES)
                for (int64_t q = 0; q < part; q++)
                    memcpy(panel + p * part + q * 2 * LANES, begin + q * stride + from + p, 2 * LANES * sizeof(REAL));
            for (int64_t j = start; j < paired; j += CHANNELS) {
                for (int64_t q = 0; q < part; q++)
                    memcpy(some + q * CHANNELS, mine + q * c + j, CHANNELS * sizeof(REAL));
                NAME(add_panel)(some, part, panel, size, result + j * i + from, i);
            }
        }
        for (int64_t j = start; j < stop; j++) {
            const int64_t done = j < paired ? whole : 0;
            for (int64_t q = 0; q < part; q++)
                NAME(add_multiple)(begin + q * stride + done, mine[q * c + j], i - done, result + j * i + done);
        }
    }
}

/* The same for all channels. */
static void NAME(spread_all)(IN rows, int64_t count, int64_t groups, int64_t i, IN coefficient, int64_t c, OUT result,
                             int threads) {
    /* A thread has whole groups or, of a single one, a share of its channels. */
    const int64_t parts = groups > 1 ? groups : threads, one = groups > 1 ? 1 : CHANNELS, blocks = c / one;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++)
        NAME(spread)(rows, count, groups, i, coefficient, c, blocks * part / parts * one,
                     part + 1 < parts ? blocks * (part + 1) / parts * one : c, result);
}

/* Mean and, unless null, biased variance of a channel. */
static void NAME(moments_of)(IN x, int64_t n, int64_t s, int64_t batch_stride, OUT mean, OUT var) {
    double total = 0, squares = 0;
    for (int64_t b = 0; b < n; b++) total += NAME(sum)(x + b * batch_stride, s);
    *mean = (REAL)(total / (double)(n * s));
    if (var == 0) return;
    for (int64_t b = 0; b < n; b++) squares += NAME(sum_of_squares)(x + b * batch_stride, *mean, s);
    *var = (REAL)(squares / (double)(n * s));
}

/* The same of each channel. */
void NAME(moments)(IN x, int64_t n, int64_t c, int64_t s, int64_t batch_stride, OUT mean, OUT var, int threads) {
    threads = worth(threads, n * c * s);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < c; j++)
        NAME(moments_of)(x + j * s, n, s, batch_stride, mean + j, var == 0 ? 0 : var + j);
}

/* A batch to be normalized: the input, today's moments, the pooled ones, and the output. Without the output nothing is
 * normalized and no running statistics move; without gamma and beta they are 1 and 0. */
struct NAME(batch) {
    const REAL *x;
    int64_t n, c, s, x_stride, known; /* whether today's moments are */
    REAL *today_mean, *today_var, *mean, *var;
    const REAL *gamma, *beta;
    double eps;
    const REAL *votes; /* of the remembered steps, today's being 1; null: all are 1 */
    REAL *y;
    double bessel, momentum; /* the pooled variance times `bessel` is unbiased */
    REAL *running_mean, *running_var;
    int64_t *tracked; /* steps that the running statistics have seen */
};

static void NAME(find_moments)(const struct NAME(batch) *batch, int64_t j) {
    if (!batch->known)
        NAME(moments_of)(batch->x + j * batch->s, batch->n, batch->s, batch->x_stride, batch->today_mean + j,
                         batch->today_var + j);
}

/* Normalize a channel, which its moments have just brought near. */
static void NAME(normalize)(const struct NAME(batch) *batch, int64_t j) {
    if (batch->y == 0) return;
    const double gamma = batch->gamma == 0 ? 1 : batch->gamma[j], beta = batch->beta == 0 ? 0 : batch->beta[j];
    const REAL factor = (REAL)(gamma / sqrt((double)batch->var[j] + batch->eps));
    const REAL offset = (REAL)(beta - (double)batch->mean[j] * factor);
    for (int64_t b = 0; b < batch->n; b++)
        NAME(scale)(batch->x + b * batch->x_stride + j * batch->s, factor, offset, batch->s,
                    batch->y + (b * batch->c + j) * batch->s);
}

/* BatchNorm's backward with its two corrections scaled by `share` (one number, or one for each channel):
 * dx, the gradients of gamma and beta, and those of the pooled mean and variance. */
void NAME(blend)(IN grad, IN x, int64_t n, int64_t c, int64_t s, IN mean, IN var, double eps, IN share,
                 int64_t share_stride, IN gamma, OUT dx, OUT grad_gamma, OUT grad_beta, OUT grad_mean, OUT grad_var,
                 int threads) {
    threads = worth(threads, n * c * s);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < c; j++) {
        const REAL centre = mean[j], invstd = (REAL)(1 / sqrt((double)var[j] + eps)), scale = gamma[j] * invstd;
        double sum_grad = 0, sum_product = 0;
        for (int64_t place = j * s; place < n * c * s; place += c * s)
            NAME(add_sums)(grad + place, x + place, centre, s, &sum_grad, &sum_product);
        const double own = share[j * share_stride] / (double)(n * s);
        const REAL slope = (REAL)(own * scale * invstd * invstd * sum_product), level = (REAL)(own * scale * sum_grad);
        for (int64_t place = j * s; place < n * c * s; place += c * s)
            NAME(combine)(grad + place, x + place, scale, slope, centre, level, s, dx + place);
        grad_beta[j] = (REAL)sum_grad;
        grad_gamma[j] = (REAL)(invstd * sum_product);
        grad_mean[j] = (REAL)(-scale * sum_grad);
        grad_var[j] = (REAL)(-0.5 * scale * invstd * grad_gamma[j]);
    }
}

/* Of one channel: rows are summed over the batch, then added up with the weights of the first two dimensions, then of
 * the third. Most rows have the weights of the middle one, with stride 1 all but those at the edge: only the others are
 * looked at again for each tap. */
FAST static void NAME(tap_means_of)(IN y, int64_t n, int64_t batch_stride, const int64_t *size, const int64_t *k,
                                    IN often0, IN often1, IN often2_by_tap, OUT scratch, OUT result) {
    const int64_t width = size[2], outer = k[0] * k[1], middle = size[0] / 2 * k[0], centre = size[1] / 2 * k[1];
    OUT row = scratch + outer * width, total = row + width;
    memset(scratch, 0, (size_t)((outer + 2) * width) * sizeof(REAL));
    for (int64_t place = 0; place < size[0] * size[1]; place++) {
        IN values = y + place * width;
        IN first = often0 + place / size[1] * k[0], second = often1 + place % size[1] * k[1];
        for (int64_t p = 0; p < width; p++) row[p] = values[p];
        for (int64_t b = 1; b < n; b++)
            for (int64_t p = 0; p < width; p++) row[p] += values[b * batch_stride + p];
        for (int64_t p = 0; p < width; p++) total[p] += row[p];
        for (int64_t t = 0; t < outer; t++) {
            const REAL usual = often0[middle + t / k[1]] * often1[centre + t % k[1]];
            const REAL excess = first[t / k[1]] * second[t % k[1]] - usual;
            OUT sum = scratch + t * width;
            if (excess != 0)
                for (int64_t p = 0; p < width; p++) sum[p] += excess * row[p];
        }
    }
    for (int64_t t = 0; t < outer; t++) {
        const REAL usual = often0[middle + t / k[1]] * often1[centre + t % k[1]];
        OUT sum = scratch + t * width;
        for (int64_t p = 0; p < width; p++) sum[p] += usual * total[p];
        for (int64_t t2 = 0; t2 < k[2]; t2++) {
            REAL mean = 0;
#pragma omp simd reduction(+ : mean)
            for (int64_t p = 0; p < width; p++) mean += sum[p] * often2_by_tap[t2 * width + p];
            result[t * k[2] + t2] = mean;
        }
    }
}

/* What each kernel tap reads on average, [channels, k0 k1 k2]. `scratch` has (k0 k1 + 2) rows for each thread. */
static void NAME(tap_means)(const struct site *site, IN y, int64_t y_stride, OUT scratch, OUT result, int threads) {
    const int64_t *size = site->size, *k = site->k, channels = site->y_channels;
    const int64_t taps = k[0] * k[1] * k[2], space = size[0] * size[1] * size[2], own = (k[0] * k[1] + 2) * size[2];
    threads = worth(threads, site->n * channels * space);
    if (site->tap == 0) {
        NAME(moments)(y, site->n, channels, space, y_stride, result, 0, threads);
        return;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t part = 0; part < threads; part++)
        for (int64_t j = channels * part / threads; j < channels * (part + 1) / threads; j++)
            NAME(tap_means_of)(y + j * space, site->n, y_stride, size, k, site->often[0], site->often[1],
                               site->often[2], scratch + part * own, result + j * taps);
}

/* Look at the next m positions from the one numbered `start`: write the outputs less their mean and the same times
 * 2 / m, both [m, c], and the patches less the mean patch, [m, channels of y * taps]. */
static void NAME(gather)(const struct site *site, int64_t start, IN x, int64_t x_stride, IN y, int64_t y_stride,
                         IN mean, IN mean_patch, OUT centred, OUT scaled, OUT patches, int threads) {
    const int64_t m = site->amount, c = site->c;
    const int64_t taps = site->k[0] * site->k[1] * site->k[2], y_space = site->size[0] * site->size[1] * site->size[2];
    const REAL factor = (REAL)(2.0 / (double)m);
    threads = worth(threads, m * (c + site->y_channels * taps));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < m; p++) {
        const int64_t index = (start + p) * site->jump % (site->n * site->s);
        const int64_t image = index / site->s, place = index % site->s;
        const int64_t *tap = site->tap == 0 ? &place : site->tap + place * taps;
        const uint8_t *inside = site->inside == 0 ? 0 : site->inside + place * taps;
        IN from = x + image * x_stride + place, input = y + image * y_stride;
        OUT patch = patches + p * site->y_channels * taps;
        for (int64_t j = 0; j < c; j++) {
            centred[p * c + j] = from[j * site->s] - mean[j];
            scaled[p * c + j] = factor * centred[p * c + j];
        }
        for (int64_t j = 0; j < site->y_channels; j++)
            for (int64_t t = 0; t < taps; t++)
                patch[j * taps + t] =
                    (inside == 0 || inside[t] ? input[j * y_space + tap[t]] : 0) - mean_patch[j * taps + t];
    }
}

/* Pool a channel's moments with the remembered ones at today's weights, each step with its vote (see pooling.py).
 * `own` becomes d var / d past var, `towards` the coefficient of the mean patches in d var / dW. */
static void NAME(pool)(const struct NAME(batch) *batch, int64_t j, int64_t r, IN past_mean, IN past_var,
                       const REAL *shift, const REAL *slope, REAL *own, REAL *towards) {
    const int64_t c = batch->c;
    const REAL today = batch->today_mean[j];
    REAL moved[MOST_STEPS], votes[MOST_STEPS], all = 1, centre = today;
    for (int64_t t = 0; t < r; t++) {
        moved[t] = past_mean[t * c + j] + shift[t];
        votes[t] = batch->votes == 0 ? 1 : batch->votes[t];
        all += votes[t];
        centre += votes[t] * moved[t];
    }
    const REAL share = 1 / all;
    centre *= share;
    REAL total = batch->today_var[j] + (today - centre) * (today - centre);
    for (int64_t t = 0; t < r; t++) {
        const REAL deviation = moved[t] - centre;
        const REAL past = past_var[t * c + j] + slope[t] - shift[t] * shift[t];
        own[t] = past >= 0 ? share * votes[t] : 0;
        total += votes[t] * ((past >= 0 ? past : 0) + deviation * deviation);
        towards[t] = 2 * share * votes[t] * deviation - 2 * own[t] * shift[t];
    }
    batch->mean[j] = centre;
    batch->var[j] = total * share;
}

static int NAME(is_finite)(IN x, int64_t size) {
    for (int64_t p = 0; p < size; p++)
        if (!isfinite(x[p])) return 0;
    return 1;
}

/* What is remembered, and what a step leaves for its backward. Rings have a dimension of slots before those that are
 * said here; the first r slots are filled. */
struct NAME(memory) {
    int64_t r, m, groups, i; /* m rows [groups, i] of a step, the mean patch and, as samples, others */
    int64_t slot, start;     /* where to remember today's step, below 0: nowhere; which position to look at first */
    const REAL *weight, *y;  /* of the operator, [c, i], and its input */
    int64_t y_stride;
    REAL *mean, *var, *count;   /* rings: [c], [c], [] */
    REAL *rows, *at, *centred;  /* rings: [m, groups, i], <row, W> [m, c], as samples 2 (x - mean) / P [m, c] */
    REAL *var_grad, *var_at;    /* rings, as gradients: [c, i] and <var_grad, W> [c] */
    int64_t *pushed;            /* steps remembered */
    REAL *kept, *coefficient;   /* out: the rows, and their coefficients in d var / dW [r, m, c] */
    REAL *rest;                 /* out, as gradients: the rest of d var / dW [c, i] */
    REAL *scratch, *samples;    /* room for `find_mean_patch` and, as gradients, for patches and outputs */
};

/* The channels from `start` on, `width` of them, from samples: the products of the rows with today's weights are in
 * `coefficient` and give way to it. */
FAST static void NAME(pool_samples_of)(const struct NAME(batch) *batch, const struct NAME(memory) *memory,
                                       int64_t start, int64_t width) {
    const int64_t c = batch->c, r = memory->r, m = memory->m;
    IN at = memory->at, centred = memory->centred;
    OUT product = memory->coefficient;
    REAL slopes[WIDE][MOST_STEPS], owns[MOST_STEPS][WIDE];
    for (int64_t t = 0; t < r; t++) {
        REAL slope[WIDE] = {0};
        for (int64_t q = 1; q < m; q++) {
            const int64_t place = (t * m + q) * c + start;
            for (int64_t j = 0; j < width; j++) slope[j] += centred[place + j] * (product[place + j] - at[place + j]);
        }
        for (int64_t j = 0; j < width; j++) slopes[j][t] = slope[j];
    }
    for (int64_t j = 0; j < width; j++) {
        REAL shift[MOST_STEPS], own[MOST_STEPS], towards[MOST_STEPS];
        for (int64_t t = 0; t < r; t++) {
            const int64_t place = t * m * c + start + j;
            shift[t] = product[place] - at[place];
        }
        NAME(pool)(batch, start + j, r, memory->mean, memory->var, shift, slopes[j], own, towards);
        for (int64_t t = 0; t < r; t++) {
            owns[t][j] = own[t];
            product[t * m * c + start + j] = towards[t];
        }
    }
    for (int64_t t = 0; t < r; t++)
        for (int64_t q = 1; q < m; q++) {
            const int64_t place = (t * m + q) * c + start;
            for (int64_t j = 0; j < width; j++) product[place + j] = owns[t][j] * centred[place + j];
        }
}

/* A channel from gradients: of the mean [r, groups, i] and of the variance [r, c, i]. */
FAST static void NAME(pool_gradients_of)(const struct NAME(batch) *batch, const struct NAME(memory) *memory,
                                         int64_t j) {
    const int64_t c = batch->c, r = memory->r, groups = memory->groups, i = memory->i;
    IN mean_grad = memory->rows, var_grad = memory->var_grad, mean_at = memory->at, var_at = memory->var_at;
    IN weight = memory->weight;
    OUT jacobian = memory->rest, towards = memory->coefficient;
    REAL shift[MOST_STEPS], slope[MOST_STEPS], own[MOST_STEPS], toward[MOST_STEPS];
    for (int64_t t = 0; t < r; t++) {
        IN patch = mean_grad + (t * groups + j / (c / groups)) * i, grad = var_grad + (t * c + j) * i;
        REAL moved = 0, sloped = 0;
#pragma omp simd reduction(+ : moved, sloped)
        for (int64_t p = 0; p < i; p++) {
            moved += patch[p] * weight[j * i + p];
            sloped += grad[p] * weight[j * i + p];
        }
        shift[t] = moved - mean_at[t * c + j];
        slope[t] = sloped - var_at[t * c + j];
    }
    NAME(pool)(batch, j, r, memory->mean, memory->var, shift, slope, own, toward);
    for (int64_t p = 0; p < i; p++) jacobian[j * i + p] = own[0] * var_grad[j * i + p];
    for (int64_t t = 1; t < r; t++)
        for (int64_t p = 0; p < i; p++) jacobian[j * i + p] += own[t] * var_grad[(t * c + j) * i + p];
    for (int64_t t = 0; t < r; t++) towards[t * c + j] = toward[t];
}

/* The mean patch, written to `scratch`, behind it as much room as it takes; 0 if it is not finite. */
static int NAME(find_mean_patch)(const struct site *site, IN y, int64_t y_stride, OUT scratch, int threads) {
    const int64_t size = site->y_channels * site->k[0] * site->k[1] * site->k[2];
    NAME(tap_means)(site, y, y_stride, scratch + size, scratch, threads);
    return NAME(is_finite)(scratch, size);
}

/* Write what both forms have to its place. */
static void NAME(remember)(const struct site *site, const struct NAME(batch) *batch,
                           const struct NAME(memory) *memory) {
    const int64_t c = site->c, row = memory->groups * memory->i, first = memory->slot * memory->m;
    memcpy(memory->rows + first * row, memory->scratch, (size_t)row * sizeof(REAL));
    memcpy(memory->at + first * c, batch->today_mean, (size_t)c * sizeof(REAL));
    memcpy(memory->mean + memory->slot * c, batch->today_mean, (size_t)c * sizeof(REAL));
    memcpy(memory->var + memory->slot * c, batch->today_var, (size_t)c * sizeof(REAL));
    memory->count[memory->slot] = (REAL)(site->n * site->s);
    *memory->pushed += 1;
}

/* Remember a step as samples: the mean patch and a few others, what the weights made of them, 2 (x - mean) / P. */
static void NAME(remember_samples)(const struct site *site, const struct NAME(batch) *batch,
                                   const struct NAME(memory) *memory, int threads) {
    const int64_t c = site->c, row = memory->groups * memory->i, first = memory->slot * memory->m + 1;
    if (!NAME(find_mean_patch)(site, memory->y, memory->y_stride, memory->scratch, threads)) return;
    OUT centred = memory->centred + first * c;
    NAME(gather)(site, memory->start, batch->x, batch->x_stride, memory->y, memory->y_stride, batch->today_mean,
                 memory->scratch, memory->at + first * c, centred, memory->rows + first * row, threads);
    /* so that old rows add nothing */
    memset(centred + site->amount * c, 0, (size_t)((memory->m - 1 - site->amount) * c) * sizeof(REAL));
    NAME(remember)(site, batch, memory);
}

FAST static void NAME(add_products)(IN a, IN b, int64_t size, OUT result) {
    for (int64_t p = 0; p < size; p++) result[p] += a[p] * b[p];
}

/* Remember a step as gradients of the mean [groups, i] and of the variance [c, i], and their products with the weights
 * [c]. */
static void NAME(remember_gradients)(const struct site *site, const struct NAME(batch) *batch,
                                     const struct NAME(memory) *memory, int threads) {
    const int64_t c = site->c, amount = site->amount, groups = memory->groups, i = memory->i;
    OUT centred = memory->samples, scaled = centred + amount * c, patches = scaled + amount * c;
    OUT var_at = memory->var_at + memory->slot * c, var_grad = memory->var_grad + memory->slot * c * i;
    if (!NAME(find_mean_patch)(site, memory->y, memory->y_stride, memory->scratch, threads)) return;
    NAME(gather)(site, memory->start, batch->x, batch->x_stride, memory->y, memory->y_stride, batch->today_mean,
                 memory->scratch, centred, scaled, patches, threads);
    memset(var_at, 0, (size_t)c * sizeof(REAL));
    for (int64_t p = 0; p < amount; p++) NAME(add_products)(centred + p * c, scaled + p * c, c, var_at);
    memset(var_grad, 0, (size_t)(c * i) * sizeof(REAL));
    NAME(spread_all)(patches, amount, groups, i, scaled, c, var_grad, worth(threads, amount * c * i));
    NAME(remember)(site, batch, memory);
}

/* Move the running statistics; `bessel` times the variance is unbiased. */
FAST void NAME(move_running)(int64_t c, IN mean, IN var, double bessel, double momentum, OUT running_mean,
                             OUT running_var) {
    const REAL step = (REAL)momentum, unbiased = (REAL)bessel;
    for (int64_t j = 0; j < c; j++) {
        running_mean[j] += step * (mean[j] - running_mean[j]);
        running_var[j] += step * (var[j] * unbiased - running_var[j]);
    }
}

int NAME(all_finite)(IN x, int64_t size) { return NAME(is_finite)(x, size); }

/* A training step of a norm: find today's moments, pool them with the remembered ones at today's weights, normalize,
 * move the running statistics, and remember the step, as samples or as gradients. Returns 0 if today's moments are not
 * finite: then nothing that was written counts, and what is remembered has not been touched. A step whose input is not
 * finite is not remembered. */
int NAME(step)(const struct NAME(batch) *batch, const struct NAME(memory) *memory, const struct site *site,
               int threads) {
    const int64_t c = batch->c, r = memory->r, m = memory->m, groups = memory->groups, i = memory->i;
    const int sampled = memory->centred != 0, parts = worth(threads, (r * m * i + batch->n * batch->s) * c);
    memcpy(memory->kept, memory->rows, (size_t)(r * m * groups * i) * sizeof(REAL));
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int part = 0; part < parts; part++) {
        const int64_t begin = c * part / parts, end = c * (part + 1) / parts;
        if (sampled) NAME(project)(memory->rows, r * m, groups, i, memory->weight, c, begin, end, memory->coefficient);
        for (int64_t start = begin; start < end; start += WIDE) {
            const int64_t stop = least(start + WIDE, end);
            for (int64_t j = start; j < stop; j++) NAME(find_moments)(batch, j);
            if (sampled) NAME(pool_samples_of)(batch, memory, start, stop - start);
            for (int64_t j = start; j < stop; j++) {
                if (!sampled) NAME(pool_gradients_of)(batch, memory, j);
                NAME(normalize)(batch, j);
            }
        }
    }
    if (!NAME(is_finite)(batch->today_var, c)) return 0;
    if (batch->running_mean != 0) {
        NAME(move_running)(c, batch->mean, batch->var, batch->bessel, batch->momentum, batch->running_mean,
                           batch->running_var);
        *batch->tracked += 1;
    }
    if (memory->slot >= 0 && sampled) NAME(remember_samples)(site, batch, memory, threads);
    if (memory->slot >= 0 && !sampled) NAME(remember_gradients)(site, batch, memory, threads);
    return 1;
}

/* Coefficients of the rows in dL/dW, [r, m, c], from those in d var / dW and, of a step's first row, in d mean / dW. */
FAST static void NAME(coefficients)(int64_t r, int64_t m, int64_t c, IN of_var, IN of_mean, int64_t step_stride,
                                    int64_t channel_stride, IN grad_mean, IN grad_var, OUT result) {
    for (int64_t row = 0; row < r * m; row++)
        for (int64_t j = 0; j < c; j++) result[row * c + j] = of_var[row * c + j] * grad_var[j];
    for (int64_t t = 0; t < r; t++)
        for (int64_t j = 0; j < c; j++)
            result[t * m * c + j] += of_mean[t * step_stride + j * channel_stride] * grad_mean[j];
}

/* Add dL/dW to `grad` [c, i]: rows [r, m, groups, i] times their coefficients, for which there is `scratch` [r, m, c],
 * and what is left of d var / dW, unless null. */
void NAME(add_gradient)(int64_t r, int64_t m, int64_t c, int64_t groups, int64_t i, IN rows, IN of_var, IN of_mean,
                        int64_t step_stride, int64_t channel_stride, IN rest, IN grad_mean, IN grad_var, OUT scratch,
                        OUT grad, int threads) {
    threads = worth(threads, (r * m + 1) * c * i);
    NAME(coefficients)(r, m, c, of_var, of_mean, step_stride, channel_stride, grad_mean, grad_var, scratch);
    if (rest != 0) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t j = 0; j < c; j++) NAME(add_multiple)(rest + j * i, grad_var[j], i, grad + j * i);
    }
    NAME(spread_all)(rows, r * m, groups, i, scratch, c, grad, threads);
}

#undef IN
#undef OUT
#undef BLOCK
#undef MOST_STEPS
#undef WIDE
#undef ROWS
#undef CHANNELS
#undef SECTION
#undef MOST_ROWS
#undef PANEL
#undef LANES
#undef VECTOR
#endif
