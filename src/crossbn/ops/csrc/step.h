/* A training step of a norm. Included for each type of numbers. */

/* Pool a channel's moments with the remembered ones at today's weights, each step with its weight (see pooling.py).
 * `dvar_dvar` becomes d var / d past var, `dvar_dmean` the coefficient of the mean patches in d var / dW. `differences`
 * from each step are noted unless that is null. */
__attribute__((always_inline)) static inline void NAME(pool)(
    const struct NAME(batch) *batch, int64_t j, int64_t r, IN past_mean, IN past_var, const REAL *shift,
    const REAL *slope, REAL *dvar_dvar, REAL *dvar_dmean, OUT differences) {
    const int64_t c = batch->c;
    const REAL today = batch->today_mean[j];
    REAL moved[MOST_STEPS], moved_var[MOST_STEPS], step_weights[MOST_STEPS], all = 1, centre = today;
    for (int64_t t = 0; t < r; t++) {
        moved[t] = past_mean[t * c + j] + shift[t];
        step_weights[t] = batch->step_weights == 0 ? 1 : batch->step_weights[t];
        all += step_weights[t];
        centre += step_weights[t] * moved[t];
    }
    const REAL share = 1 / all;
    centre *= share;
    REAL total = batch->today_var[j] + (today - centre) * (today - centre);
    for (int64_t t = 0; t < r; t++) {
        const REAL deviation = moved[t] - centre;
        const REAL past = past_var[t * c + j] + slope[t] - shift[t] * shift[t];
        moved_var[t] = past >= 0 ? past : 0;
        dvar_dvar[t] = past >= 0 ? share * step_weights[t] : 0;
        total += step_weights[t] * (moved_var[t] + deviation * deviation);
        dvar_dmean[t] = 2 * share * step_weights[t] * deviation - 2 * dvar_dvar[t] * shift[t];
    }
    if (batch->latest_shift != 0 && r > 0) {
        const int64_t t = batch->latest;
        const REAL before = past_var[t * c + j], growth = before > 0 ? slope[t] / before : 0;
        batch->latest_shift[j] = shift[t];
        batch->latest_growth[j] = growth < -LARGEST_GROWTH ? -LARGEST_GROWTH : (growth > LARGEST_GROWTH ? LARGEST_GROWTH : growth);
    }
    batch->mean[j] = centre;
    batch->var[j] = total * share;
    if (differences != 0)
        NAME(compare)(today, batch->today_var[j], r, moved, moved_var, total * share, differences + j * r);
}

/* What is remembered, and what a step leaves for its backward and for later. Rings have a dimension of slots before
 * those that are said here; the first r slots are filled.
 *
 * slots, seen      of the rings; steps that had been remembered when this one began
 * m, groups, i     rows [groups, i] of each step: the mean patch and, as patches, others
 * weight, y        of the operator, [c, i], and its input, whose strides are like those of x
 * mean, var, count rings: [c], [c], and the positions of a step
 * rows, at         rings: [m, groups, i] and <row, W> [m, c]
 * centred          ring, as patches: 2 (x - mean) / P [m, c]
 * var_grad, var_at rings, as gradients: [c, i] and <var_grad, W> [c]
 * num_steps        how many have been remembered
 * results          out, see `lay_out`
 * remember         whether what is to be remembered of today is made; GIVEN if all of it but products is there
 * next_...         out: that
 * scratch          room, see `Workspace._room_needed`
 *
 * Where the weights of the steps are found here (see weighting.py), else null or unused:
 * differences      room [c, r]
 * variogram        [slots], by age; price and rate are its B and that of its averages
 * next_variogram   out: [slots]
 *
 * The rest is worked out here: r, the position to look at first, and where in the results what is. */
#ifndef MEMORY
#define MEMORY(FIELD)                                                                                                  \
    FIELD('n', int64_t, slots) FIELD('n', int64_t, seen) FIELD('n', int64_t, m) FIELD('n', int64_t, groups)            \
    FIELD('n', int64_t, i) FIELD('p', const REAL *, weight) FIELD('p', const REAL *, y) FIELD('n', int64_t, y_stride)  \
    FIELD('n', int64_t, y_place)                                                                                       \
    FIELD('p', REAL *, mean) FIELD('p', REAL *, var) FIELD('p', REAL *, count) FIELD('p', REAL *, rows)                \
    FIELD('p', REAL *, at) FIELD('p', REAL *, centred) FIELD('p', REAL *, var_grad) FIELD('p', REAL *, var_at)         \
    FIELD('p', int64_t *, num_steps) FIELD('p', REAL *, results) FIELD('n', int64_t, remember)                         \
    FIELD('p', REAL *, next_rows) FIELD('p', REAL *, next_at) FIELD('p', REAL *, next_centred)                         \
    FIELD('p', REAL *, next_var_grad) FIELD('p', REAL *, next_var_at) FIELD('p', REAL *, scratch)                      \
    FIELD('p', REAL *, differences) FIELD('p', REAL *, variogram) FIELD('r', double, price) FIELD('r', double, rate)   \
    FIELD('p', REAL *, next_variogram) FIELD('n', int64_t, r) FIELD('n', int64_t, start) FIELD('p', REAL *, share)     \
    FIELD('p', REAL *, weight_of_step) FIELD('p', REAL *, dvar_dvar) FIELD('p', REAL *, kept_rows)                     \
    FIELD('p', REAL *, var_coefficient) FIELD('p', REAL *, var_jacobian)
#endif
struct NAME(memory) { MEMORY(DECLARE) };
#define DESCRIBED NAME(memory)
const struct field NAME(memory_fields)[] = {MEMORY(DESCRIBE){0, 0, sizeof(struct NAME(memory))}};
#undef DESCRIBED

/* What a step leaves is one array, so that it is allocated, kept and handed on as one. Here is what lies in it, one after
 * the other, each from a multiple of ALIGNED numbers on; `result_shapes` and `Layout` tell Python the same. */
struct NAME(results) {
    REAL *mean, *var;      /* [c]: the pooled moments */
    REAL *share;           /* [1]: today's weight in them */
    REAL *dvar_dvar;       /* [r, c]: d var / d past var */
    REAL *rows;            /* [r, m, groups, i]: the remembered rows, which the rings will lose */
    REAL *weight_of_step;  /* [r]: the weights of the remembered steps over the sum of all */
    REAL *var_coefficient; /* [r, m, c]: the rows' coefficients in d var / dW */
    REAL *var_jacobian;    /* [c, i]: the rest of d var / dW, as gradients */
};

static struct NAME(results) NAME(lay_out)(REAL *place, int64_t c, int64_t r, int64_t m, int64_t groups, int64_t i) {
    struct NAME(results) results;
    results.mean = place;
    results.var = results.mean + aligned(c);
    results.share = results.var + aligned(c);
    results.dvar_dvar = results.share + aligned(1);
    results.rows = results.dvar_dvar + aligned(r * c);
    results.weight_of_step = results.rows + aligned(r * m * groups * i);
    results.var_coefficient = results.weight_of_step + aligned(r);
    results.var_jacobian = results.var_coefficient + aligned(r * m * c);
    return results;
}

/* The backward of a norm from what its step has left: see `step_backward`; and the weight's gradient, unless null, for
 * which there is `scratch` [r, m, c]. */
void NAME(backward_of)(const struct extent *extent, double eps, IN grad, IN x, IN gamma, REAL *left, OUT dx,
                       OUT grad_gamma, OUT grad_beta, OUT grad_mean, OUT grad_var, OUT weight, OUT scratch,
                       int threads) {
    const struct NAME(results) results =
        NAME(lay_out)(left, extent->c, extent->r, extent->m, extent->groups, extent->i);
    NAME(step_backward)(extent, eps, grad, x, gamma, results.mean, results.var, results.share, 0, dx, grad_gamma,
                        grad_beta, grad_mean, grad_var, threads);
    if (weight != 0)
        NAME(weight_gradient)(extent, results.rows, results.weight_of_step, 1, 0, results.var_coefficient,
                              extent->has_jacobian ? results.var_jacobian : 0, grad_mean, grad_var, scratch, 1,
                              weight, threads);
}

/* The channels from `start` on, `width` of them, from samples: the products of the rows with today's weights are in
 * `var_coefficient` and give way to it. */
FAST static void NAME(pool_samples_of)(const struct NAME(batch) *batch, const struct NAME(memory) *memory,
                                       int64_t start, int64_t width) {
    const int64_t c = batch->c, r = memory->r, m = memory->m;
    IN at = memory->at, centred = memory->centred;
    OUT product = memory->var_coefficient;
    REAL slopes[WIDE][MOST_STEPS], all_dvar_dvar[MOST_STEPS][WIDE];
    for (int64_t t = 0; t < r; t++) {
        REAL slope[WIDE] = {0};
        for (int64_t q = 1; q < m; q++) {
            const int64_t place = (t * m + q) * c + start;
            for (int64_t j = 0; j < width; j++) slope[j] += centred[place + j] * (product[place + j] - at[place + j]);
        }
        for (int64_t j = 0; j < width; j++) slopes[j][t] = slope[j];
    }
    for (int64_t j = 0; j < width; j++) {
        REAL shift[MOST_STEPS], dvar_dvar[MOST_STEPS], dvar_dmean[MOST_STEPS];
        for (int64_t t = 0; t < r; t++) {
            const int64_t place = t * m * c + start + j;
            shift[t] = product[place] - at[place];
        }
        NAME(pool)(batch, start + j, r, memory->mean, memory->var, shift, slopes[j], dvar_dvar, dvar_dmean,
                   memory->differences);
        for (int64_t t = 0; t < r; t++) {
            all_dvar_dvar[t][j] = memory->dvar_dvar[t * c + start + j] = dvar_dvar[t];
            product[t * m * c + start + j] = dvar_dmean[t];
        }
    }
    for (int64_t t = 0; t < r; t++)
        for (int64_t q = 1; q < m; q++) {
            const int64_t place = (t * m + q) * c + start;
            for (int64_t j = 0; j < width; j++) product[place + j] = all_dvar_dvar[t][j] * centred[place + j];
        }
}

/* <a, b>. Products that are subtracted from each other at a later step come from here: unchanged weights give 0. */
FAST static REAL NAME(dot)(IN a, IN b, int64_t size) {
    REAL total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t p = 0; p < size; p++) total += a[p] * b[p];
    return total;
}

/* A channel from gradients: of the mean [r, groups, i] and of the variance [r, c, i]. */
FAST static void NAME(pool_gradients_of)(const struct NAME(batch) *batch, const struct NAME(memory) *memory,
                                         int64_t j) {
    const int64_t c = batch->c, r = memory->r, groups = memory->groups, i = memory->i;
    IN mean_grad = memory->rows, var_grad = memory->var_grad, mean_at = memory->at, var_at = memory->var_at;
    IN weight = memory->weight;
    OUT jacobian = memory->var_jacobian;
    REAL shift[MOST_STEPS], slope[MOST_STEPS], dvar_dvar[MOST_STEPS], dvar_dmean[MOST_STEPS];
    for (int64_t t = 0; t < r; t++) {
        IN patch = mean_grad + (t * groups + j / (c / groups)) * i, grad = var_grad + (t * c + j) * i;
        shift[t] = NAME(dot)(patch, weight + j * i, i) - mean_at[t * c + j];
        slope[t] = NAME(dot)(grad, weight + j * i, i) - var_at[t * c + j];
    }
    NAME(pool)(batch, j, r, memory->mean, memory->var, shift, slope, dvar_dvar, dvar_dmean, memory->differences);
    for (int64_t p = 0; p < i && r > 0; p++) jacobian[j * i + p] = dvar_dvar[0] * var_grad[j * i + p];
    for (int64_t t = 1; t < r; t++)
        for (int64_t p = 0; p < i; p++) jacobian[j * i + p] += dvar_dvar[t] * var_grad[(t * c + j) * i + p];
    for (int64_t t = 0; t < r; t++) {
        memory->var_coefficient[t * c + j] = dvar_dmean[t];
        memory->dvar_dvar[t * c + j] = dvar_dvar[t];
    }
}

/* Whether products of a row with the weights are what is expected, up to rounding: `scale` are squares of what counts
 * as much. Rounding is relative to the absolute values that a product adds up, which may cancel; these are looked at only
 * if it matters. */
static int NAME(agree)(const struct NAME(batch) *batch, const struct NAME(memory) *memory, IN row, IN got, IN expected,
                       IN scale, int64_t start, int64_t stop) {
    const int64_t i = memory->i, of_group = batch->c / memory->groups;
    const double rounding = 64 * (sizeof(REAL) == 4 ? 1.1920929e-07 : 2.220446e-16);
    double difference = 0, allowed = 0;
    for (int64_t j = start; j < stop; j++) {
        const double off = (double)got[j] - expected[j];
        difference += off * off;
        allowed += TOLERANCE * TOLERANCE * scale[j];
    }
    for (int64_t j = start; j < stop && !(difference <= allowed); j++) {
        double magnitude = fabs((double)batch->today_mean[j]);
        for (int64_t p = 0; p < i; p++)
            magnitude += fabs((double)row[j / of_group * i + p] * memory->weight[j * i + p]);
        magnitude += 1e-30; /* below that numbers lose their digits */
        allowed += rounding * rounding * magnitude * magnitude;
    }
    return difference <= allowed;
}

/* Whether a sample is what the weights make of its patch, both less their mean, at some of its channels, others at each
 * step: products with all of a large weight would take longer than they are worth. Uses `scratch`, [2 c]. */
static int NAME(agree_at)(const struct NAME(batch) *batch, const struct NAME(memory) *memory, IN patch, IN output,
                          OUT scratch) {
    const int64_t c = batch->c, start = memory->seen * SOME_CHANNELS % c, stop = least(start + SOME_CHANNELS, c);
    OUT product = scratch, scale = scratch + c;
    NAME(project)(patch, 1, memory->groups, memory->i, memory->weight, c, start, stop, product);
    for (int64_t j = start; j < stop; j++) scale[j] = batch->today_var[j] + output[j] * output[j];
    return NAME(agree)(batch, memory, patch, product, output, scale, start, stop);
}

/* Keep a step as samples: the mean patch and a few others, what the weights made of them, 2 (x - mean) / P. */
static enum outcome NAME(keep_samples)(const struct tables *tables, const struct NAME(batch) *batch,
                                       const struct NAME(memory) *memory, int threads) {
    const int64_t c = tables->c, row = memory->groups * memory->i;
    OUT rows = memory->next_rows, at = memory->next_at, centred = memory->next_centred;
    if (!NAME(find_mean_patch)(tables, memory->y, memory->y_stride, memory->y_place, memory->scratch, threads)) return NOT_REMEMBERED;
    memcpy(rows, memory->scratch, (size_t)row * sizeof(REAL));
    memset(centred, 0, (size_t)c * sizeof(REAL));
    /* The weights make x - mean of a patch less the mean patch: that is its product, and needs no products. */
    NAME(gather)(tables, memory->start, batch->x, batch->x_stride, batch->x_place, memory->y, memory->y_stride,
                 memory->y_place, batch->today_mean, memory->scratch, at + c, centred + c, rows + row, threads);
    NAME(project_one)(rows, memory->groups, memory->i, memory->weight, c, at, threads);
    return NAME(agree)(batch, memory, rows, at, batch->today_mean, batch->today_var, 0, c) &&
                   NAME(agree_at)(batch, memory, rows + row, at + c, memory->scratch)
               ? DONE
               : NOT_THE_OPERATOR;
}

/* Keep a step as gradients of the mean [groups, i] and of the variance [c, i], and their products with the weights
 * [c]. */
static enum outcome NAME(keep_gradients)(const struct tables *tables, const struct NAME(batch) *batch,
                                         const struct NAME(memory) *memory, int threads) {
    const int64_t c = tables->c, amount = tables->amount, groups = memory->groups, i = memory->i, row = groups * i;
    OUT mean_grad = memory->next_rows, mean_at = memory->next_at, var_grad = memory->next_var_grad;
    if (!NAME(find_mean_patch)(tables, memory->y, memory->y_stride, memory->y_place, memory->scratch, threads)) return NOT_REMEMBERED;
    memcpy(mean_grad, memory->scratch, (size_t)row * sizeof(REAL));
    OUT centred = memory->scratch, scaled = centred + amount * c, patches = scaled + amount * c;
    for (int64_t j = 0; j < c; j++)
        mean_at[j] = NAME(dot)(mean_grad + j / (c / groups) * i, memory->weight + j * i, i);
    if (!NAME(agree)(batch, memory, mean_grad, mean_at, batch->today_mean, batch->today_var, 0, c))
        return NOT_THE_OPERATOR;
    NAME(gather)(tables, memory->start, batch->x, batch->x_stride, batch->x_place, memory->y, memory->y_stride,
                 memory->y_place, batch->today_mean, mean_grad, centred, scaled, patches, threads);
    if (!NAME(agree_at)(batch, memory, patches, centred, patches + amount * row)) return NOT_THE_OPERATOR;
    NAME(spread_all)(patches, amount, groups, i, scaled, c, 1, var_grad, worth(threads, amount * c * i));
    for (int64_t j = 0; j < c; j++) memory->next_var_at[j] = NAME(dot)(var_grad + j * i, memory->weight + j * i, i);
    return DONE;
}

/* The products of gradients that have been made elsewhere. */
static void NAME(project_gradients)(const struct NAME(memory) *memory, int64_t c) {
    const int64_t i = memory->i, of_group = c / memory->groups;
    for (int64_t j = 0; j < c; j++) {
        memory->next_at[j] = NAME(dot)(memory->next_rows + j / of_group * i, memory->weight + j * i, i);
        memory->next_var_at[j] = NAME(dot)(memory->next_var_grad + j * i, memory->weight + j * i, i);
    }
}

/* Find what follows of how much is remembered: what lies where in the results, the weights of the steps, the positions. */
static void NAME(prepare)(struct NAME(batch) *batch, struct NAME(memory) *memory, const struct tables *tables) {
    const int64_t positions = batch->n * batch->s, r = least(memory->seen, memory->slots);
    const struct NAME(results) results =
        NAME(lay_out)(memory->results, batch->c, r, memory->m, memory->groups, memory->i);
    memory->r = r;
    /* All positions are looked at from the first, a part of them from where the step before has ended. */
    memory->start = tables->amount == positions ? 0 : memory->seen % positions * tables->amount % positions;
    batch->mean = results.mean, batch->var = results.var, memory->share = results.share;
    memory->weight_of_step = results.weight_of_step, memory->dvar_dvar = results.dvar_dvar;
    memory->kept_rows = results.rows, memory->var_coefficient = results.var_coefficient;
    memory->var_jacobian = results.var_jacobian;
    batch->latest = r > 0 ? (memory->seen - 1) % memory->slots : 0;
    batch->counted = (double)positions;
    for (int64_t t = 0; t < r; t++) batch->counted += memory->count[t];
    batch->bessel = batch->counted > 1 ? batch->counted / (batch->counted - 1) : 1;
    if (memory->differences != 0) {
        NAME(weigh)(r, memory->slots, memory->seen, memory->variogram, memory->count, (double)positions, memory->price,
                    batch->step_weights, memory->weight_of_step, memory->share, &batch->noise);
        return;
    }
    REAL all = 1;
    for (int64_t t = 0; t < r; t++) all += batch->step_weights == 0 ? 1 : batch->step_weights[t];
    *memory->share = 1 / all;
    for (int64_t t = 0; t < r; t++)
        memory->weight_of_step[t] = (batch->step_weights == 0 ? 1 : batch->step_weights[t]) * *memory->share;
}

/* Copy numbers: large arrays by all threads, as one alone does not use all of the memory's speed. */
static void NAME(copy)(OUT to, IN from, int64_t size, int threads) {
    threads = worth(threads, size);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int64_t start = size * part / threads, stop = size * (part + 1) / threads;
        memcpy(to + start, from + start, (size_t)(stop - start) * sizeof(REAL));
    }
}

/* A training step of a norm: find today's moments, pool them with the remembered ones at today's weights, normalize,
 * make what is to be remembered, as samples or as gradients, and move the running statistics. */
int NAME(step)(struct NAME(batch) *batch, struct NAME(memory) *memory, const struct tables *tables, int threads) {
    NAME(prepare)(batch, memory, tables);
    const int64_t c = batch->c, r = memory->r, m = memory->m, groups = memory->groups, i = memory->i;
    const int sampled = memory->centred != 0, parts = worth(threads, (r * m * i + batch->n * batch->s) * c);
    enum outcome outcome = DONE;
    NAME(copy)(memory->kept_rows, memory->rows, r * m * groups * i, threads);
#pragma omp parallel for num_threads(parts) if (parts > 1)
    for (int part = 0; part < parts; part++) {
        const int64_t begin = c * part / parts, end = c * (part + 1) / parts;
        if (batch->x_place != 0 && !batch->has_moments)
            NAME(moments_last)(batch->x, batch->n, batch->s, batch->x_stride, batch->x_place, begin, end,
                               batch->today_mean, batch->today_var);
        if (sampled)
            NAME(project)(memory->rows, r * m, groups, i, memory->weight, c, begin, end, memory->var_coefficient);
        for (int64_t start = begin; start < end; start += WIDE) {
            const int64_t stop = least(start + WIDE, end);
            for (int64_t j = start; j < stop && batch->x_place == 0; j++) NAME(find_moments)(batch, j);
            if (sampled) NAME(pool_samples_of)(batch, memory, start, stop - start);
            for (int64_t j = start; j < stop; j++) {
                if (!sampled) NAME(pool_gradients_of)(batch, memory, j);
                if (batch->x_place == 0) NAME(normalize)(batch, j);
            }
        }
        if (batch->x_place != 0) NAME(normalize_last)(batch, begin, end);
    }
    if (!NAME(is_finite)(batch->today_var, c)) return NOT_FINITE;
    for (int64_t j = 0; j < c; j++)
        if (!isfinite((REAL)(batch->var[j] * batch->bessel))) return NOT_FINITE;
    if (memory->differences != 0)
        NAME(average_in)(c, r, memory->slots, memory->seen, memory->differences, memory->rate, memory->variogram,
                         memory->next_variogram);
    if (memory->remember == GIVEN)
        NAME(project_gradients)(memory, c);
    else if (memory->remember)
        outcome = sampled ? NAME(keep_samples)(tables, batch, memory, threads)
                          : NAME(keep_gradients)(tables, batch, memory, threads);
    if (batch->running_mean != 0 && outcome != NOT_THE_OPERATOR) {
        NAME(move_running)(c, batch->mean, batch->var, batch->bessel, batch->momentum, batch->running_mean,
                           batch->running_var);
        *batch->num_batches_tracked += 1;
    }
    return outcome;
}

/* Write the first `amount` of `places` rows of `size` numbers to a slot of a ring; the others are 0. */
static void NAME(fill)(OUT ring, int64_t slot, IN next, int64_t amount, int64_t places, int64_t size, int threads) {
    OUT place = ring + slot * places * size;
    NAME(copy)(place, next, amount * size, threads);
    memset(place + amount * size, 0, (size_t)((places - amount) * size) * sizeof(REAL));
}

/* Remember the step: overwrite the oldest slot of the rings with what `step` has made. */
void NAME(remember)(const struct NAME(batch) *batch, const struct NAME(memory) *memory, const struct tables *tables,
                    int threads) {
    const int64_t c = batch->c, m = memory->m, row = memory->groups * memory->i, amount = tables->amount + 1;
    const int64_t slot = *memory->num_steps % memory->slots;
    NAME(fill)(memory->mean, slot, batch->today_mean, 1, 1, c, threads);
    NAME(fill)(memory->var, slot, batch->today_var, 1, 1, c, threads);
    memory->count[slot] = (REAL)(batch->n * batch->s);
    if (memory->centred != 0) {
        NAME(fill)(memory->rows, slot, memory->next_rows, amount, m, row, threads);
        NAME(fill)(memory->at, slot, memory->next_at, amount, m, c, threads);
        NAME(fill)(memory->centred, slot, memory->next_centred, amount, m, c, threads);
    } else {
        NAME(fill)(memory->rows, slot, memory->next_rows, 1, 1, row, threads);
        NAME(fill)(memory->at, slot, memory->next_at, 1, 1, c, threads);
        NAME(fill)(memory->var_grad, slot, memory->next_var_grad, 1, 1, c * memory->i, threads);
        NAME(fill)(memory->var_at, slot, memory->next_var_at, 1, 1, c, threads);
    }
    if (memory->differences != 0) NAME(fill)(memory->variogram, 0, memory->next_variogram, 1, 1, memory->slots, threads);
    *memory->num_steps += 1;
}
