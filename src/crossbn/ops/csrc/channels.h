/* Channel by channel: moments, normalization, its backward, running statistics. Included for each type of numbers. */

/* A batch to be normalized: the input, today's moments, the pooled ones, and the output. Without the output nothing is
 * normalized and no running statistics move; without gamma and beta they are 1 and 0.
 *
 * x_stride, x_place  how far apart images are, and positions where channels are next to each other; else that is 0, and
 *                  an image is dense. The output is dense, in the same order
 * has_moments      whether today's moments are
 * mean, var        out: the pooled ones, see `lay_out`
 * step_weights     of the remembered steps, today's being 1; null: all are 1. Out, where they are found here
 * counted, bessel  out: positions of all steps; times bessel the pooled variance is unbiased
 * num_batches_tracked  steps that the running statistics have seen
 * latest_shift, latest_growth  out, unless null: how mean and log variance of the latest remembered step have moved since
 * latest, noise    out: its slot; R of the steps, where their weights are found here */
#ifndef BATCH
#define BATCH(FIELD)                                                                                                   \
    FIELD('p', const REAL *, x) FIELD('n', int64_t, n) FIELD('n', int64_t, c) FIELD('n', int64_t, s)                   \
    FIELD('n', int64_t, x_stride) FIELD('n', int64_t, x_place) FIELD('n', int64_t, has_moments)                        \
    FIELD('p', REAL *, today_mean)                                                                                     \
    FIELD('p', REAL *, today_var) FIELD('p', REAL *, mean) FIELD('p', REAL *, var) FIELD('p', const REAL *, gamma)     \
    FIELD('p', const REAL *, beta) FIELD('r', double, eps) FIELD('p', REAL *, step_weights)                            \
    FIELD('p', REAL *, output) FIELD('r', double, counted) FIELD('r', double, bessel) FIELD('r', double, momentum)     \
    FIELD('p', REAL *, running_mean) FIELD('p', REAL *, running_var) FIELD('p', int64_t *, num_batches_tracked)        \
    FIELD('p', REAL *, latest_shift) FIELD('p', REAL *, latest_growth) FIELD('n', int64_t, latest)                      \
    FIELD('r', double, noise)
#endif
struct NAME(batch) { BATCH(DECLARE) };
#define DESCRIBED NAME(batch)
const struct field NAME(batch_fields)[] = {BATCH(DESCRIBE){0, 0, sizeof(struct NAME(batch))}};
#undef DESCRIBED

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

/* Add to sum(x - mean) and sum((x - mean)^2). */
FAST static void NAME(add_deviations)(IN x, REAL mean, int64_t s, double *deviation, double *squares) {
    for (int64_t start = 0; start < s; start += BLOCK) {
        int64_t stop = start + BLOCK < s ? start + BLOCK : s;
        REAL part = 0, square = 0;
#pragma omp simd reduction(+ : part, square)
        for (int64_t p = start; p < stop; p++) {
            part += x[p] - mean;
            square += (x[p] - mean) * (x[p] - mean);
        }
        *deviation += part;
        *squares += square;
    }
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

static int NAME(is_finite)(IN x, int64_t size) {
    for (int64_t p = 0; p < size; p++)
        if (!isfinite(x[p])) return 0;
    return 1;
}

/* Mean and, unless null, biased variance of a channel. */
static void NAME(moments_of)(IN x, int64_t n, int64_t s, int64_t batch_stride, OUT mean, OUT var) {
    double total = 0, squares = 0, deviation = 0;
    for (int64_t b = 0; b < n; b++) total += NAME(sum)(x + b * batch_stride, s);
    *mean = (REAL)(total / (double)(n * s));
    if (var == 0) return;
    /* The second pass also says how far the first one's mean is off. */
    for (int64_t b = 0; b < n; b++) NAME(add_deviations)(x + b * batch_stride, *mean, s, &deviation, &squares);
    deviation /= (double)(n * s);
    squares = squares / (double)(n * s) - deviation * deviation;
    *mean = (REAL)(*mean + deviation);
    *var = (REAL)(squares < 0 ? 0 : squares); /* this way round NaN stays NaN */
}

static void NAME(find_moments)(const struct NAME(batch) *batch, int64_t j) {
    if (!batch->has_moments)
        NAME(moments_of)(batch->x + j * batch->s, batch->n, batch->s, batch->x_stride, batch->today_mean + j,
                         batch->today_var + j);
}

/* What a channel is multiplied by, and what is added to it. */
static void NAME(line_of)(const struct NAME(batch) *batch, int64_t j, OUT factor, OUT offset) {
    const double gamma = batch->gamma == 0 ? 1 : batch->gamma[j], beta = batch->beta == 0 ? 0 : batch->beta[j];
    *factor = (REAL)(gamma / sqrt((double)batch->var[j] + batch->eps));
    *offset = (REAL)(beta - (double)batch->mean[j] * *factor);
}

/* Normalize a channel, which its moments have just brought near. */
static void NAME(normalize)(const struct NAME(batch) *batch, int64_t j) {
    REAL factor, offset;
    if (batch->output == 0) return;
    NAME(line_of)(batch, j, &factor, &offset);
    for (int64_t b = 0; b < batch->n; b++)
        NAME(scale)(batch->x + b * batch->x_stride + j * batch->s, factor, offset, batch->s,
                    batch->output + (b * batch->c + j) * batch->s);
}

/* From the sums of a channel's gradient what its backward needs: dx is scale g - slope (x - mean) - level. */
static void NAME(vectors_of)(const struct extent *extent, double eps, IN gamma, IN var, IN share, int64_t share_stride,
                             int64_t j, double sum_grad, double sum_product, OUT scale, OUT slope, OUT level,
                             OUT grad_gamma, OUT grad_beta, OUT grad_mean, OUT grad_var) {
    const REAL invstd = (REAL)(1 / sqrt((double)var[j] + eps));
    const double own = share[j * share_stride] / (double)(extent->n * extent->s);
    *scale = gamma == 0 ? invstd : gamma[j] * invstd;
    *slope = (REAL)(own * *scale * invstd * invstd * sum_product), *level = (REAL)(own * *scale * sum_grad);
    grad_beta[j] = (REAL)sum_grad;
    grad_gamma[j] = (REAL)(invstd * sum_product);
    grad_mean[j] = (REAL)(-*scale * sum_grad);
    grad_var[j] = (REAL)(-0.5 * *scale * invstd * grad_gamma[j]);
}

/* Take over running statistics that have been moved elsewhere, if they are finite; return whether they are. */
int NAME(take_over)(int64_t c, IN mean, IN var, OUT running_mean, OUT running_var, int64_t *num_batches_tracked) {
    if (!NAME(is_finite)(mean, c) || !NAME(is_finite)(var, c)) return 0;
    memcpy(running_mean, mean, (size_t)c * sizeof(REAL));
    memcpy(running_var, var, (size_t)c * sizeof(REAL));
    *num_batches_tracked += 1;
    return 1;
}

/* Move the running statistics; `bessel` times the variance is unbiased. */
FAST static void NAME(move_running)(int64_t c, IN mean, IN var, double bessel, double momentum, OUT running_mean,
                             OUT running_var) {
    const REAL step = (REAL)momentum, unbiased = (REAL)bessel;
    for (int64_t j = 0; j < c; j++) {
        running_mean[j] += step * (mean[j] - running_mean[j]);
        running_var[j] += step * (var[j] * unbiased - running_var[j]);
    }
}
