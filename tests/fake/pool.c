/* Stream-ordered memory, of a device or of the host. A pool grows by whole chunks, and keeps what is freed until a
 * synchronisation finds more than its threshold. */
#include "driver.h"

#include <stdlib.h>

static struct pool *pools, *defaults[WORLD_DEVICES + 1], *chosen[WORLD_DEVICES + 1]; /* the last are the host's */

static struct pool *new_pool(int device, uint64_t limit) {
  struct pool *pool = calloc(1, sizeof *pool);
  *pool = (struct pool){
      .magic = MAGIC_POOL,
      .heap = {.device = device, .chunk_size = driver_world->config.pool_chunk, .limit = limit, .pooled = true},
      .next = pools,
  };
  return pools = pool;
}

static struct pool *default_of(int device) {
  if (defaults[device] == NULL) defaults[device] = new_pool(device, 0);
  return defaults[device];
}

static struct pool *chosen_of(int device) { return chosen[device] != NULL ? chosen[device] : default_of(device); }

void pool_synchronized(int device) {
  LOCKED;
  for (struct pool *pool = pools; pool != NULL; pool = pool->next)
    if (pool->heap.device == device || pool->heap.device == HEAP_HOST) heap_trim(&pool->heap, pool->heap.keep);
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, struct pool *pool, CUstream handle, CUstream implied) {
  struct stream *stream;
  bool capturing;
  REFUSE_IF(out == NULL || bytes == 0, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, implied, &stream));
  TRY(capture_check(stream, &capturing));
  LOCKED;
  if (pool == NULL) pool = chosen_of(stream->context->device);
  REFUSE_IF(!IS(pool, POOL), CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(capturing && pool->heap.device == HEAP_HOST, CUDA_ERROR_NOT_SUPPORTED);
  if (capturing) return capture_allocate(stream, pool->heap.device, bytes, out);
  struct block *block = heap_allocate(&pool->heap, bytes, stream->lane);
  REFUSE_IF(block == NULL, CUDA_ERROR_OUT_OF_MEMORY);
  *out = block->address;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuMemAllocAsync, (CUdeviceptr *out, size_t bytes, CUstream stream), allocate(out, bytes, NULL, stream, implied))
STREAM_CALL(cuMemAllocFromPoolAsync, (CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream),
            pool == NULL ? CUDA_ERROR_INVALID_VALUE : allocate(out, bytes, (struct pool *)pool, stream, implied))

static CUresult release(CUdeviceptr pointer, CUstream handle, CUstream implied) {
  struct stream *stream;
  uint64_t mark;
  bool capturing;
  TRY(stream_find(handle, implied, &stream));
  TRY(capture_check(stream, &capturing));
  if (capturing) {
    LOCKED;
    return capture_free(stream, pointer);
  }
  {
    LOCKED;
    REFUSE_IF(heap_find(pointer) == NULL && !graph_owns(pointer), CUDA_ERROR_INVALID_VALUE);
  }
  TRY(stream_submit(stream, (struct item){.kind = ITEM_WORK}, &mark));
  LOCKED;
  if (graph_free(pointer)) return CUDA_SUCCESS;
  struct block *block = heap_find(pointer);
  REFUSE_IF(block == NULL, CUDA_ERROR_INVALID_VALUE);
  heap_free(block, stream->lane, mark);
  return CUDA_SUCCESS;
}

STREAM_CALL(cuMemFreeAsync, (CUdeviceptr pointer, CUstream stream), release(pointer, stream, implied))

static bool is_device(CUdevice device) { return device >= 0 && (uint32_t)device < driver_world->config.devices; }

/* Of one NUMA node, which this host has, or of any. */
static CUresult place_of(const CUmemLocation *location, int *place) {
  *place = HEAP_HOST;
  switch (location->type) {
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      return location->id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_DEVICE:
      *place = location->id;
      return is_device(location->id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
  int place;
  CALL(cuMemPoolCreate);
  REFUSE_IF(out == NULL || props == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED && props->allocType != CU_MEM_ALLOCATION_TYPE_MANAGED,
            CUDA_ERROR_INVALID_VALUE);
  struct context *context = context_current();
  if (props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED && props->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    place = context != NULL ? context->device : 0; /* the worst: all of it is there, as if in use */
  else
    TRY(place_of(&props->location, &place));
  LOCKED;
  *out = (CUmemoryPool)new_pool(place, world_granules(driver_world, props->maxSize));
  return CUDA_SUCCESS;
}

/* The real one waits with it until what was allocated is freed; a double that let go of that at once would lie about memory. */
CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  struct pool *pool = (struct pool *)handle;
  CALL(cuMemPoolDestroy);
  REFUSE_IF(!IS(pool, POOL), CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  int device = pool->heap.device;
  REFUSE_IF(pool == defaults[device], CUDA_ERROR_INVALID_VALUE);
  if (chosen[device] == pool) chosen[device] = NULL;
  pool->magic = MAGIC_DEAD;
  pool->heap.keep = 0;
  pool->heap.pooled = false; /* each chunk now goes with the last of its blocks */
  heap_trim(&pool->heap, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
  struct pool *pool = (struct pool *)handle;
  CALL(cuMemPoolTrimTo);
  REFUSE_IF(!IS(pool, POOL), CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  heap_trim(&pool->heap, keep);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
  const struct pool *pool = (const struct pool *)handle;
  CALL(cuMemPoolGetAttribute);
  REFUSE_IF(!IS(pool, POOL) || value == NULL, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  switch ((int)which) {
    case 1: /* how freed memory may be used again: in every way */
    case 2:
    case 3:
      *(int *)value = 1;
      return CUDA_SUCCESS;
    case 4:
      *(uint64_t *)value = pool->heap.keep;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *(uint64_t *)value = pool->heap.reserved;
      return CUDA_SUCCESS;
    case 6:
      *(uint64_t *)value = pool->heap.reserved_high;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *(uint64_t *)value = pool->heap.used;
      return CUDA_SUCCESS;
    case 8:
      *(uint64_t *)value = pool->heap.used_high;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute which, void *value) {
  struct pool *pool = (struct pool *)handle;
  CALL(cuMemPoolSetAttribute);
  REFUSE_IF(!IS(pool, POOL) || value == NULL, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  switch ((int)which) {
    case 4:
      pool->heap.keep = *(const uint64_t *)value;
      return CUDA_SUCCESS;
    case 6: /* the highest marks can only be taken back to the present */
      REFUSE_IF(*(const uint64_t *)value != 0, CUDA_ERROR_INVALID_VALUE);
      pool->heap.reserved_high = pool->heap.reserved;
      return CUDA_SUCCESS;
    case 8:
      REFUSE_IF(*(const uint64_t *)value != 0, CUDA_ERROR_INVALID_VALUE);
      pool->heap.used_high = pool->heap.used;
      return CUDA_SUCCESS;
    default:
      return which >= 1 && which <= 3 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  }
}

/* The pool that cuMemAllocAsync takes from. */

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
  CALL(cuDeviceGetDefaultMemPool);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  *out = (CUmemoryPool)default_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) {
  CALL(cuDeviceGetMemPool);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  *out = (CUmemoryPool)chosen_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
  CALL(cuDeviceSetMemPool);
  REFUSE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(!IS(pool, POOL) || ((struct pool *)pool)->heap.device != device, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  chosen[device] = (struct pool *)pool;
  return CUDA_SUCCESS;
}

/* The same by location and kind of memory, which here is always pinned. */

static CUresult at(const CUmemLocation *location, int type, int *place) {
  REFUSE_IF(location == NULL || type != 1, CUDA_ERROR_INVALID_VALUE);
  return place_of(location, place);
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
  int place;
  CALL(cuMemGetDefaultMemPool);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(at(location, type, &place));
  LOCKED;
  *out = (CUmemoryPool)default_of(place);
  return CUDA_SUCCESS;
}

CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type) {
  int place;
  CALL(cuMemGetMemPool);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(at(location, type, &place));
  LOCKED;
  *out = (CUmemoryPool)chosen_of(place);
  return CUDA_SUCCESS;
}

CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool pool) {
  int place;
  CALL(cuMemSetMemPool);
  TRY(at(location, type, &place));
  REFUSE_IF(!IS(pool, POOL) || ((struct pool *)pool)->heap.device != place, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  chosen[place] = (struct pool *)pool;
  return CUDA_SUCCESS;
}
