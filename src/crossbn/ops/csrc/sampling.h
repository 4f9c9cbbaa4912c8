/* What an operator has read: on average, and at a few positions. Included for each type of numbers. */

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

/* What each kernel tap reads on average, [channels, k0 k1 k2]. `scratch` has (k0 k1 + 2) rows for each thread, or what
 * `tap_means_last` needs. */
static void NAME(tap_means)(const struct tables *tables, IN y, int64_t y_stride, int64_t y_place, OUT scratch,
                            OUT result, int threads) {
    const int64_t *size = tables->size, *k = tables->k, channels = tables->y_channels;
    const int64_t taps = k[0] * k[1] * k[2], space = size[0] * size[1] * size[2], own =
        y_place != 0 ? (taps + k[2] + 1) * CHUNK : (k[0] * k[1] + 2) * size[2];
    threads = worth(threads, tables->n * channels * space);
    if (tables->tap == 0) {
        NAME(moments)(y, tables->n, channels, space, y_stride, y_place, result, 0, threads);
        return;
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t part = 0; part < threads; part++) {
        const int64_t begin = channels * part / threads, end = channels * (part + 1) / threads;
        if (y_place != 0)
            NAME(tap_means_last)(tables, y, y_stride, y_place, begin, end, scratch + part * own, result);
        for (int64_t j = begin; j < end && y_place == 0; j++)
            NAME(tap_means_of)(y + j * space, tables->n, y_stride, size, k, tables->often[0], tables->often[1],
                               tables->often[2], scratch + part * own, result + j * taps);
    }
}

/* Look at the next m positions from the one numbered `start`: write the outputs less their mean and the same times
 * 2 / m, both [m, c], and the patches less the mean patch, [m, channels of y * taps]. */
static void NAME(gather)(const struct tables *tables, int64_t start, IN x, int64_t x_stride, int64_t x_place, IN y,
                         int64_t y_stride, int64_t y_place, IN mean, IN mean_patch, OUT centred, OUT scaled,
                         OUT patches, int threads) {
    const int64_t m = tables->amount, c = tables->c;
    const int64_t taps = tables->k[0] * tables->k[1] * tables->k[2];
    const int64_t y_space = tables->size[0] * tables->size[1] * tables->size[2];
    const int64_t x_channel = x_place == 0 ? tables->s : 1, y_channel = y_place == 0 ? y_space : 1;
    const int64_t x_step = x_place == 0 ? 1 : x_place, y_step = y_place == 0 ? 1 : y_place;
    const REAL factor = (REAL)(2.0 / (double)m);
    threads = worth(threads, m * (c + tables->y_channels * taps));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < m; p++) {
        const int64_t index = (start + p) * tables->jump % (tables->n * tables->s);
        const int64_t image = index / tables->s, place = index % tables->s;
        const int64_t *tap = tables->tap == 0 ? &place : tables->tap + place * taps;
        const uint8_t *inside = tables->inside == 0 ? 0 : tables->inside + place * taps;
        IN from = x + image * x_stride + place * x_step, input = y + image * y_stride;
        OUT patch = patches + p * tables->y_channels * taps;
        for (int64_t j = 0; j < c; j++) {
            centred[p * c + j] = from[j * x_channel] - mean[j];
            scaled[p * c + j] = factor * centred[p * c + j];
        }
        for (int64_t j = 0; j < tables->y_channels; j++)
            for (int64_t t = 0; t < taps; t++)
                patch[j * taps + t] =
                    (inside == 0 || inside[t] ? input[j * y_channel + tap[t] * y_step] : 0) - mean_patch[j * taps + t];
    }
}

/* The mean patch, written to `scratch`, behind it as much room as it takes; 0 if it is not finite. */
static int NAME(find_mean_patch)(const struct tables *tables, IN y, int64_t y_stride, int64_t y_place, OUT scratch,
                                 int threads) {
    const int64_t size = tables->y_channels * tables->k[0] * tables->k[1] * tables->k[2];
    NAME(tap_means)(tables, y, y_stride, y_place, scratch + size, scratch, threads);
    return NAME(is_finite)(scratch, size);
}
