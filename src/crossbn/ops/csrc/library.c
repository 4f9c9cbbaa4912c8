/* A norm's training step on the CPU: one call in forward, one or two in backward.
 *
 * Every function has a twin written with torch's operators, which is called where this file was not compiled (see
 * `ops/__init__.py`). Arrays are dense, in C order, but for x and y, see `batch`. n images, c channels, s
 * positions of an image, r remembered steps, i numbers of a patch. Loops over channels run on `threads` threads; each
 * channel is one thread's, so results do not depend on their number.
 */

/* Python may import the library, though ctypes alone uses it; its headers are not needed for that. */
#if defined(__has_include)
#if __has_include(<Python.h>)
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "See library.py.", -1, 0, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
#endif
#endif

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The fields of a structure are listed once, here. Python reads names, kinds and offsets from the library and makes its
 * own structure of them: n for a number, r for a real one, p for an array; three in a row have their letter in
 * capitals. */
struct field {
    const char *name;
    int64_t kind, offset;
};
#define DECLARE(kind, type, name) type name;
#define DECLARE_THREE(kind, type, name) type name[3];
#define DESCRIBE(kind, type, name) {#name, kind, (int64_t)offsetof(struct DESCRIBED, name)},

/* Two versions of the loops, chosen when the library is loaded: for processors with AVX2, and for all. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FAST
#endif

/* An operator at one size of its input and output: what does not change from step to step.
 *
 * n, c, s          images, channels and positions of the output
 * y_channels, size of the input
 * groups, k        of the operator: taps along each dimension
 * often            how often each tap reads each index, per position: [size, k], the last [k, size]
 * amount, jump     positions to look at, and how far apart they are (see sensitivity.py)
 * tap              the inputs that each position reads; null: the one at its own place
 * inside           which of them count; null: all */
#define TABLES(FIELD, THREE)                                                                                           \
    FIELD('n', int64_t, n) FIELD('n', int64_t, c) FIELD('n', int64_t, s) FIELD('n', int64_t, y_channels)               \
    THREE('N', int64_t, size) FIELD('n', int64_t, groups) THREE('N', int64_t, k) THREE('P', const void *, often)       \
    FIELD('n', int64_t, amount) FIELD('n', int64_t, jump) FIELD('p', const int64_t *, tap)                             \
    FIELD('p', const uint8_t *, inside)
struct tables { TABLES(DECLARE, DECLARE_THREE) };
#define DESCRIBED tables
const struct field tables_fields[] = {TABLES(DESCRIBE, DESCRIBE){0, 0, sizeof(struct tables)}};
#undef DESCRIBED

/* The sizes of a norm's batch and of what a step leaves for its backward.
 *
 * n, c, s          images, channels, positions of an image
 * r, m, groups, i  remembered steps; rows [groups, i] of each
 * has_jacobian     whether there is a rest of d var / dW beside them
 * is_last          whether the channels of input, gradient and output are next to each other */
#define EXTENT(FIELD)                                                                                                  \
    FIELD('n', int64_t, n) FIELD('n', int64_t, c) FIELD('n', int64_t, s) FIELD('n', int64_t, r) FIELD('n', int64_t, m) \
    FIELD('n', int64_t, groups) FIELD('n', int64_t, i) FIELD('n', int64_t, has_jacobian) FIELD('n', int64_t, is_last)
struct extent { EXTENT(DECLARE) };
#define DESCRIBED extent
const struct field extent_fields[] = {EXTENT(DESCRIBE){0, 0, sizeof(struct extent)}};
#undef DESCRIBED

/* What is to be remembered has been made, see `memory`. */
#define GIVEN 2

/* What a step came to. Unless it is done, nothing that was written counts. */
enum outcome {
    NOT_FINITE,       /* today's or the pooled moments are not */
    DONE,
    NOT_REMEMBERED,   /* done, but the operator's input is not finite: there is no row */
    NOT_THE_OPERATOR  /* x is not what the weights make of y */
};

#define BLOCK 1024    /* numbers added in their own type before the sum goes on in double */
#define MOST_STEPS 64 /* remembered ones; cpu.py asks for fewer */
#define WIDE 16       /* channels whose samples are looked at together */
#define CHUNK 256     /* channels that are looked at together where they are next to each other */
#define FEW 128       /* rows of them that are added in their own type */
#define ALIGNED 16    /* numbers: what lies in one array with others begins at a multiple; types.py has the same */
const int64_t result_alignment = ALIGNED; /* for library.py to compare */

/* Products of rows with weights: ROWS by CHANNELS sums are kept in registers, SECTION numbers of a row at a time. The
 * other way round, at most MOST_ROWS rows are put together in a PANEL. */
#define ROWS 3
#define CHANNELS 4
#define SECTION 1024
#define MOST_ROWS 256
#define PANEL 16384

/* A sample is compared with what the weights make of its patch at that many channels of a step. */
#define SOME_CHANNELS 16

/* How far, in parts of a standard deviation, x may be from what the weights make of y. */
#define TOLERANCE 0.02

/* See weighting.py. */
#define LARGEST_DIFFERENCE 16
#define SMALLEST_WEIGHT 1e-30

/* See pooling.py. */
#define LARGEST_GROWTH (REAL)0.7

/* Threads for work of that size, of those that there are. */
static int worth(int threads, int64_t numbers) { return numbers < 32768 ? 1 : threads; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t aligned(int64_t size) { return (size + ALIGNED - 1) / ALIGNED * ALIGNED; }

#define REAL float
#define NAME(name) name##_float32
#include "functions.h"
#undef REAL
#undef NAME
#define REAL double
#define NAME(name) name##_float64
#include "functions.h"
#undef REAL
#undef NAME
