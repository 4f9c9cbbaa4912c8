/* A norm's training step on the CPU: one call in forward, one or two in backward.
 *
 * Every function has a twin written with torch's operators; `native.py` says which and calls it instead where this file
 * was not compiled. Arrays are dense, in C order, but for the batch stride of x and y. n images, c channels, s
 * positions of an image, r remembered steps, i numbers of a patch. Loops over channels run on `threads` threads; each
 * channel is one thread's, so results do not depend on their number.
 */

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
int crossbn_interface(void) { return 5; }

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

#define BLOCK 1024    /* numbers added in their own type before the sum goes on in double */
#define MOST_STEPS 64 /* remembered ones; native.py asks for fewer */
#define WIDE 16       /* channels whose samples are looked at together */

/* Products of rows with weights: ROWS by CHANNELS sums are kept in registers, SECTION numbers of a row at a time. The
 * other way round, at most MOST_ROWS rows are put together in a PANEL. */
#define ROWS 3
#define CHANNELS 4
#define SECTION 1024
#define MOST_ROWS 256
#define PANEL 16384

/* Threads for work of that size, of those that there are. */
static int worth(int threads, int64_t numbers) { return numbers < 32768 ? 1 : threads; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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
