#include "driver.h"

#include <stdlib.h>

static _Thread_local struct {
  const struct context *context;
  uint32_t number;
  struct stream *stream;
} own[WORLD_DEVICES]; /* this thread's default streams */

enum { STREAMS = 32, STREAMS_BYTES = 18 << 20 }; /* what so many streams of a context take: measured */

/* What was taken for streams stays until their context ends. */
static bool has_channel(struct context *context) {
  if (context->open / STREAMS < context->channels) return true;
  world_lock(driver_world);
  bool taken = context->open < STREAMS || world_take(driver_world, driver_self, context->device, STREAMS_BYTES);
  world_unlock(driver_world);
  context->channels += taken;
  return taken;
}

static struct stream *open_stream(struct context *context, enum lane_kind kind, unsigned int flags, int priority) {
  if (!has_channel(context)) return NULL;
  world_lock(driver_world);
  uint32_t lane = world_open_lane(driver_self, context->device, context->number, kind);
  if (lane < WORLD_LANES) driver_self->lanes[lane].part_ppm = context->part_ppm;
  world_unlock(driver_world);
  struct stream *stream = lane < WORLD_LANES ? calloc(1, sizeof *stream) : NULL;
  if (stream == NULL) return NULL;
  *stream = (struct stream){.magic = MAGIC_STREAM, .context = context, .lane = lane, .flags = flags, .priority = priority};
  stream->next = context->streams;
  context->open++;
  return context->streams = stream;
}

static struct stream *per_thread(struct context *context) {
  size_t free = WORLD_DEVICES;
  for (size_t i = 0; i < WORLD_DEVICES; i++) {
    if (own[i].context == context && own[i].number == context->number) return own[i].stream;
    if (own[i].stream == NULL || own[i].context == context || !IS(own[i].context, CONTEXT)) free = i;
  }
  LOCKED;
  struct stream *stream = free < WORLD_DEVICES ? open_stream(context, LANE_BLOCKING, 0, 0) : NULL;
  if (stream == NULL) return NULL;
  own[free].context = context;
  own[free].number = context->number;
  return own[free].stream = stream;
}

static struct stream *legacy(struct context *context) {
  LOCKED;
  if (context->legacy == NULL) context->legacy = open_stream(context, LANE_LEGACY, 0, 0);
  return context->legacy;
}

CUresult stream_find(CUstream handle, CUstream implied, struct stream **out) {
  struct context *context;
  TRY(context_need(&context));
  if (handle == NULL) handle = implied;
  if (handle == CU_STREAM_LEGACY)
    *out = legacy(context);
  else if (handle == CU_STREAM_PER_THREAD)
    *out = per_thread(context);
  else if (IS(handle, STREAM))
    *out = (struct stream *)handle;
  else
    return CUDA_ERROR_INVALID_HANDLE;
  return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult stream_submit(struct stream *stream, struct item item, uint64_t *mark) {
  world_lock(driver_world);
  uint64_t at = world_submit(driver_world, driver_self, stream->lane, item);
  world_unlock(driver_world);
  if (mark != NULL) *mark = at;
  return CUDA_SUCCESS;
}

void stream_await(const struct stream *stream, uint64_t mark) {
  world_lock(driver_world);
  world_await(driver_world, driver_self, stream->lane, mark);
  world_unlock(driver_world);
}

static void close_lane(const struct stream *stream) {
  world_lock(driver_world);
  driver_self->lanes[stream->lane].kind = LANE_UNUSED;
  world_unlock(driver_world);
}

void stream_free_all(struct context *context) {
  for (struct stream *stream = context->streams; stream != NULL; stream = stream->next) {
    close_lane(stream);
    stream->magic = MAGIC_DEAD;
  }
  context->streams = context->legacy = NULL;
  world_lock(driver_world);
  if (context->channels > 1) world_give(driver_world, driver_self, context->device, (context->channels - 1) * STREAMS_BYTES);
  world_unlock(driver_world);
}

CUresult stream_create(CUstream *out, struct context *context, unsigned int flags, int priority) {
  REFUSE_IF(out == NULL || flags > 1, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  struct stream *stream = open_stream(context, flags ? LANE_NON_BLOCKING : LANE_BLOCKING, flags, priority);
  *out = (CUstream)stream;
  return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags) {
  struct context *context;
  CALL(cuStreamCreate);
  TRY(context_need(&context));
  return stream_create(out, context, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) {
  struct context *context;
  CALL(cuStreamCreateWithPriority);
  TRY(context_need(&context));
  return stream_create(out, context, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  struct stream *stream = (struct stream *)handle;
  CALL(cuStreamDestroy_v2);
  REFUSE_IF(handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD || !IS(stream, STREAM),
            CUDA_ERROR_INVALID_HANDLE);
  LOCKED;
  REFUSE_IF(stream->capture != NULL, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* its capture would have no end */
  close_lane(stream);                                                        /* what is in it still runs */
  stream->magic = MAGIC_DEAD;
  stream->context->open--;
  for (struct stream **s = &stream->context->streams; *s != NULL; s = &(*s)->next)
    if (*s == stream) {
      *s = stream->next;
      break;
    }
  return CUDA_SUCCESS;
}

static bool reached(uint32_t lane, uint64_t mark) {
  world_lock(driver_world);
  bool done = driver_self->lanes[lane].retired >= mark;
  world_unlock(driver_world);
  return done;
}

static CUresult query(CUstream handle, CUstream implied) {
  struct stream *stream;
  TRY(stream_find(handle, implied, &stream));
  TRY(capture_touch(stream));
  world_spend(driver_world, driver_world->config.traits.call_ns);
  return reached(stream->lane, driver_self->lanes[stream->lane].submitted) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

STREAM_CALL(cuStreamQuery, (CUstream stream), query(stream, implied))

static CUresult synchronize(CUstream handle, CUstream implied) {
  struct stream *stream;
  TRY(stream_find(handle, implied, &stream));
  TRY(capture_touch(stream));
  stream_await(stream, driver_self->lanes[stream->lane].submitted);
  pool_synchronized(stream->context->device);
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamSynchronize, (CUstream stream), synchronize(stream, implied))

static CUresult context_of(CUstream handle, CUstream implied, CUcontext *out) {
  struct stream *stream;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  *out = (CUcontext)stream->context;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamGetCtx, (CUstream stream, CUcontext *out), context_of(stream, implied, out))

static CUresult number_of(CUstream handle, CUstream implied, unsigned long long *out) {
  struct stream *stream;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  *out = stream->lane + 1;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamGetId, (CUstream stream, unsigned long long *out), number_of(stream, implied, out))

static CUresult device_of(CUstream handle, CUstream implied, CUdevice *out) {
  struct stream *stream;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  *out = stream->context->device;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamGetDevice, (CUstream stream, CUdevice *out), device_of(stream, implied, out))

static CUresult flags_of(CUstream handle, CUstream implied, unsigned int *out) {
  struct stream *stream;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  *out = stream->flags;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamGetFlags, (CUstream stream, unsigned int *out), flags_of(stream, implied, out))

static CUresult priority_of(CUstream handle, CUstream implied, int *out) {
  struct stream *stream;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  *out = stream->priority;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuStreamGetPriority, (CUstream stream, int *out), priority_of(stream, implied, out))
