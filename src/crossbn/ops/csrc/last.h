/* The same as in channels.h and sampling.h where channels are next to each other: a row of them for each position, and
 * the rows `place` numbers apart. CHUNK channels are looked at together. Included for each type of numbers. */

/* Add rows to `sum`, a few of them in their own type. */
FAST static void NAME(add_rows)(IN x, int64_t rows, int64_t place, int64_t width, double *restrict sum) {
    for (int64_t start = 0; start < rows; start += FEW) {
        const int64_t stop = least(start + FEW, rows);
        REAL part[CHUNK] = {0};
        for (int64_t p = start; p < stop; p++)
            for (int64_t j = 0; j < width; j++) part[j] += x[p * place + j];
        for (int64_t j = 0; j < width; j++) sum[j] += part[j];
    }
}

FAST static void NAME(add_row_deviations)(IN x, IN mean, int64_t rows, int64_t place, int64_t width,
                                          double *restrict deviation, double *restrict squares) {
    for (int64_t start = 0; start < rows; start += FEW) {
        const int64_t stop = least(start + FEW, rows);
        REAL part[CHUNK] = {0}, square[CHUNK] = {0};
        for (int64_t p = start; p < stop; p++)
            for (int64_t j = 0; j < width; j++) {
                const REAL off = x[p * place + j] - mean[j];
                part[j] += off;
                square[j] += off * off;
            }
        for (int64_t j = 0; j < width; j++) deviation[j] += part[j], squares[j] += square[j];
    }
}

FAST static void NAME(add_row_sums)(IN grad, IN x, IN mean, int64_t rows, int64_t place, int64_t width,
                                    double *restrict sum_grad, double *restrict sum_product) {
    for (int64_t start = 0; start < rows; start += FEW) {
        const int64_t stop = least(start + FEW, rows);
        REAL part[CHUNK] = {0}, product[CHUNK] = {0};
        for (int64_t p = start; p < stop; p++)
            for (int64_t j = 0; j < width; j++) {
                part[j] += grad[p * place + j];
                product[j] += grad[p * place + j] * (x[p * place + j] - mean[j]);
            }
        for (int64_t j = 0; j < width; j++) sum_grad[j] += part[j], sum_product[j] += product[j];
    }
}

FAST static void NAME(scale_rows)(IN x, IN factor, IN offset, int64_t rows, int64_t place, int64_t width,
                                  int64_t to_place, OUT y) {
    for (int64_t p = 0; p < rows; p++)
        for (int64_t j = 0; j < width; j++) y[p * to_place + j] = factor[j] * x[p * place + j] + offset[j];
}

FAST static void NAME(combine_rows)(IN grad, IN x, IN scale, IN slope, IN mean, IN level, int64_t rows, int64_t place,
                                    int64_t width, OUT dx) {
    for (int64_t p = 0; p < rows; p++)
        for (int64_t j = 0; j < width; j++)
            dx[p * place + j] =
                scale[j] * grad[p * place + j] - slope[j] * (x[p * place + j] - mean[j]) - level[j];
}

/* Mean and, unless null, biased variance of the channels from `begin` to `end`: see `moments_of`. */
static void NAME(moments_last)(IN x, int64_t n, int64_t s, int64_t stride, int64_t place, int64_t begin, int64_t end,
                               OUT mean, OUT var) {
    const double count = (double)(n * s);
    for (int64_t start = begin; start < end; start += CHUNK) {
        const int64_t width = least(CHUNK, end - start);
        double total[CHUNK] = {0}, deviation[CHUNK] = {0}, squares[CHUNK] = {0};
        for (int64_t b = 0; b < n; b++) NAME(add_rows)(x + b * stride + start, s, place, width, total);
        for (int64_t j = 0; j < width; j++) mean[start + j] = (REAL)(total[j] / count);
        if (var == 0) continue;
        for (int64_t b = 0; b < n; b++)
            NAME(add_row_deviations)(x + b * stride + start, mean + start, s, place, width, deviation, squares);
        for (int64_t j = 0; j < width; j++) {
            const double off = deviation[j] / count, found = squares[j] / count - off * off;
            mean[start + j] = (REAL)(mean[start + j] + off);
            var[start + j] = (REAL)(found < 0 ? 0 : found); /* this way round NaN stays NaN */
        }
    }
}

static void NAME(normalize_last)(const struct NAME(batch) *batch, int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end && batch->output != 0; start += CHUNK) {
        const int64_t width = least(CHUNK, end - start);
        REAL factor[CHUNK], offset[CHUNK];
        for (int64_t j = 0; j < width; j++)
            NAME(line_of)(batch, start + j, factor + j, offset + j);
        for (int64_t b = 0; b < batch->n; b++)
            NAME(scale_rows)(batch->x + b * batch->x_stride + start, factor, offset, batch->s, batch->x_place, width,
                             batch->c, batch->output + b * batch->c * batch->s + start);
    }
}

/* The backward of the channels from `begin` to `end`: see `step_backward`. */
static void NAME(backward_last)(const struct extent *extent, double eps, IN grad, IN x, IN gamma, IN mean, IN var,
                                IN share, int64_t share_stride, OUT dx, OUT grad_gamma, OUT grad_beta, OUT grad_mean,
                                OUT grad_var, int64_t begin, int64_t end) {
    const int64_t c = extent->c, rows = extent->n * extent->s;
    for (int64_t start = begin; start < end; start += CHUNK) {
        const int64_t width = least(CHUNK, end - start);
        double sum_grad[CHUNK] = {0}, sum_product[CHUNK] = {0};
        REAL scale[CHUNK], slope[CHUNK], level[CHUNK];
        NAME(add_row_sums)(grad + start, x + start, mean + start, rows, c, width, sum_grad, sum_product);
        for (int64_t j = 0; j < width; j++)
            NAME(vectors_of)(extent, eps, gamma, var, share, share_stride, start + j, sum_grad[j], sum_product[j],
                             scale + j, slope + j, level + j, grad_gamma, grad_beta, grad_mean, grad_var);
        NAME(combine_rows)(grad + start, x + start, scale, slope, mean + start, level, rows, c, width, dx + start);
    }
}

/* What each kernel tap reads on average of the channels from `begin` to `end`. Of a line of positions, of all images,
 * sums for the taps of the last dimension are made first; most positions have the weights of the middle one. `scratch`
 * has (taps + k2 + 1) CHUNK numbers. */
FAST static void NAME(tap_means_last)(const struct tables *tables, IN y, int64_t stride, int64_t place, int64_t begin,
                                      int64_t end, OUT scratch, OUT result) {
    const int64_t *size = tables->size, *k = tables->k, taps = k[0] * k[1] * k[2], length = size[2];
    IN often0 = tables->often[0], often1 = tables->often[1], often2 = tables->often[2];
    OUT line = scratch + taps * CHUNK, total = line + k[2] * CHUNK;
    for (int64_t start = begin; start < end; start += CHUNK) {
        const int64_t width = least(CHUNK, end - start);
        memset(scratch, 0, (size_t)(taps * CHUNK) * sizeof(REAL));
        for (int64_t row = 0; row < size[0] * size[1]; row++) {
            IN first = often0 + row / size[1] * k[0], second = often1 + row % size[1] * k[1];
            memset(line, 0, (size_t)((k[2] + 1) * CHUNK) * sizeof(REAL));
            for (int64_t b = 0; b < tables->n; b++)
                for (int64_t p = 0; p < length; p++) {
                    IN values = y + b * stride + (row * length + p) * place + start;
                    for (int64_t j = 0; j < width; j++) total[j] += values[j];
                    for (int64_t t = 0; t < k[2]; t++) {
                        const REAL excess = often2[t * length + p] - often2[t * length + length / 2];
                        if (excess != 0)
                            for (int64_t j = 0; j < width; j++) line[t * CHUNK + j] += excess * values[j];
                    }
                }
            for (int64_t t = 0; t < taps; t++) {
                const REAL weight = first[t / (k[1] * k[2])] * second[t / k[2] % k[1]];
                const REAL usual = weight * often2[t % k[2] * length + length / 2];
                IN own = line + t % k[2] * CHUNK;
                OUT sum = scratch + t * CHUNK;
                if (weight != 0)
                    for (int64_t j = 0; j < width; j++) sum[j] += weight * own[j] + usual * total[j];
            }
        }
        for (int64_t j = 0; j < width; j++)
            for (int64_t t = 0; t < taps; t++) result[(start + j) * taps + t] = scratch[t * CHUNK + j];
    }
}

/* Mean and, unless null, biased variance of each channel. */
void NAME(moments)(IN x, int64_t n, int64_t c, int64_t s, int64_t stride, int64_t place, OUT mean, OUT var,
                   int threads) {
    threads = worth(threads, n * c * s);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int64_t begin = c * part / threads, end = c * (part + 1) / threads;
        if (place != 0) NAME(moments_last)(x, n, s, stride, place, begin, end, mean, var);
        for (int64_t j = begin; j < end && place == 0; j++)
            NAME(moments_of)(x + j * s, n, s, stride, mean + j, var == 0 ? 0 : var + j);
    }
}

/* BatchNorm's backward with its two corrections scaled by `share` (one number, or one for each channel): dx, and the
 * gradients of gamma, which is 1 if it is null, of beta, and of the pooled mean and variance. */
void NAME(step_backward)(const struct extent *extent, double eps, IN grad, IN x, IN gamma, IN mean, IN var, IN share,
                         int64_t share_stride, OUT dx, OUT grad_gamma, OUT grad_beta, OUT grad_mean, OUT grad_var,
                         int threads) {
    const int64_t c = extent->c, s = extent->s, all = extent->n * c * s;
    threads = worth(threads, all);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int64_t begin = c * part / threads, end = c * (part + 1) / threads;
        if (extent->is_last)
            NAME(backward_last)(extent, eps, grad, x, gamma, mean, var, share, share_stride, dx, grad_gamma, grad_beta,
                                grad_mean, grad_var, begin, end);
        for (int64_t j = begin; j < end && !extent->is_last; j++) {
            double sum_grad = 0, sum_product = 0;
            REAL scale, slope, level;
            for (int64_t place = j * s; place < all; place += c * s)
                NAME(add_sums)(grad + place, x + place, mean[j], s, &sum_grad, &sum_product);
            NAME(vectors_of)(extent, eps, gamma, var, share, share_stride, j, sum_grad, sum_product, &scale, &slope,
                             &level, grad_gamma, grad_beta, grad_mean, grad_var);
            for (int64_t place = j * s; place < all; place += c * s)
                NAME(combine)(grad + place, x + place, scale, slope, mean[j], level, s, dx + place);
        }
    }
}
