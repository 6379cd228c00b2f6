/* Interfaces between the parts of the guard inside one process of a job. */
#ifndef MESH_GUARD_H
#define MESH_GUARD_H

#include <pthread.h>
#include <stdbool.h>

#include "abi.h"
#include "clock.h"
#include "pages.h"

/* Parameters of calls that are alike: numbers and pointers, passed on as they came. */
typedef uint64_t word;
#define WORDS_1 word a
#define WORDS_2 WORDS_1, word b
#define WORDS_3 WORDS_2, word c
#define WORDS_4 WORDS_3, word d
#define WORDS_5 WORDS_4, word e
#define WORDS_6 WORDS_5, word f
#define WORDS_8 WORDS_6, word g, word h
#define WORDS_9 WORDS_8, word i

/* Each name of the lists has a function of the guard, and a slot with the driver's function. */
#define HOOK(name, parameters)                          \
  __attribute__((visibility("default"))) CUresult name parameters; \
  extern void *slot_##name;
#define COPY(name, count, ...) HOOK(name, (WORDS_##count))
#define PAUSE(name, count, ...) HOOK(name, (WORDS_##count))
#define DENY(name, error)
#include "hooks.def"
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY

/* The driver's function for a hooked call. The first use loads the driver. */
#define REAL(name) ((__typeof__(&name))slot_##name)

/* The driver's function for a call that the guard makes and does not hook; USES lists these with their prototypes. */
#define USES(_)                                                          \
  _(cuCtxGetCurrent, (CUcontext *))                                      \
  _(cuCtxGetDevice, (CUdevice *))                                        \
  _(cuDeviceGetUuid, (CUuuid *, CUdevice))                               \
  _(cuDeviceGetUuid_v2, (CUuuid *, CUdevice))                            \
  _(cuMemFreeAsync, (CUdeviceptr, CUstream))                             \
  _(cuMemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *))  \
  _(cuDeviceGetGraphMemAttribute, (CUdevice, CUgraphMem_attribute, void *)) \
  _(cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *))            \
  _(cuStreamGetCaptureInfo, (CUstream, CUstreamCaptureStatus *, cuuint64_t *)) \
  _(cuStreamGetCtx, (CUstream, CUcontext *))                             \
  _(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *))          \
  _(cuCtxFromGreenCtx, (CUcontext *, CUgreenCtx))                        \
  _(cuEventCreate, (CUevent *, unsigned int))                            \
  _(cuEventDestroy_v2, (CUevent))                                        \
  _(cuEventRecord, (CUevent, CUstream))                                  \
  _(cuEventElapsedTime, (float *, CUevent, CUevent))
#define DECLARE(name, parameters)  \
  typedef CUresult call_##name parameters; \
  extern void *slot_##name;
USES(DECLARE)
#undef DECLARE
#define DRIVER(name) ((call_##name *)slot_##name)

/* The gate word; an open one while there is no policy. */
extern const _Atomic uint32_t *guard_gate;

static inline bool gate_is_closed(void) { return atomic_load_explicit(guard_gate, memory_order_acquire) & GUARD_GATE_CLOSED; }

/* --- load.c */

/* Finds the pages and the driver, and fills every slot. The first call of the driver calls it. */
void guard_load(void);

/* Returns this process's slot in the job page, claimed at the first call; -1 if all are taken. */
int guard_slot(void);

/* Releases what dead processes of the job held. */
void guard_sweep(void);

/* Returns the index of a device in the policy, by its UUID; -1 if it is not this job's. */
int guard_device(CUdevice device);

/* The same: CUDA_SUCCESS, CUDA_ERROR_NOT_PERMITTED for a device that is not this job's, or the driver's error for one that is none. */
CUresult guard_place(CUdevice device, int *place);

/* Returns this process's number of a device that it has used. */
CUdevice guard_number(int place);

/* The same for the calling thread's context: CUDA_SUCCESS, or the error of a call that needs a context. */
CUresult guard_current(int *device);

/* Makes a stream's context current, in which its work runs whatever the program's is; true if another one was: then call the other. */
bool guard_step_into(CUstream stream);
void guard_step_out(bool stepped);

/* --- wait.c */

/* Sleeps until the word is no longer `seen`, a wake-up, a signal, or `deadline_ns` (of CLOCK_MONOTONIC). */
void futex_wait(const _Atomic uint32_t *word, uint32_t seen, int64_t deadline_ns);

/* Returns when the gate is open. */
void guard_wait(void);

/* --- memory.c */

/* After a wait for the device: removes the charge of memory that pools have released. */
void memory_settle(void);

/* Before a graph is launched or uploaded: reserves what its nodes allocate, or returns CUDA_ERROR_OUT_OF_MEMORY. The reservation is
 * passed to memory_after_graph. */
struct graph_hold {
  uint32_t places; /* bits of the devices on which it allocates */
  int64_t units[GUARD_DEVICES];
};
CUresult memory_before_graph(CUgraphExec exec, CUstream stream, struct graph_hold *hold);
void memory_after_graph(CUgraphExec exec, struct graph_hold *hold, CUresult result);

/* Returns a name for the capture of a stream; 0 if there is none that can succeed. */
uint64_t memory_capture(CUstream stream);

/* A capture has ended: assigns its allocations to `graph`, or drops them without one. */
void memory_captured(uint64_t capture, const CUgraph *graph);

/* Its allocations are being captured again. */
void memory_recaptured(CUgraph graph);

/* In a forked child: drops all of the parent's entries. */
void memory_forked(void);

/* --- meter.c */

/* Returns when the work may be launched: the gate is open, it is the job's turn, it has time left, and the window is not full. `key`:
 * what is launched, by predict_key; `copies`: that is not counted as a launch. True if it is measured by itself: call meter_leave after
 * it. */
bool meter_enter(CUstream stream, uint64_t key, bool copies);
void meter_leave(void);

/* Before a wait for the device, or a question about it: marks the end of what was launched. After it: charges what has ended. */
void meter_look(void);

/* The stream comes to something that takes no time of the device: a function of the host, or another stream's work. */
void meter_stream_waits(CUstream stream);

/* The thread's current context has changed. */
void meter_moved(void);

/* A capture begins or has ended. Captured work is not measured. */
void meter_capture_begins(void);
void meter_capture_ended(void);
bool meter_is_captured(CUstream stream);

void meter_stream_ends(CUstream stream);
void meter_context_ends(CUcontext context);
void meter_forked(void);

/* Returns a stream's name that is the same for every call: with `_ptsz`, NULL is the thread's default stream. */
static inline CUstream own_stream(CUstream stream) { return stream == NULL ? CU_STREAM_PER_THREAD : stream; }
static inline CUstream legacy_stream(CUstream stream) { return stream == NULL ? CU_STREAM_LEGACY : stream; }

#endif
