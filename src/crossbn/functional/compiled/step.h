/* A training step of a norm. Included for each type of numbers. */

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

/* What is remembered, and what a step leaves for its backward. Rings have a dimension of slots before those that are
 * said here; the first r slots are filled. */
struct NAME(memory) {
    int64_t r, m, groups, i; /* m rows [groups, i] of each step: the mean patch and, as samples, others */
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
    /* The weights make x - mean of a patch less the mean patch: that is its product, and needs no products. */
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
