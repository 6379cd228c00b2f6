/* Memory that the driver reserves ahead and reuses: its pools, and the allocations of graphs. */
#ifndef MESH_GUARD_POOLS_H
#define MESH_GUARD_POOLS_H

#include "memory.h"

#define CHUNK ((size_t)32 << 20) /* step by which the driver's pools grow, until a smaller one is observed */

/* An allocation of so many units is recorded by the capture of this stream. */
void graphs_captured(CUstream stream, int place, int64_t units);

/* After a device's graphs have allocated or released memory: sets the charge to the driver's figure. */
void pools_graph_memory(CUdevice number, int device);

#endif
