/* All functions, for the type of numbers that REAL is. */

typedef const REAL *restrict NAME(in);
typedef REAL *restrict NAME(out);
typedef REAL NAME(lanes) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#define IN NAME(in)
#define OUT NAME(out)
#define VECTOR NAME(lanes)
#define LANES (32 / (int64_t)sizeof(REAL))

#include "channels.h"
#include "last.h"
#include "products.h"
#include "sampling.h"
#include "weighting.h"
#include "step.h"

#undef IN
#undef OUT
#undef VECTOR
#undef LANES
