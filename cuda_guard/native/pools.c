/* Pools: charged for what they have reserved, used or not. */
#include "pools.h"

static struct table pools = TABLE_EMPTY; /* pool -> units charged for what it has reserved */
static pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t pool_step = CHUNK; /* common divisor of all growth observed so far */

static uint64_t pool_attribute(uint64_t pool, CUmemPool_attribute attribute) {
  uint64_t value = 0;
  return DRIVER(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)pool, attribute, &value) == CUDA_SUCCESS ? value : 0;
}

static uint64_t graph_memory(CUdevice device) {
  uint64_t value = 0;
  return DRIVER(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &value) == CUDA_SUCCESS ? value : 0;
}

/* The memory of a device's graphs is a pool without a handle: this is its key. */
#define GRAPH_POOL(device) ((uint64_t)(device)*2 + 1)
#define IS_GRAPH_POOL(key) ((key) & 1)

static void settle_pool(struct entry *entry, void *with) {
  (void)with;
  uint64_t bytes = IS_GRAPH_POOL(entry->key) ? graph_memory((CUdevice)(entry->key / 2))
                                             : pool_attribute(entry->key, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
  int64_t units = units_for(bytes);
  if (entry->device >= 0 && units != entry->units) (void)memory_change(entry->device, units - entry->units, true);
  entry->units = units;
}

void memory_settle(void) {
  if (pools.used == 0) return;
  (void)pthread_mutex_lock(&pool_mutex);
  table_each(&pools, settle_pool, NULL);
  (void)pthread_mutex_unlock(&pool_mutex);
}

static size_t divisor(size_t a, size_t b) { return b == 0 ? a : divisor(b, a % b); }

/* Returns the pool's entry on `device`; creates it on first use. */
static struct entry pool_entry(uint64_t pool, int device) {
  struct entry entry = table_get(&pools, pool);
  if (entry.key != 0) return entry;
  entry = (struct entry){.key = pool, .device = device};
  settle_pool(&entry, NULL);
  (void)table_put(&pools, entry);
  return entry;
}

static uint64_t unused_in(uint64_t pool) {
  return pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) - pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
}

/* Units by which a pool may grow, so that it has so many bytes more. */
static int64_t growth(size_t bytes) {
  return units_for(bytes > SIZE_MAX - pool_step ? SIZE_MAX : (bytes + pool_step - 1) / pool_step * pool_step);
}

/* The wait would invalidate a capture of this thread, but in the relaxed mode. */
static void take_back(CUdeviceptr pointer, uint64_t pool, CUstream stream) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged = DRIVER(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
  (void)DRIVER(cuMemFreeAsync)(pointer, stream);
  (void)REAL(cuStreamSynchronize)(stream);
  (void)REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool, 0);
  if (exchanged) (void)DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
}

typedef CUresult pool_call(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream);

static CUresult real_async(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  (void)pool; /* it is that of the stream's device */
  return REAL(cuMemAllocAsync)(out, bytes, stream);
}

static CUresult real_from_pool(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  return REAL(cuMemAllocFromPoolAsync)(out, bytes, pool, stream);
}

/* Serialized: the growth of a pool can be measured only if no other thread makes it grow. */
static CUresult allocate(pool_call *real, CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream, int device) {
  if (meter_is_captured(stream)) {
    CUresult result = real(out, bytes, pool, stream);
    if (result == CUDA_SUCCESS) graphs_captured(stream, device, units_for(bytes));
    return result;
  }
  guard_wait();
  (void)pthread_mutex_lock(&pool_mutex);
  struct entry entry = pool_entry(id(pool), device);
  int64_t held = growth(bytes);
  if (entry.device >= 0 && !memory_change(entry.device, held, false)) {
    table_each(&pools, settle_pool, NULL);
    guard_sweep();
    entry = table_get(&pools, entry.key);
    if (!memory_change(entry.device, held, false)) {
      uint64_t unused = unused_in(entry.key); /* what is allocated may span that and what the pool grows by */
      held = unused < bytes ? growth(bytes - unused) : 0;
      if (held > 0 && !memory_change(entry.device, held, false)) {
        atomic_fetch_add(&guard_job->uses[entry.device].refused, 1);
        (void)pthread_mutex_unlock(&pool_mutex);
        return CUDA_ERROR_OUT_OF_MEMORY;
      }
    }
  }
  CUresult result = real(out, bytes, pool, stream);
  int64_t units = units_for(pool_attribute(entry.key, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
  if (units > entry.units) pool_step = divisor(pool_step, (size_t)(units - entry.units) * GUARD_UNIT);
  bool allowed = entry.device < 0 || units - entry.units <= held || memory_change(entry.device, units - entry.units - held, false);
  if (allowed && entry.device >= 0 && units - entry.units < held) memory_give_back(entry.device, held - (units - entry.units));
  if (allowed) {
    entry.units = units;
    (void)table_put(&pools, entry);
  } else {
    if (result == CUDA_SUCCESS) take_back(*out, entry.key, stream);
    memory_give_back(entry.device, held);
    table_each(&pools, settle_pool, NULL);
    atomic_fetch_add(&guard_job->uses[entry.device].refused, 1);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  (void)pthread_mutex_unlock(&pool_mutex);
  return result;
}

static CUresult allocate_from_default(CUdeviceptr *out, size_t bytes, CUstream stream) {
  CUmemoryPool pool;
  int device;
  bool stepped = guard_step_into(stream);
  CUresult result = guard_current(&device);
  guard_step_out(stepped);
  if (result != CUDA_SUCCESS) return result;
  if (out == NULL) return CUDA_ERROR_INVALID_VALUE;
  result = REAL(cuDeviceGetMemPool)(&pool, guard_number(device));
  return result == CUDA_SUCCESS ? allocate(real_async, out, bytes, pool, stream, device) : result;
}

static CUresult allocate_from(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  int device = -1;
  CUresult result = guard_current(&device);
  if (result != CUDA_SUCCESS) return result;
  if (out == NULL) return CUDA_ERROR_INVALID_VALUE;
  struct entry known = table_get(&pools, id(pool));
  return allocate(real_from_pool, out, bytes, pool, stream, known.key != 0 ? known.device : device);
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
  return allocate_from_default(out, bytes, legacy_stream(stream));
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream) {
  return allocate_from_default(out, bytes, own_stream(stream));
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  return allocate_from(out, bytes, pool, legacy_stream(stream));
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  return allocate_from(out, bytes, pool, own_stream(stream));
}

static CUresult meet_pool(CUresult result, const CUmemoryPool *pool, int device) {
  if (result != CUDA_SUCCESS) return result;
  (void)pthread_mutex_lock(&pool_mutex);
  (void)pool_entry(id(*pool), device);
  (void)pthread_mutex_unlock(&pool_mutex);
  return result;
}

/* Registers a device's pool on first use, only for the job's devices. */
static CUresult pool_of(CUresult (*real)(CUmemoryPool *, CUdevice), CUmemoryPool *out, CUdevice number) {
  guard_load();
  int device = -1;
  CUresult result = guard_policy == NULL || number < 0 ? CUDA_SUCCESS : guard_place(number, &device);
  return result != CUDA_SUCCESS ? result : meet_pool(real(out, number), out, device);
}

typedef CUresult located_call(CUmemoryPool *out, CUmemLocation *where, CUmemAllocationType type);

static CUresult pool_at(located_call *real, CUmemoryPool *out, CUmemLocation *where, CUmemAllocationType type) {
  guard_load();
  int device = -1;
  CUresult result = where == NULL ? CUDA_SUCCESS : memory_place(where, (int)type, &device);
  return result != CUDA_SUCCESS ? result : meet_pool(real(out, where, type), out, device);
}

CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) { return pool_of(REAL(cuDeviceGetMemPool), out, device); }

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
  return pool_of(REAL(cuDeviceGetDefaultMemPool), out, device);
}

CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *where, CUmemAllocationType type) {
  return pool_at(REAL(cuMemGetMemPool), out, where, type);
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *where, CUmemAllocationType type) {
  return pool_at(REAL(cuMemGetDefaultMemPool), out, where, type);
}

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props) {
  guard_load();
  int device = -1;
  CUresult result = props == NULL ? CUDA_SUCCESS : memory_place(&props->location, props->allocType, &device);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemPoolCreate)(out, props);
  if (result == CUDA_SUCCESS) (void)table_put(&pools, (struct entry){.key = id(*out), .device = device});
  return result;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  struct entry entry = table_take(&pools, id(pool));
  bool used = entry.key != 0 && pool_attribute(entry.key, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) != 0;
  CUresult result = REAL(cuMemPoolDestroy)(pool);
  if (result != CUDA_SUCCESS && entry.key != 0) (void)table_put(&pools, entry);
  if (result == CUDA_SUCCESS && !used) memory_drop(entry); /* memory still in use survives, and stays charged until the process ends */
  return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes) {
  CUresult result = REAL(cuMemPoolTrimTo)(pool, keep_bytes);
  memory_settle();
  return result;
}

void pools_graph_memory(CUdevice number, int device) {
  (void)pthread_mutex_lock(&pool_mutex);
  (void)pool_entry(GRAPH_POOL(number), device);
  table_each(&pools, settle_pool, NULL);
  (void)pthread_mutex_unlock(&pool_mutex);
}

void pools_forked(void) {
  table_clear(&pools);
  (void)pthread_mutex_init(&pool_mutex, NULL);
}
