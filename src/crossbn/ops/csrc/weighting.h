/* How much each remembered step weighs: see weighting.py. Included for each type of numbers. */

#define ROOT(x) (sizeof(REAL) == 4 ? (REAL)sqrtf((float)(x)) : (REAL)sqrt(x))

/* How much a channel differs from each remembered step: means and standard deviations, in units of the variance. */
static void NAME(compare)(REAL mean, REAL var, int64_t r, const REAL *past_mean, const REAL *past_var, REAL unit,
                          OUT differences) {
    const REAL smallest = sizeof(REAL) == 4 ? (REAL)FLT_MIN : (REAL)DBL_MIN, deviation = ROOT(var);
    const REAL scale = 1 / (unit > smallest ? unit : smallest);
    for (int64_t t = 0; t < r; t++) {
        const REAL shift = past_mean[t] - mean, change = ROOT(past_var[t]) - deviation;
        const REAL ratio = (shift * shift + change * change) * scale;
        differences[t] = ratio < LARGEST_DIFFERENCE ? ratio : LARGEST_DIFFERENCE; /* this way round NaN is large */
    }
}

/* Take the channels' differences [c, r] into the variogram [slots], which is by age. */
static void NAME(average_in)(int64_t c, int64_t r, int64_t slots, int64_t seen, IN differences, double rate,
                             IN variogram, OUT next) {
    double total[MOST_STEPS] = {0};
    memset(next, 0, (size_t)slots * sizeof(REAL));
    for (int64_t j = 0; j < c; j++)
        for (int64_t t = 0; t < r; t++) total[t] += differences[j * r + t];
    for (int64_t age = 1; age <= r; age++) {
        const double even = 1 / (double)(seen - age + 1), step = even > rate ? even : rate;
        const double found = total[(seen - age) % slots] / (double)c;
        next[age - 1] = (REAL)(variogram[age - 1] + step * (found - variogram[age - 1]));
    }
}

/* The line through a variogram: its intercept is twice the noise, its slope the drift. */
static void NAME(fit_line)(int64_t r, IN variogram, double *noise, double *drift) {
    const double centre = (double)(r + 1) / 2;
    double height = 0, rise = 0, away = 0, product = 0, squares = 0;
    for (int64_t age = 1; age <= r; age++) {
        height += variogram[age - 1] / (double)r;
        rise += ((double)age - centre) * variogram[age - 1];
        away += ((double)age - centre) * ((double)age - centre);
        product += (double)age * variogram[age - 1];
        squares += (double)(age * age);
    }
    const double slope = r > 1 && rise > 0 ? rise / away : 0, through_zero = r > 0 ? product / squares : 0;
    *drift = slope < through_zero ? slope : through_zero;
    *noise = (height - *drift * centre) / 2;
    if (!(*noise > 1e-38)) *noise = 1e-38;
}

/* The weights of the remembered steps [r], today's being 1, from their counts; and all of them over their sum. */
static void NAME(weigh)(int64_t r, int64_t slots, int64_t seen, IN variogram, IN count, double positions,
                        double price, OUT step_weights, OUT weight_of_step, OUT share, double *found_noise) {
    double noise, drift, usual = 0, worth = 0, all = 1, factor[MOST_STEPS];
    NAME(fit_line)(r, variogram, &noise, &drift);
    *found_noise = noise;
    for (int64_t t = 0; t < r; t++) usual += count[t] / (double)r;
    for (int64_t age = r; age >= 1; age--) {
        worth += count[(seen - age) % slots] / (usual > 1 ? usual : 1);
        factor[age - 1] = noise / (noise + worth * (drift + (age == 1 ? price : 0)));
        worth *= factor[age - 1];
    }
    double since = 1;
    for (int64_t age = 1; age <= r; age++) {
        const int64_t slot = (seen - age) % slots;
        since *= factor[age - 1];
        step_weights[slot] = (REAL)((since > SMALLEST_WEIGHT ? since : SMALLEST_WEIGHT) * count[slot] / positions);
        all += step_weights[slot];
    }
    for (int64_t t = 0; t < r; t++) weight_of_step[t] = (REAL)(step_weights[t] / all);
    *share = (REAL)(1 / all);
}
