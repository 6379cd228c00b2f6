/* What the parts of the guard share inside one process of a job. */
#ifndef MESH_GUARD_H
#define MESH_GUARD_H

#include <pthread.h>
#include <stdbool.h>

#include "abi.h"
#include "clock.h"
#include "pages.h"

/* Every name of the lists is a function of ours, and a slot with the driver's own. */
#define HOOK(name, parameters)                          \
  __attribute__((visibility("default"))) CUresult name parameters; \
  extern void *slot_##name;
#define GATE(name)
#define DENY(name, error)
#include "hooks.def"
#undef HOOK
#undef GATE
#undef DENY

/* The driver's own, for a call that we hook. Before the driver is loaded this loads it. */
#define REAL(name) ((__typeof__(&name))slot_##name)

/* The driver's own, for calls that we make and do not hook: USES lists them with their prototypes. */
#define USES(_)                                                          \
  _(cuCtxGetCurrent, (CUcontext *))                                      \
  _(cuCtxGetDevice, (CUdevice *))                                        \
  _(cuDeviceGetUuid, (CUuuid *, CUdevice))                               \
  _(cuDeviceGetUuid_v2, (CUuuid *, CUdevice))                            \
  _(cuMemFreeAsync, (CUdeviceptr, CUstream))                             \
  _(cuMemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *))  \
  _(cuDeviceGetGraphMemAttribute, (CUdevice, CUgraphMem_attribute, void *)) \
  _(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *))            \
  _(cuEventCreate, (CUevent *, unsigned int))                            \
  _(cuEventDestroy_v2, (CUevent))                                        \
  _(cuEventRecord, (CUevent, CUstream))                                  \
  _(cuEventQuery, (CUevent))                                             \
  _(cuEventElapsedTime, (float *, CUevent, CUevent))
#define DECLARE(name, parameters)  \
  typedef CUresult call_##name parameters; \
  extern void *slot_##name;
USES(DECLARE)
#undef DECLARE
#define DRIVER(name) ((call_##name *)slot_##name)

/* The gate word, also in the assembler's reach; one that is open while there is no policy. */
extern const _Atomic uint32_t *guard_gate;

static inline bool gate_is_closed(void) { return atomic_load_explicit(guard_gate, memory_order_acquire) & GUARD_GATE_CLOSED; }

/* --- load.c */

/* Finds the pages and the driver; returns with every slot filled. Called by whichever call of the driver comes first. */
void guard_load(void);

/* This process's slot in the job page, taken at the first call; -1 if all are taken. */
int guard_slot(void);

/* Gives back what dead processes of the job held. */
void guard_sweep(void);

/* Where a device is in the policy, by its UUID; -1 if it is not this job's. */
int guard_device(CUdevice device);

/* The same of the calling thread's context: CUDA_SUCCESS, or what a call shall answer that needs one. */
CUresult guard_current(int *device);

/* --- wait.c */

/* Sleeps until the word is no longer `seen`, somebody wakes it, a signal comes, or `deadline_ns` (of CLOCK_MONOTONIC) has passed. */
void futex_wait(const _Atomic uint32_t *word, uint32_t seen, int64_t deadline_ns);

/* Returns when the gate is open. */
void guard_wait(void);

/* --- memory.c */

/* After a wait for the device: what pools have given back since is no longer charged. */
void memory_settle(void);

/* A graph is about to be launched or uploaded: CUDA_ERROR_OUT_OF_MEMORY if what its nodes allocate would not fit. What is held back
 * for it until it has been is told to memory_after_graph. */
struct graph_hold {
  int device;
  int64_t units;
};
CUresult memory_before_graph(CUgraphExec exec, struct graph_hold *hold);
void memory_after_graph(CUgraphExec exec, struct graph_hold hold, CUresult result);

/* The allocations that the capture that ends here has put into `graph`. */
void memory_captured(CUgraph graph);

/* Those that it had are being captured again. */
void memory_recaptured(CUgraph graph);

/* In a forked child: nothing of the parent's is ours. */
void memory_forked(void);

/* --- meter.c */

/* Returns when the work may be launched: the gate is open, it is the job's turn, it has time left, and not too much is under way.
 * `key`: the function or graph; `blocks`: how large its grid is. True when it is measured by itself: meter_leave once it has been
 * launched. */
bool meter_enter(CUstream stream, const void *key, uint64_t blocks);
void meter_leave(CUstream stream);

/* The thread has another current context from here on. */
void meter_moved(void);

/* A capture begins or has ended. What is captured is not measured, and while one is under way nothing is. */
void meter_capture_begins(CUstream stream);
void meter_capture_ended(void);
bool meter_is_captured(CUstream stream);

/* After a wait: what has ended is charged. `all`: whoever launched it, and the thread's batches are closed however short. */
void meter_settle(bool all);

void meter_stream_ends(CUstream stream);
void meter_context_ends(CUcontext context);
void meter_forked(void);

/* A stream by a name that means the same to every call: with `_ptsz`, NULL is the thread's own. */
static inline CUstream own_stream(CUstream stream) { return stream == NULL ? CU_STREAM_PER_THREAD : stream; }
static inline CUstream legacy_stream(CUstream stream) { return stream == NULL ? CU_STREAM_LEGACY : stream; }

#endif
