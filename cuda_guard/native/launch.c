/* Launches: granted in portions and measured. Captures are tracked, and not disturbed. */
#include "meter.h"

/* A call that launches what `key` names, on `stream`. Both paths end with a jump, so the arguments on the stack are not copied. */
#define LAUNCH(name, parameters, arguments, stream, key)                                                     \
  static __attribute__((noinline)) CUresult name##_the_long_way parameters {                                 \
    if (!meter_enter(stream, key, false)) return REAL(name) arguments;                                              \
    CUresult result = REAL(name) arguments;                                                                  \
    meter_leave();                                                                                           \
    return result;                                                                                           \
  }                                                                                                          \
  CUresult name parameters {                                                                                 \
    if (__builtin_expect(meter_pass(stream, key, false), true)) return REAL(name) arguments;                        \
    return name##_the_long_way arguments;                                                                    \
  }

static inline uint64_t shape_key(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                 unsigned int by, unsigned int bz, unsigned int shared) {
  return predict_key(function, (uint64_t)gx << 32 | gy, (uint64_t)gz << 32 | bx, (uint64_t)by << 32 | bz, shared);
}

#define KERNEL(name, named)                                                                                              \
  LAUNCH(name,                                                                                                           \
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,      \
          unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra),                           \
         (function, gx, gy, gz, bx, by, bz, shared, stream, params, extra), named(stream),                               \
         shape_key(function, gx, gy, gz, bx, by, bz, shared))
KERNEL(cuLaunchKernel, legacy_stream)
KERNEL(cuLaunchKernel_ptsz, own_stream)

#define COOPERATIVE(name, named)                                                                                         \
  LAUNCH(name,                                                                                                           \
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,      \
          unsigned int bz, unsigned int shared, CUstream stream, void **params),                                         \
         (function, gx, gy, gz, bx, by, bz, shared, stream, params), named(stream),                                      \
         shape_key(function, gx, gy, gz, bx, by, bz, shared))
COOPERATIVE(cuLaunchCooperativeKernel, legacy_stream)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, own_stream)

static inline uint64_t config_key(CUfunction function, const CUlaunchConfig *c) {
  return c == NULL ? 1 : shape_key(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes);
}

#define EXTENDED(name, named)                                                                    \
  LAUNCH(name, (const CUlaunchConfig *config, CUfunction function, void **params, void **extra), \
         (config, function, params, extra), named(config == NULL ? NULL : config->hStream), config_key(function, config))
EXTENDED(cuLaunchKernelEx, legacy_stream)
EXTENDED(cuLaunchKernelEx_ptsz, own_stream)

static inline uint64_t list_key(const CUDA_LAUNCH_PARAMS *p) {
  return p == NULL ? 1 : shape_key(p->function, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ, p->sharedMemBytes);
}

/* Each part of it runs in the context of its own stream; only the current context can be charged here. */
LAUNCH(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS * list, unsigned int count, unsigned int flags),
       (list, count, flags), legacy_stream(list == NULL ? NULL : list->hStream), list_key(list))

LAUNCH(cuLaunch, (CUfunction function), (function), CU_STREAM_LEGACY, predict_key(function, 1, 1, 1, 0))
LAUNCH(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height), CU_STREAM_LEGACY,
       predict_key(function, (uint64_t)width, (uint64_t)height, 1, 0))
LAUNCH(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), (function, width, height, stream),
       legacy_stream(stream), predict_key(function, (uint64_t)width, (uint64_t)height, 1, 0))

static CUresult launch_graph(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec exec, CUstream given, CUstream stream) {
  if (meter_is_captured(stream)) return real(exec, given); /* a node of another graph; one with memory cannot be that */
  struct graph_hold hold;
  CUresult result = memory_before_graph(exec, stream, &hold);
  if (result != CUDA_SUCCESS) return result;
  uint64_t key = predict_key(exec, 0, 0, 0, 0);
  bool alone = !meter_pass(stream, key, false) && meter_enter(stream, key, false);
  result = real(exec, given);
  if (alone) meter_leave();
  memory_after_graph(exec, &hold, result);
  return result;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { return launch_graph(REAL(cuGraphLaunch), exec, stream, legacy_stream(stream)); }
CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
  return launch_graph(REAL(cuGraphLaunch_ptsz), exec, stream, own_stream(stream));
}

/* --- copies and fills: those of one call and of sizes within a factor of two are predicted alike */

#define ARGUMENTS_1 a
#define ARGUMENTS_2 ARGUMENTS_1, b
#define ARGUMENTS_3 ARGUMENTS_2, c
#define ARGUMENTS_4 ARGUMENTS_3, d
#define ARGUMENTS_5 ARGUMENTS_4, e
#define ARGUMENTS_6 ARGUMENTS_5, f
#define ARGUMENTS_8 ARGUMENTS_6, g, h
#define ARGUMENTS_9 ARGUMENTS_8, i

#define LEGACY(stream) legacy_stream((CUstream)(stream))
#define OWN(stream) own_stream((CUstream)(stream))

static bool begin_copy(CUstream stream, void *call, word size, bool waits) {
  uint64_t key = predict_key(call, (uint64_t)__builtin_clzll(size | 1), 0, 0, 0);
  if (waits) meter_look(); /* what it waits for is seen to end with it */
  return !meter_pass(stream, key, true) && meter_enter(stream, key, true);
}

static CUresult end_copy(CUresult result, bool alone, bool waits) {
  if (alone) meter_leave();
  if (waits) meter_look();
  return result;
}

#define HOOK(name, parameters)
#define DENY(name, error)
#define COPY(name, count, named, stream, size)                                             \
  CUresult name(WORDS_##count) {                                                           \
    bool waits = #stream[0] == '0', alone = begin_copy(named(stream), &slot_##name, size, waits); \
    return end_copy(REAL(name)(ARGUMENTS_##count), alone, waits);                          \
  }
#define PAUSE(name, count, named)          \
  CUresult name(WORDS_##count) {           \
    meter_stream_waits(named(a));          \
    return REAL(name)(ARGUMENTS_##count);  \
  }
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include "hooks.def"
#undef HOOK
#undef DENY
#undef COPY
#undef PAUSE

/* --- waits: charge work that has ended, and remove the charge of memory that pools released */

static CUresult waited(CUresult result) {
  meter_look();
  memory_settle();
  return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
  meter_look();
  return waited(REAL(cuStreamSynchronize)(stream));
}

CUresult cuStreamSynchronize_ptsz(CUstream stream) {
  meter_look();
  return waited(REAL(cuStreamSynchronize_ptsz)(stream));
}

CUresult cuEventSynchronize(CUevent event) {
  meter_look();
  return waited(REAL(cuEventSynchronize)(event));
}

CUresult cuCtxSynchronize(void) {
  meter_look();
  return waited(REAL(cuCtxSynchronize)());
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
  meter_look();
  return waited(REAL(cuCtxSynchronize_v2)(context));
}

/* A program may ask again and again instead of waiting. */
CUresult cuStreamQuery(CUstream stream) {
  meter_look();
  return REAL(cuStreamQuery)(stream);
}

CUresult cuStreamQuery_ptsz(CUstream stream) {
  meter_look();
  return REAL(cuStreamQuery_ptsz)(stream);
}

CUresult cuEventQuery(CUevent event) {
  meter_look();
  return REAL(cuEventQuery)(event);
}

CUresult cuStreamDestroy(CUstream stream) {
  meter_stream_ends(stream);
  return REAL(cuStreamDestroy)(stream);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  meter_stream_ends(stream);
  return REAL(cuStreamDestroy_v2)(stream);
}

/* --- the current context */

CUresult cuCtxSetCurrent(CUcontext context) {
  meter_moved();
  return REAL(cuCtxSetCurrent)(context);
}

CUresult cuCtxPushCurrent(CUcontext context) {
  meter_moved();
  return REAL(cuCtxPushCurrent)(context);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  meter_moved();
  return REAL(cuCtxPushCurrent_v2)(context);
}

CUresult cuCtxPopCurrent(CUcontext *out) {
  meter_moved();
  return REAL(cuCtxPopCurrent)(out);
}

CUresult cuCtxPopCurrent_v2(CUcontext *out) {
  meter_moved();
  return REAL(cuCtxPopCurrent_v2)(out);
}

/* --- capture */

static CUresult begun(CUresult result) {
  if (result != CUDA_SUCCESS) meter_capture_ended();
  return result;
}

CUresult cuStreamBeginCapture(CUstream stream) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCapture)(stream));
}
CUresult cuStreamBeginCapture_ptsz(CUstream stream) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCapture_ptsz)(stream));
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCapture_v2)(stream, mode));
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCapture_v2_ptsz)(stream, mode));
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                                     size_t count, CUstreamCaptureMode mode) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCaptureToGraph)(stream, graph, after, edges, count, mode));
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                                          size_t count, CUstreamCaptureMode mode) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCaptureToGraph_ptsz)(stream, graph, after, edges, count, mode));
}

/* Its allocations are recorded again. */
static CUresult recaptured(CUgraph graph, CUresult result) {
  if (result == CUDA_SUCCESS) memory_recaptured(graph);
  return result;
}

CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback differs,
                                       void *data) {
  meter_capture_begins();
  return begun(recaptured(graph, REAL(cuStreamBeginRecaptureToGraph)(stream, mode, graph, differs, data)));
}

CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback differs,
                                            void *data) {
  meter_capture_begins();
  return begun(recaptured(graph, REAL(cuStreamBeginRecaptureToGraph_ptsz)(stream, mode, graph, differs, data)));
}

CUresult cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *params) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCaptureToCig)(stream, params));
}

CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, CUstreamCigCaptureParams *params) {
  meter_capture_begins();
  return begun(REAL(cuStreamBeginCaptureToCig_ptsz)(stream, params));
}

/* `was`: whether the stream was being captured before; `capture`: its name. It still is if another stream or thread has to end it. */
static CUresult ended(CUresult result, bool was, uint64_t capture, CUstream stream, CUgraph *out) {
  if (!was || meter_is_captured(stream)) return result;
  meter_capture_ended();
  memory_captured(capture, result == CUDA_SUCCESS ? out : NULL);
  return result;
}

#define END(name, named, parameters, arguments, out)                                 \
  CUresult name parameters {                                                          \
    bool was = meter_is_captured(named(stream));                                      \
    uint64_t capture = was ? memory_capture(named(stream)) : 0;                       \
    return ended(REAL(name) arguments, was, capture, named(stream), out);             \
  }
END(cuStreamEndCapture, legacy_stream, (CUstream stream, CUgraph *out), (stream, out), out)
END(cuStreamEndCapture_ptsz, own_stream, (CUstream stream, CUgraph *out), (stream, out), out)
END(cuStreamEndCaptureToCig, legacy_stream, (CUstream stream), (stream), NULL)
END(cuStreamEndCaptureToCig_ptsz, own_stream, (CUstream stream), (stream), NULL)
