/* How much of a time line some intervals cover together, each part counted once: kernels that run side by side use a device once.
 * Pure. Keeps the latest COVER_MAX stretches; what lies before them all counts as covered. */
#ifndef MESH_GUARD_COVER_H
#define MESH_GUARD_COVER_H

#include <stdint.h>

#define COVER_MAX 32

struct cover {
  int64_t starts[COVER_MAX], ends[COVER_MAX]; /* apart, in order */
  int64_t floor;
  int count;
};

/* Adds [start, end); how much of it had not been covered before. */
int64_t cover_add(struct cover *cover, int64_t start, int64_t end);

#endif
