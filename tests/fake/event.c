#include "driver.h"

#include <stdlib.h>

static uint16_t spare[WORLD_STAMPS], stamps; /* those of destroyed events, and how many were ever used; the first is nobody's */
static size_t spares;

CUresult cuEventCreate(CUevent *out, unsigned int flags) {
  struct context *context;
  CALL(cuEventCreate);
  REFUSE_IF(out == NULL || flags > 7, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  LOCKED;
  REFUSE_IF(spares == 0 && stamps + 1 == WORLD_STAMPS, CUDA_ERROR_OUT_OF_MEMORY);
  struct event *event = calloc(1, sizeof *event);
  *event = (struct event){.magic = MAGIC_EVENT, .context = context, .flags = flags, .stamp = spares > 0 ? spare[--spares] : ++stamps};
  *out = (CUevent)event;
  return CUDA_SUCCESS;
}

static CUresult destroy(CUevent handle) {
  struct event *event = (struct event *)handle;
  REFUSE_IF(!IS(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
  LOCKED;
  event->magic = MAGIC_DEAD;
  spare[spares++] = event->stamp; /* a record under way may still write it: the next one's is later, and wins */
  free(event);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
  CALL(cuEventDestroy_v2);
  return destroy(event);
}

CUresult cuEventDestroy(CUevent event) {
  CALL(cuEventDestroy);
  return destroy(event);
}

static CUresult record(CUevent handle, CUstream stream_handle, CUstream implied) {
  struct event *event = (struct event *)handle;
  struct stream *stream;
  bool capturing;
  REFUSE_IF(!IS(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
  TRY(stream_find(stream_handle, implied, &stream));
  REFUSE_IF(!context_shares(event->context, stream->context), CUDA_ERROR_INVALID_HANDLE);
  TRY(capture_check(stream, &capturing));
  if (capturing) return capture_record(stream, event);
  const struct world_traits *traits = &driver_world->config.traits;
  world_spend(driver_world, traits->call_ns);
  TRY(stream_submit(stream, (struct item){.kind = ITEM_RECORD, .left_ns = traits->record_ns, .stamp = event->stamp}, &event->mark));
  event->lane = stream->lane;
  event->recorded = true;
  event->capture = NULL;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuEventRecord, (CUevent event, CUstream stream), record(event, stream, implied))
STREAM_CALL(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned int flags),
            flags > 1 ? CUDA_ERROR_INVALID_VALUE : record(event, stream, implied))

static CUresult wait(CUstream stream_handle, CUstream implied, CUevent handle, unsigned int flags) {
  struct event *event = (struct event *)handle;
  struct stream *stream;
  bool capturing;
  REFUSE_IF(flags > 1, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!IS(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
  TRY(stream_find(stream_handle, implied, &stream));
  if (event->capture != NULL) return capture_wait(stream, event);
  TRY(capture_check(stream, &capturing));
  REFUSE_IF(capturing, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  if (!event->recorded) return CUDA_SUCCESS;
  return stream_submit(stream, (struct item){.kind = ITEM_WAIT, .lane = (uint16_t)event->lane, .mark = event->mark}, NULL);
}

STREAM_CALL(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags), wait(stream, implied, event, flags))

static CUresult done(const struct event *event) {
  if (!event->recorded) return CUDA_SUCCESS;
  world_lock(driver_world);
  bool done = driver_self->lanes[event->lane].retired >= event->mark;
  world_unlock(driver_world);
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventQuery(CUevent handle) {
  struct event *event = (struct event *)handle;
  CALL(cuEventQuery);
  REFUSE_IF(!IS(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(capture_forbids(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  TRY(capture_ask(event));
  world_spend(driver_world, driver_world->config.traits.call_ns);
  return done(event);
}

CUresult cuEventSynchronize(CUevent handle) {
  struct event *event = (struct event *)handle;
  CALL(cuEventSynchronize);
  REFUSE_IF(!IS(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(capture_forbids(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  TRY(capture_ask(event));
  if (!event->recorded) return CUDA_SUCCESS;
  world_lock(driver_world);
  world_await(driver_world, driver_self, event->lane, event->mark);
  int device = driver_self->lanes[event->lane].device;
  world_unlock(driver_world);
  pool_synchronized(device);
  return CUDA_SUCCESS;
}

static CUresult elapsed(float *ms, CUevent from_handle, CUevent to_handle) {
  const struct event *from = (const struct event *)from_handle, *to = (const struct event *)to_handle;
  REFUSE_IF(ms == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!IS(from, EVENT) || !IS(to, EVENT) || !from->recorded || !to->recorded, CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(!context_shares(from->context, to->context), CUDA_ERROR_INVALID_HANDLE);
  TRY(done(from));
  TRY(done(to));
  *ms = (float)((double)(driver_self->stamps[to->stamp].ns - driver_self->stamps[from->stamp].ns) / 1e6);
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
  CALL(cuEventElapsedTime);
  return elapsed(ms, from, to);
}

CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to) {
  CALL(cuEventElapsedTime_v2);
  return elapsed(ms, from, to);
}
