/* Clock of the shared pages. */
#ifndef MESH_GUARD_CLOCK_H
#define MESH_GUARD_CLOCK_H

#include <stdint.h>
#include <time.h>

#ifdef GUARD_CLOCK /* of a test */
#define CLOCK_OF_A_TEST true
int64_t now_ns(void);
#else
#define CLOCK_OF_A_TEST false
/* ns of CLOCK_MONOTONIC */
static inline int64_t now_ns(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
#endif

#endif
