/* Memory that is reserved ahead and given out again: the driver's pools, and what graphs allocate when they run. */
#ifndef MESH_GUARD_POOLS_H
#define MESH_GUARD_POOLS_H

#include "memory.h"

#define CHUNK ((size_t)32 << 20) /* by which a driver's pools grow, until one has been seen to grow by less */

/* Units of the allocations that captures under way have recorded. */
extern _Atomic int64_t pools_captured;

/* A device's graphs have got or returned memory: brings the charge to what the driver says. */
void pools_graph_memory(CUdevice number, int device);

#endif
