/* Copies and fills in a line. They keep their place in the stream. With the traits for it, those from and to the host take time on
 * their link and the others on the device. Bytes are moved up to a limit: what is larger is only accounted for. Other shapes (2D,
 * 3D, arrays, batches) are not supported. */
#include "driver.h"

#include <string.h>

enum { MOVED = 1 << 20 };

static void *at(CUdeviceptr address) { return (void *)(uintptr_t)address; }

static struct item timed(enum item_kind kind, size_t bytes) {
  const struct world_traits *traits = &driver_world->config.traits;
  int64_t rate = kind == ITEM_WORK ? traits->memory_bps : traits->link_bps;
  if (rate == 0 || bytes == 0) return (struct item){.kind = ITEM_WORK};
  int64_t ns = traits->copy_ns + (int64_t)((double)bytes / (double)rate * 1e9);
  return (struct item){.kind = kind, .left_ns = ns, .width_ppm = traits->width_least_ppm > 0 ? WORLD_WHOLE : 0};
}

/* `sync`: the host waits. */
static CUresult place(CUstream handle, CUstream implied, bool sync, int type, struct item item, bool *now) {
  struct stream *stream;
  uint64_t mark;
  bool capturing;
  *now = false;
  TRY(stream_find(handle, implied, &stream));
  if (sync) REFUSE_IF(capture_forbids(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  TRY(capture_check(stream, &capturing));
  if (capturing) return capture_work(stream, type, item.left_ns);
  TRY(stream_submit(stream, item, &mark));
  if (sync) stream_await(stream, mark);
  *now = true;
  return CUDA_SUCCESS;
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, CUstream implied, bool sync) {
  bool now;
  REFUSE_IF(bytes != 0 && (to == 0 || from == 0 || !heap_known(to) || !heap_known(from)), CUDA_ERROR_INVALID_VALUE);
  bool in = !heap_ours(from), out = !heap_ours(to);
  TRY(place(stream, implied, sync, 1, timed(in ? ITEM_IN : out ? ITEM_OUT : ITEM_WORK, bytes), &now));
  if (now && bytes <= MOVED) memmove(at(to), at(from), bytes);
  return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr to, uint32_t value, size_t width, size_t count, CUstream stream, CUstream implied, bool sync) {
  bool now;
  REFUSE_IF(count != 0 && !heap_ours(to), CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(to % width != 0, CUDA_ERROR_INVALID_VALUE);
  TRY(place(stream, implied, sync, 2, timed(ITEM_WORK, width * count), &now));
  if (!now || count > MOVED / width) return CUDA_SUCCESS;
  for (size_t i = 0; i < count; i++) memcpy((char *)at(to) + i * width, &value, width); /* the low bytes come first */
  return CUDA_SUCCESS;
}

#define BLOCKING(name, parameters, answer) STREAM_CALL_AS(name, _ptds, parameters, answer)

BLOCKING(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes), copy(to, from, bytes, NULL, implied, true))
BLOCKING(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes),
         copy(to, (CUdeviceptr)(uintptr_t)from, bytes, NULL, implied, true))
BLOCKING(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes),
         copy((CUdeviceptr)(uintptr_t)to, from, bytes, NULL, implied, true))
BLOCKING(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes), copy(to, from, bytes, NULL, implied, true))
STREAM_CALL(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
            copy(to, from, bytes, stream, implied, false))
STREAM_CALL(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
            copy(to, (CUdeviceptr)(uintptr_t)from, bytes, stream, implied, false))
STREAM_CALL(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
            copy((CUdeviceptr)(uintptr_t)to, from, bytes, stream, implied, false))
STREAM_CALL(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
            copy(to, from, bytes, stream, implied, false))

BLOCKING(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count), fill(to, value, 1, count, NULL, implied, true))
BLOCKING(cuMemsetD16_v2, (CUdeviceptr to, unsigned short value, size_t count), fill(to, value, 2, count, NULL, implied, true))
BLOCKING(cuMemsetD32_v2, (CUdeviceptr to, unsigned int value, size_t count), fill(to, value, 4, count, NULL, implied, true))
STREAM_CALL(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream),
            fill(to, value, 1, count, stream, implied, false))
STREAM_CALL(cuMemsetD16Async, (CUdeviceptr to, unsigned short value, size_t count, CUstream stream),
            fill(to, value, 2, count, stream, implied, false))
STREAM_CALL(cuMemsetD32Async, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream),
            fill(to, value, 4, count, stream, implied, false))
