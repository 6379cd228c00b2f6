/* Launches: granted in portions and measured. Captures are tracked, and not disturbed. */
#include "meter.h"

#define BLOCKS(x, y, z) ((uint64_t)(x) * (uint64_t)(y) * (uint64_t)(z))

/* A call that launches `key` on `stream`. Both paths end with a jump, so the arguments on the stack are not copied. */
#define LAUNCH(name, parameters, arguments, stream, key, blocks)                                             \
  static __attribute__((noinline)) CUresult name##_the_long_way parameters {                                 \
    if (!meter_enter(stream, key, blocks)) return REAL(name) arguments;                                      \
    CUresult result = REAL(name) arguments;                                                                  \
    meter_leave(stream);                                                                                     \
    return result;                                                                                           \
  }                                                                                                          \
  CUresult name parameters {                                                                                 \
    if (__builtin_expect(meter_pass(stream, key, blocks), true)) return REAL(name) arguments;                \
    return name##_the_long_way arguments;                                                                    \
  }

#define KERNEL(name, named)                                                                                              \
  LAUNCH(name,                                                                                                           \
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,      \
          unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra),                           \
         (function, gx, gy, gz, bx, by, bz, shared, stream, params, extra), named(stream), function, BLOCKS(gx, gy, gz))
KERNEL(cuLaunchKernel, legacy_stream)
KERNEL(cuLaunchKernel_ptsz, own_stream)

#define COOPERATIVE(name, named)                                                                                         \
  LAUNCH(name,                                                                                                           \
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,      \
          unsigned int bz, unsigned int shared, CUstream stream, void **params),                                         \
         (function, gx, gy, gz, bx, by, bz, shared, stream, params), named(stream), function, BLOCKS(gx, gy, gz))
COOPERATIVE(cuLaunchCooperativeKernel, legacy_stream)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, own_stream)

static const CUlaunchConfig no_config; /* the driver refuses none itself */

#define EXTENDED(name, named)                                                                                      \
  LAUNCH(name, (const CUlaunchConfig *config, CUfunction function, void **params, void **extra),                   \
         (config, function, params, extra), named(CONFIG->hStream), function,                                      \
         BLOCKS(CONFIG->gridDimX, CONFIG->gridDimY, CONFIG->gridDimZ))
#define CONFIG (config == NULL ? &no_config : config)
EXTENDED(cuLaunchKernelEx, legacy_stream)
EXTENDED(cuLaunchKernelEx_ptsz, own_stream)

/* Each part of it runs in the context of its own stream; only the current context can be charged here. */
static const CUDA_LAUNCH_PARAMS no_list;
#define LIST (list == NULL ? &no_list : list)
LAUNCH(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS * list, unsigned int count, unsigned int flags),
       (list, count, flags), legacy_stream(LIST->hStream), LIST->function,
       BLOCKS(LIST->gridDimX, LIST->gridDimY, LIST->gridDimZ))

LAUNCH(cuLaunch, (CUfunction function), (function), CU_STREAM_LEGACY, function, 1)
LAUNCH(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height), CU_STREAM_LEGACY, function,
       BLOCKS(width, height, 1))
LAUNCH(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), (function, width, height, stream),
       legacy_stream(stream), function, BLOCKS(width, height, 1))

#define GRAPH(name, named)                                             \
  CUresult name(CUgraphExec exec, CUstream stream) {                   \
    struct graph_hold hold;                                            \
    CUresult result = memory_before_graph(exec, &hold);                \
    if (result != CUDA_SUCCESS) return result;                         \
    bool alone = !meter_pass(named(stream), exec, 0) && meter_enter(named(stream), exec, 0); \
    result = REAL(name)(exec, stream);                                 \
    if (alone) meter_leave(named(stream));                             \
    memory_after_graph(exec, hold, result);                            \
    return result;                                                     \
  }
GRAPH(cuGraphLaunch, legacy_stream)
GRAPH(cuGraphLaunch_ptsz, own_stream)

/* --- waits: charge work that has ended, and remove the charge of memory that pools released */

#define WAITED(all, call)       \
  do {                          \
    CUresult result_ = (call);  \
    meter_settle(all);          \
    memory_settle();            \
    return result_;             \
  } while (0)

CUresult cuStreamSynchronize(CUstream stream) { WAITED(false, REAL(cuStreamSynchronize)(stream)); }
CUresult cuStreamSynchronize_ptsz(CUstream stream) { WAITED(false, REAL(cuStreamSynchronize_ptsz)(stream)); }
CUresult cuEventSynchronize(CUevent event) { WAITED(false, REAL(cuEventSynchronize)(event)); }
CUresult cuCtxSynchronize(void) { WAITED(true, REAL(cuCtxSynchronize)()); }
CUresult cuCtxSynchronize_v2(CUcontext context) { WAITED(true, REAL(cuCtxSynchronize_v2)(context)); }

#define ENDED(name)                \
  CUresult name(CUstream stream) { \
    meter_stream_ends(stream);     \
    return REAL(name)(stream);     \
  }
ENDED(cuStreamDestroy)
ENDED(cuStreamDestroy_v2)

/* --- the current context */

#define MOVED(call)             \
  do {                          \
    meter_moved();              \
    return (call);              \
  } while (0)

CUresult cuCtxSetCurrent(CUcontext context) { MOVED(REAL(cuCtxSetCurrent)(context)); }
CUresult cuCtxPushCurrent(CUcontext context) { MOVED(REAL(cuCtxPushCurrent)(context)); }
CUresult cuCtxPushCurrent_v2(CUcontext context) { MOVED(REAL(cuCtxPushCurrent_v2)(context)); }
CUresult cuCtxPopCurrent(CUcontext *out) { MOVED(REAL(cuCtxPopCurrent)(out)); }
CUresult cuCtxPopCurrent_v2(CUcontext *out) { MOVED(REAL(cuCtxPopCurrent_v2)(out)); }

/* --- capture */

#define CAPTURE(stream, call)                            \
  do {                                                   \
    meter_capture_begins(stream);                        \
    CUresult result_ = (call);                           \
    if (result_ != CUDA_SUCCESS) meter_capture_ended();  \
    return result_;                                      \
  } while (0)

CUresult cuStreamBeginCapture(CUstream stream) { CAPTURE(legacy_stream(stream), REAL(cuStreamBeginCapture)(stream)); }
CUresult cuStreamBeginCapture_ptsz(CUstream stream) { CAPTURE(own_stream(stream), REAL(cuStreamBeginCapture_ptsz)(stream)); }

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  CAPTURE(legacy_stream(stream), REAL(cuStreamBeginCapture_v2)(stream, mode));
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  CAPTURE(own_stream(stream), REAL(cuStreamBeginCapture_v2_ptsz)(stream, mode));
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                                     size_t count, CUstreamCaptureMode mode) {
  CAPTURE(legacy_stream(stream), REAL(cuStreamBeginCaptureToGraph)(stream, graph, after, edges, count, mode));
}

CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                                          size_t count, CUstreamCaptureMode mode) {
  CAPTURE(own_stream(stream), REAL(cuStreamBeginCaptureToGraph_ptsz)(stream, graph, after, edges, count, mode));
}

/* Its allocations are recorded again. */
static CUresult recaptured(CUgraph graph, CUresult result) {
  if (result == CUDA_SUCCESS) memory_recaptured(graph);
  return result;
}

CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback differs,
                                       void *data) {
  CAPTURE(legacy_stream(stream), recaptured(graph, REAL(cuStreamBeginRecaptureToGraph)(stream, mode, graph, differs, data)));
}

CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback differs,
                                            void *data) {
  CAPTURE(own_stream(stream), recaptured(graph, REAL(cuStreamBeginRecaptureToGraph_ptsz)(stream, mode, graph, differs, data)));
}

CUresult cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *params) {
  CAPTURE(legacy_stream(stream), REAL(cuStreamBeginCaptureToCig)(stream, params));
}

CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, CUstreamCigCaptureParams *params) {
  CAPTURE(own_stream(stream), REAL(cuStreamBeginCaptureToCig_ptsz)(stream, params));
}

#define CAPTURED(stream, out, call)                                              \
  do {                                                                           \
    bool was_ = meter_is_captured(stream);                                       \
    CUresult result_ = (call);                                                   \
    was_ = was_ && !meter_is_captured(stream); /* else another stream or thread has to end it */ \
    if (was_) meter_capture_ended();                                             \
    if (was_ && result_ == CUDA_SUCCESS && (out) != NULL) memory_captured(*(out)); \
    return result_;                                                              \
  } while (0)

CUresult cuStreamEndCapture(CUstream stream, CUgraph *out) {
  CAPTURED(legacy_stream(stream), out, REAL(cuStreamEndCapture)(stream, out));
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *out) {
  CAPTURED(own_stream(stream), out, REAL(cuStreamEndCapture_ptsz)(stream, out));
}

#define NO_GRAPH ((CUgraph *)NULL)
CUresult cuStreamEndCaptureToCig(CUstream stream) {
  CAPTURED(legacy_stream(stream), NO_GRAPH, REAL(cuStreamEndCaptureToCig)(stream));
}

CUresult cuStreamEndCaptureToCig_ptsz(CUstream stream) {
  CAPTURED(own_stream(stream), NO_GRAPH, REAL(cuStreamEndCaptureToCig_ptsz)(stream));
}
