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
int crossbn_interface(void) { return 3; }

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

/* A batch to be normalized: the input, today's moments, the pooled ones, and the output. Without the input the moments
 * are known, without the output nothing is normalized; without gamma and beta they are 1 and 0. */
struct NAME(batch) {
    const REAL *x;
    int64_t n, c, s, x_stride;
    REAL *today_mean, *today_var, *mean, *var;
    const REAL *gamma, *beta;
    double eps;
    const REAL *votes; /* of the remembered steps, today's being 1; null: all are 1 */
    REAL *y;
};

static void NAME(find_moments)(const struct NAME(batch) *batch, int64_t j) {
    if (batch->x != 0)
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

/* The channels from `start` on, `width` of them, of `pool_samples`. */
FAST static void NAME(pool_samples_of)(const struct NAME(batch) *batch, int64_t start, int64_t width, int64_t r,
                                       int64_t m, IN past_mean, IN past_var, OUT product, IN at, IN centred) {
    const int64_t c = batch->c;
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
        NAME(pool)(batch, start + j, r, past_mean, past_var, shift, slopes[j], own, towards);
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

/* Pool and normalize, from samples: `product` [r, m, c] is <row, W> at today's weights, `at` what it was; the first row
 * of a step is the mean patch. It is overwritten with the coefficients of the rows in d var / dW. Returns whether
 * today's moments are finite; if not, nothing that was written counts. */
int NAME(pool_samples)(const struct NAME(batch) *batch, int64_t r, int64_t m, IN past_mean, IN past_var, OUT product,
                       IN at, IN centred, int threads) {
    const int64_t c = batch->c;
    threads = worth(threads, (batch->x == 0 ? r * m : batch->n * batch->s) * c);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t start = 0; start < c; start += WIDE) {
        const int64_t width = start + WIDE < c ? WIDE : c - start;
        for (int64_t j = start; j < start + width; j++) NAME(find_moments)(batch, j);
        NAME(pool_samples_of)(batch, start, width, r, m, past_mean, past_var, product, at, centred);
        for (int64_t j = start; j < start + width; j++) NAME(normalize)(batch, j);
    }
    return NAME(is_finite)(batch->today_var, c);
}

FAST static void NAME(pool_gradients_of)(const struct NAME(batch) *batch, int64_t j, int64_t r, int64_t groups,
                                         int64_t i, IN weight, IN past_mean, IN past_var, IN mean_grad, IN var_grad,
                                         IN mean_at, IN var_at, OUT towards, OUT jacobian) {
    const int64_t c = batch->c;
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
    NAME(pool)(batch, j, r, past_mean, past_var, shift, slope, own, toward);
    for (int64_t p = 0; p < i; p++) jacobian[j * i + p] = own[0] * var_grad[j * i + p];
    for (int64_t t = 1; t < r; t++)
        for (int64_t p = 0; p < i; p++) jacobian[j * i + p] += own[t] * var_grad[(t * c + j) * i + p];
    for (int64_t t = 0; t < r; t++) towards[t * c + j] = toward[t];
}

/* The same from gradients: of the mean [r, groups, i] and of the variance [r, c, i]. `towards` [r, c] are the
 * coefficients of the mean patches in d var / dW, `jacobian` [c, i] is the rest of it. */
int NAME(pool_gradients)(const struct NAME(batch) *batch, int64_t r, int64_t groups, int64_t i, IN weight,
                         IN past_mean, IN past_var, IN mean_grad, IN var_grad, IN mean_at, IN var_at, OUT towards,
                         OUT jacobian, int threads) {
    const int64_t c = batch->c;
    threads = worth(threads, (batch->x == 0 ? r * i : batch->n * batch->s) * c);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < c; j++) {
        NAME(find_moments)(batch, j);
        NAME(pool_gradients_of)(batch, j, r, groups, i, weight, past_mean, past_var, mean_grad, var_grad, mean_at,
                                var_at, towards, jacobian);
        NAME(normalize)(batch, j);
    }
    return NAME(is_finite)(batch->today_var, c);
}

/* The mean patch, written to `scratch`, behind it as much room as it takes; 0 if it is not finite. */
static int NAME(find_mean_patch)(const struct site *site, IN y, int64_t y_stride, OUT scratch, int threads) {
    const int64_t size = site->y_channels * site->k[0] * site->k[1] * site->k[2];
    NAME(tap_means)(site, y, y_stride, scratch + size, scratch, threads);
    return NAME(is_finite)(scratch, size);
}

/* Remember a step as samples: the mean patch and m others in `rows` [1 + room, ...], what the weights made of them in
 * `products`, 2 (x - mean) / m in `centred`. Returns 0 and writes nothing if the input is not finite. */
int NAME(remember_samples)(const struct site *site, int64_t start, IN x, int64_t x_stride, IN y, int64_t y_stride,
                           IN mean, IN var, OUT scratch, int64_t room, OUT kept_mean, OUT kept_var, OUT kept_count,
                           OUT rows, OUT products, OUT centred, int threads) {
    const int64_t c = site->c, m = site->amount, size = site->y_channels * site->k[0] * site->k[1] * site->k[2];
    if (!NAME(find_mean_patch)(site, y, y_stride, scratch, threads)) return 0;
    NAME(gather)(site, start, x, x_stride, y, y_stride, mean, scratch, products + c, centred + c, rows + size, threads);
    memcpy(rows, scratch, (size_t)size * sizeof(REAL));
    memcpy(products, mean, (size_t)c * sizeof(REAL));
    memcpy(kept_mean, mean, (size_t)c * sizeof(REAL));
    memcpy(kept_var, var, (size_t)c * sizeof(REAL));
    *kept_count = (REAL)(site->n * site->s);
    memset(centred + (1 + m) * c, 0, (size_t)((room - m) * c) * sizeof(REAL)); /* so that old rows add nothing */
    return 1;
}

FAST static void NAME(add_products)(int64_t m, int64_t c, int64_t groups, int64_t i, IN centred, IN scaled, IN patches,
                                    OUT var_at, OUT var_grad) {
    memset(var_at, 0, (size_t)c * sizeof(REAL));
    for (int64_t p = 0; p < m; p++)
        for (int64_t j = 0; j < c; j++) var_at[j] += centred[p * c + j] * scaled[p * c + j];
    if (groups == 1) return;
    memset(var_grad, 0, (size_t)(c * i) * sizeof(REAL));
    for (int64_t p = 0; p < m; p++)
        for (int64_t j = 0; j < c; j++)
            for (int64_t q = 0; q < i; q++)
                var_grad[j * i + q] += scaled[p * c + j] * patches[(p * groups + j / (c / groups)) * i + q];
}

/* Remember a step as gradients of the mean [groups, i] and, with several groups, of the variance [c, i], and their
 * products with the weights [c]. With one group the variance's is left to be made, of `scaled` and `patches`. */
int NAME(remember_gradients)(const struct site *site, int64_t start, IN x, int64_t x_stride, IN y, int64_t y_stride,
                             IN mean, IN var, OUT scratch, OUT kept_mean, OUT kept_var, OUT kept_count, OUT mean_grad,
                             OUT mean_at, OUT var_grad, OUT var_at, OUT centred, OUT scaled, OUT patches, int threads) {
    const int64_t c = site->c, size = site->y_channels * site->k[0] * site->k[1] * site->k[2];
    if (!NAME(find_mean_patch)(site, y, y_stride, scratch, threads)) return 0;
    NAME(gather)(site, start, x, x_stride, y, y_stride, mean, scratch, centred, scaled, patches, threads);
    memcpy(mean_grad, scratch, (size_t)size * sizeof(REAL));
    memcpy(mean_at, mean, (size_t)c * sizeof(REAL));
    memcpy(kept_mean, mean, (size_t)c * sizeof(REAL));
    memcpy(kept_var, var, (size_t)c * sizeof(REAL));
    *kept_count = (REAL)(site->n * site->s);
    NAME(add_products)(site->amount, c, site->groups, size / site->groups, centred, scaled, patches, var_at, var_grad);
    return 1;
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

/* Coefficients of the rows in dL/dW, [r, m, c], from those in d var / dW and, of a step's first row, in d mean / dW. */
FAST void NAME(coefficients)(int64_t r, int64_t m, int64_t c, IN of_var, IN of_mean, int64_t step_stride,
                             int64_t channel_stride, IN grad_mean, IN grad_var, OUT result) {
    for (int64_t row = 0; row < r * m; row++)
        for (int64_t j = 0; j < c; j++) result[row * c + j] = of_var[row * c + j] * grad_var[j];
    for (int64_t t = 0; t < r; t++)
        for (int64_t j = 0; j < c; j++)
            result[t * m * c + j] += of_mean[t * step_stride + j * channel_stride] * grad_mean[j];
}

/* Add dL/dW to `grad` [c, i]: one row of each step times its coefficient, and what is left of d var / dW. */
void NAME(add_gradient)(int64_t r, int64_t c, int64_t groups, int64_t i, IN rows, IN coefficient, IN jacobian,
                        IN grad_var, OUT grad, int threads) {
    threads = worth(threads, c * i);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t j = 0; j < c; j++) {
        OUT mine = grad + j * i;
        NAME(add_multiple)(jacobian + j * i, grad_var[j], i, mine);
        for (int64_t t = 0; t < r; t++)
            NAME(add_multiple)(rows + (t * groups + j / (c / groups)) * i, coefficient[t * c + j], i, mine);
    }
}

#undef IN
#undef OUT
#undef BLOCK
#undef MOST_STEPS
#undef WIDE
#endif
