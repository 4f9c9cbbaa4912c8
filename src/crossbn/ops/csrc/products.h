/* Rows times weights, and what gradients make of that. Included for each type of numbers. */

FAST static void NAME(add_multiple)(IN x, REAL factor, int64_t size, OUT result) {
    for (int64_t p = 0; p < size; p++) result[p] += factor * x[p];
}

FAST static void NAME(set_multiple)(IN x, REAL factor, int64_t size, OUT result) {
    for (int64_t p = 0; p < size; p++) result[p] = factor * x[p];
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

/* The same of one row and all channels. */
static void NAME(project_one)(IN row, int64_t groups, int64_t i, IN weight, int64_t c, OUT product, int threads) {
    threads = worth(threads, c * i);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++)
        NAME(project)(row, 1, groups, i, weight, c, c * part / threads, c * (part + 1) / threads, product);
}

/* Add CHANNELS coefficients [count, CHANNELS] times rows to `result` or, if that is `fresh`, to 0. The rows lie in a
 * panel, [., count, 2 LANES]. */
FAST static void NAME(add_panel)(IN coefficient, int64_t count, IN panel, int64_t size, int fresh, OUT result,
                                 int64_t stride) {
    for (int64_t p = 0; p < size; p += 2 * LANES) {
        VECTOR sums[CHANNELS][2];
        for (int j = 0; j < CHANNELS; j++)
            for (int half = 0; half < 2; half++)
                sums[j][half] = fresh ? (VECTOR){0} : *(const VECTOR *)(result + j * stride + p + half * LANES);
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
 * `result` [c, i], or to 0. Rows far apart would push each other out of the cache: a section of them is put together first. */
static void NAME(spread)(IN rows, int64_t count, int64_t groups, int64_t i, IN coefficient, int64_t c, int64_t start,
                         int64_t stop, int fresh, OUT result) {
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
                NAME(add_panel)(some, part, panel, size, fresh && first == 0, result + j * i + from, i);
            }
        }
        for (int64_t j = start; j < stop; j++) {
            const int64_t done = j < paired ? whole : 0;
            if (fresh && first == 0) memset(result + j * i + done, 0, (size_t)(i - done) * sizeof(REAL));
            for (int64_t q = 0; q < part; q++)
                NAME(add_multiple)(begin + q * stride + done, mine[q * c + j], i - done, result + j * i + done);
        }
    }
}

/* The same for all channels. */
static void NAME(spread_all)(IN rows, int64_t count, int64_t groups, int64_t i, IN coefficient, int64_t c, int fresh,
                             OUT result, int threads) {
    /* A thread has whole groups or, of a single one, a share of its channels. */
    const int64_t parts = groups > 1 ? groups : threads, one = groups > 1 ? 1 : CHANNELS, blocks = c / one;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++)
        NAME(spread)(rows, count, groups, i, coefficient, c, blocks * part / parts * one,
                     part + 1 < parts ? blocks * (part + 1) / parts * one : c, fresh, result);
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

/* dL/dW [c, i]: rows [r, m, groups, i] times their coefficients, for which there is `scratch` [r, m, c], and what is
 * left of d var / dW, unless null. It is added to `grad`, or written if that is `fresh`. */
void NAME(weight_gradient)(const struct extent *extent, IN rows, IN of_mean, int64_t step_stride,
                           int64_t channel_stride, IN of_var, IN rest, IN grad_mean, IN grad_var, OUT scratch,
                           int64_t fresh, OUT grad, int threads) {
    const int64_t r = extent->r, m = extent->m, c = extent->c, i = extent->i;
    threads = worth(threads, (r * m + 1) * c * i);
    NAME(coefficients)(r, m, c, of_var, of_mean, step_stride, channel_stride, grad_mean, grad_var, scratch);
    if (rest != 0) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t j = 0; j < c; j++)
            if (fresh)
                NAME(set_multiple)(rest + j * i, grad_var[j], i, grad + j * i);
            else
                NAME(add_multiple)(rest + j * i, grad_var[j], i, grad + j * i);
    }
    NAME(spread_all)(rows, r * m, extent->groups, i, scratch, c, fresh && rest == 0, grad, threads);
}
