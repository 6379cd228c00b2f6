/* Capture of what is put into streams, and its rules: what they forbid, they forbid by ending the capture. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

enum { THREAD_LOCAL = 1, INVALIDATED = 2 };

struct capture {
  struct stream *origin;
  struct graph *graph;
  bool own_graph; /* not the caller's */
  CUstreamCaptureMode mode;
  CUstreamCaptureStatus status;
  const void *thread;
  uint64_t id;
  struct capture *next;
};

static struct capture *captures;
static _Atomic unsigned int count; /* of them, for those who only ask whether there are any */
static _Thread_local CUstreamCaptureMode thread_mode;

static const void *this_thread(void) { return &thread_mode; }

static void invalidate(struct capture *capture) { capture->status = (CUstreamCaptureStatus)INVALIDATED; }

bool capture_forbids(void) {
  bool forbidden = false;
  if (count == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  LOCKED;
  for (struct capture *c = captures; c != NULL; c = c->next) {
    bool local = c->thread == this_thread();
    bool minds = local ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                       : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!minds || c->status != CU_STREAM_CAPTURE_STATUS_ACTIVE) continue;
    invalidate(c);
    forbidden = true;
  }
  return forbidden;
}

bool capture_ends_in(const struct context *context) {
  bool any = false;
  if (count == 0) return false;
  LOCKED;
  for (struct capture *c = captures; c != NULL; c = c->next) {
    if (c->origin->context != context) continue;
    invalidate(c);
    any = true;
  }
  return any;
}

/* Work in the default stream would have to wait for the capture, or it for that. */
static bool implies(const struct stream *stream, bool ends) {
  bool found = false;
  if (driver_self->lanes[stream->lane].kind != LANE_LEGACY) return false;
  for (struct stream *s = stream->context->streams; s != NULL; s = s->next) {
    if (s->capture == NULL || driver_self->lanes[s->lane].kind != LANE_BLOCKING) continue;
    if (ends) invalidate(s->capture);
    found = true;
  }
  return found;
}

CUresult capture_check(struct stream *stream, bool *capturing) {
  *capturing = false;
  if (count == 0) return CUDA_SUCCESS;
  LOCKED;
  REFUSE_IF(implies(stream, true), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  if (stream->capture == NULL) return CUDA_SUCCESS;
  REFUSE_IF(stream->capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  *capturing = true;
  return CUDA_SUCCESS;
}

CUresult capture_touch(struct stream *stream) {
  if (count == 0) return CUDA_SUCCESS;
  {
    LOCKED;
    REFUSE_IF(implies(stream, true), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (stream->capture != NULL) {
      invalidate(stream->capture);
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
  }
  return capture_forbids() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static CUresult follow(struct stream *stream, struct node *node) {
  REFUSE_IF(node == NULL, CUDA_ERROR_INVALID_VALUE);
  stream->front = (struct front){.nodes = {node}, .count = 1};
  return CUDA_SUCCESS;
}

CUresult capture_work(struct stream *stream, int type, int64_t ns) {
  REFUSE_IF(type == NODE_HOST, CUDA_ERROR_NOT_SUPPORTED);
  LOCKED;
  struct node *node = graph_add(stream->capture->graph, (enum node_type)type, stream->front.nodes, stream->front.count);
  node->ns = ns;
  return follow(stream, node);
}

CUresult capture_allocate(struct stream *stream, int device, uint64_t bytes, CUdeviceptr *out) {
  struct node *node = graph_allocate(stream->capture->graph, device, bytes, stream->front.nodes, stream->front.count);
  REFUSE_IF(node == NULL, CUDA_ERROR_OUT_OF_MEMORY);
  *out = node->grant->address;
  return follow(stream, node);
}

CUresult capture_free(struct stream *stream, CUdeviceptr pointer) {
  return follow(stream, graph_release(stream->capture->graph, pointer, stream->front.nodes, stream->front.count));
}

CUresult capture_record(struct stream *stream, struct event *event) {
  LOCKED;
  event->capture = stream->capture;
  event->capture_id = stream->capture->id;
  event->front = stream->front;
  return CUDA_SUCCESS;
}

static bool has(const struct front *front, const struct node *node) {
  for (size_t i = 0; i < front->count; i++)
    if (front->nodes[i] == node) return true;
  return false;
}

static struct capture *recorder_of(const struct event *event) {
  struct capture *capture = captures;
  while (capture != NULL && capture->id != event->capture_id) capture = capture->next;
  return capture;
}

CUresult capture_ask(const struct event *event) {
  if (event->capture == NULL) return CUDA_SUCCESS;
  LOCKED;
  struct capture *capture = recorder_of(event);
  REFUSE_IF(capture == NULL, CUDA_ERROR_INVALID_VALUE);
  invalidate(capture);
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult capture_wait(struct stream *stream, struct event *event) {
  LOCKED;
  struct capture *capture = recorder_of(event);
  REFUSE_IF(capture == NULL, CUDA_ERROR_CAPTURED_EVENT);
  REFUSE_IF(capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  REFUSE_IF(driver_self->lanes[stream->lane].kind == LANE_LEGACY, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  if (stream->capture != NULL && stream->capture != capture) {
    invalidate(capture);
    invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (stream->capture == NULL) stream->front.count = 0;
  stream->capture = capture;
  for (size_t i = 0; i < event->front.count; i++) {
    if (has(&stream->front, event->front.nodes[i])) continue;
    REFUSE_IF(stream->front.count == FRONT, CUDA_ERROR_NOT_SUPPORTED);
    stream->front.nodes[stream->front.count++] = event->front.nodes[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  CALL(cuThreadExchangeStreamCaptureMode);
  REFUSE_IF(mode == NULL || (int)*mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
  CUstreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, CUstream implied, CUstreamCaptureMode mode, CUgraph into, const CUgraphNode *after,
                      size_t after_count) {
  static uint64_t ids;
  struct stream *stream;
  REFUSE_IF((int)mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED || after_count > FRONT, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(into != NULL && !IS(into, GRAPH), CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  LOCKED;
  REFUSE_IF(driver_self->lanes[stream->lane].kind == LANE_LEGACY, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  REFUSE_IF(stream->capture != NULL, CUDA_ERROR_ILLEGAL_STATE);
  struct capture *capture = calloc(1, sizeof *capture);
  *capture = (struct capture){
      .origin = stream,
      .graph = into != NULL ? (struct graph *)into : graph_new(),
      .own_graph = into == NULL,
      .mode = mode,
      .status = CU_STREAM_CAPTURE_STATUS_ACTIVE,
      .thread = this_thread(),
      .id = ++ids,
      .next = captures,
  };
  captures = capture;
  count++;
  stream->capture = capture;
  stream->front = (struct front){.count = after_count};
  if (after_count > 0) memcpy(stream->front.nodes, after, after_count * sizeof *after);
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamBeginCapture, (CUstream stream), begin(stream, implied, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0))
STREAM_CALL(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), begin(stream, implied, mode, NULL, NULL, 0))
STREAM_CALL(cuStreamBeginCaptureToGraph,
            (CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t after_count,
             CUstreamCaptureMode mode),
            graph == NULL   ? CUDA_ERROR_INVALID_VALUE
            : edges != NULL ? CUDA_ERROR_NOT_SUPPORTED
                            : begin(stream, implied, mode, graph, after, after_count))

static CUresult finish(struct capture *capture, struct graph **out) {
  CUresult answer = capture->status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  const struct front *end = &capture->origin->front;
  for (struct stream *s = capture->origin->context->streams; s != NULL; s = s->next) {
    if (s->capture != capture) continue;
    if (answer == CUDA_SUCCESS && !graph_ends_with(capture->graph, &s->front, end)) answer = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    s->capture = NULL;
  }
  for (struct capture **c = &captures; *c != NULL; c = &(*c)->next)
    if (*c == capture) {
      *c = capture->next;
      break;
    }
  count--;
  *out = answer == CUDA_SUCCESS ? capture->graph : NULL;
  if (answer != CUDA_SUCCESS && capture->own_graph) graph_delete(capture->graph);
  free(capture);
  return answer;
}

static CUresult end(CUstream handle, CUstream implied, CUgraph *out) {
  struct stream *stream;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  LOCKED;
  struct capture *capture = stream->capture;
  *out = NULL;
  REFUSE_IF(capture == NULL, CUDA_ERROR_ILLEGAL_STATE);
  REFUSE_IF(capture->origin != stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  REFUSE_IF(capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != this_thread(),
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  return finish(capture, (struct graph **)(void *)out);
}

STREAM_CALL(cuStreamEndCapture, (CUstream stream, CUgraph *out), end(stream, implied, out))

/* Whatever is asked for may be left out. */
static CUresult info(CUstream handle, CUstream implied, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                     const CUgraphNode **after, size_t *after_count) {
  struct stream *stream;
  REFUSE_IF(status == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  LOCKED;
  REFUSE_IF(implies(stream, false), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  const struct capture *capture = stream->capture;
  *status = capture != NULL ? capture->status : CU_STREAM_CAPTURE_STATUS_NONE;
  if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
  if (id != NULL) *id = capture->id;
  if (graph != NULL) *graph = (CUgraph)capture->graph;
  if (after != NULL) *after = (const CUgraphNode *)(const void *)stream->front.nodes;
  if (after_count != NULL) *after_count = stream->front.count;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status),
            info(stream, implied, status, NULL, NULL, NULL, NULL))
STREAM_CALL(cuStreamGetCaptureInfo, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id),
            info(stream, implied, status, id, NULL, NULL, NULL))
STREAM_CALL(cuStreamGetCaptureInfo_v2,
            (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **after,
             size_t *after_count),
            info(stream, implied, status, id, graph, after, after_count))
STREAM_CALL(cuStreamGetCaptureInfo_v3,
            (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **after,
             const CUgraphEdgeData **edges, size_t *after_count),
            (edges != NULL ? (void)(*edges = NULL) : (void)0, info(stream, implied, status, id, graph, after, after_count)))
