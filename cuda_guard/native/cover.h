/* Length of the union of time intervals: kernels that run concurrently use a device once. Pure. Keeps the latest COVER_MAX stretches;
 * all time before them counts as covered. */
#ifndef MESH_GUARD_COVER_H
#define MESH_GUARD_COVER_H

#include <stdint.h>

#define COVER_MAX 32

struct cover {
  int64_t starts[COVER_MAX], ends[COVER_MAX]; /* disjoint, in order */
  int64_t floor;
  int count;
};

/* Adds [start, end); returns how much of it was not covered before. */
int64_t cover_add(struct cover *cover, int64_t start, int64_t end);

#endif
