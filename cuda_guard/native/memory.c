/* Device memory by address, array and handle: reserve, call, keep or release. */
#include "memory.h"

static pthread_mutex_t ledger_mutex = PTHREAD_MUTEX_INITIALIZER;

static struct table pointers = TABLE_EMPTY; /* address -> units, context */
static struct table arrays = TABLE_EMPTY;   /* array -> units, context */
static struct table pieces = TABLE_EMPTY;   /* a piece of physical memory -> units; count: its handles and mappings */
static struct table handles = TABLE_EMPTY;  /* handle -> link: its piece; count: releases needed */
static struct table mappings = TABLE_EMPTY; /* address -> link: its piece; units: bytes mapped */

static uint64_t limit_of(int place) {
  return atomic_load(place == GUARD_HOST ? &guard_policy->host_limit : &guard_policy->allowances[place].memory_limit) / GUARD_UNIT;
}

bool memory_change(int place, int64_t units, bool whatever_the_limit) {
  int slot = guard_slot();
  if (slot < 0) return units <= 0;
  uint64_t limit = whatever_the_limit ? UINT64_MAX : limit_of(place);
  (void)pthread_mutex_lock(&ledger_mutex);
  bool done = ledger_change(guard_job, (unsigned)slot, (unsigned)place, units, limit);
  /* The lender reads the counter after it lowers the limit, this reads the limit after it raises the counter: one sees the other. */
  if (done && units > 0 && !whatever_the_limit) {
    uint64_t now = limit_of(place);
    if (now < limit && ledger_used(guard_job, (unsigned)place) > now) {
      (void)ledger_change(guard_job, (unsigned)slot, (unsigned)place, -units, UINT64_MAX);
      done = false;
    }
  }
  (void)pthread_mutex_unlock(&ledger_mutex);
  return done;
}

void memory_give_back(int place, int64_t units) {
  if (place >= 0) (void)memory_change(place, -units, true);
}

bool memory_fits(int place, int64_t units) {
  guard_wait();
  if (place < 0 || memory_change(place, units, false)) return true;
  memory_settle();
  guard_sweep();
  return memory_change(place, units, false);
}

bool memory_reserve(int place, int64_t units) {
  if (memory_fits(place, units)) return true;
  atomic_fetch_add(&guard_job->uses[place].refused, 1);
  return false;
}

static uint64_t current_context(void) {
  CUcontext context = NULL;
  return DRIVER(cuCtxGetCurrent)(&context) == CUDA_SUCCESS ? id(context) : 0;
}

CUresult charge_make(struct charge charge) {
  return memory_reserve(charge.place, charge.units) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult charge_current(struct charge *charge, const void *out) {
  CUresult result = guard_current(&charge->place);
  if (result != CUDA_SUCCESS) return result;
  return out == NULL ? CUDA_ERROR_INVALID_VALUE : charge_make(*charge);
}

CUresult charge_keep(struct table *table, uint64_t key, struct charge charge, CUresult result, void (*undo)(uint64_t key)) {
  if (result == CUDA_SUCCESS) {
    struct entry entry = {.key = key, .units = charge.units, .link = current_context(), .device = charge.place, .count = 1};
    if (table_put(table, entry)) return CUDA_SUCCESS;
    undo(key);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  memory_give_back(charge.place, charge.units);
  return result;
}

CUresult charge_drop(struct table *table, struct entry entry, CUresult result) {
  if (result == CUDA_SUCCESS)
    memory_drop(entry);
  else if (entry.key != 0)
    (void)table_put(table, entry);
  return result;
}

/* Managed memory moves to the device that uses it, wherever it is to begin with: it is charged to the current one. */
CUresult memory_place(const CUmemLocation *where, int type, int *place) {
  *place = -1;
  if (guard_policy == NULL) return CUDA_SUCCESS;
  if (where->type == CU_MEM_LOCATION_TYPE_DEVICE) return guard_place(where->id, place);
  if (where->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN) return guard_place(where->id & 0xff, place); /* and the part of it */
  if (type == CU_MEM_ALLOCATION_TYPE_MANAGED) return guard_current(place);
  if (type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_NOT_PERMITTED;
  switch ((int)where->type) {
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      *place = GUARD_HOST;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_PERMITTED;
  }
}

/* --- by address */

static void free_pointer(uint64_t key) { (void)REAL(cuMemFree_v2)(key); }

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
  struct charge charge = {.units = units_for(bytes)};
  CUresult result = charge_current(&charge, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemAlloc_v2)(out, bytes);
  return charge_keep(&pointers, *out, charge, result, free_pointer);
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags) {
  struct charge charge = {.units = units_for(bytes)};
  CUresult result = charge_current(&charge, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemAllocManaged)(out, bytes, flags);
  return charge_keep(&pointers, *out, charge, result, free_pointer);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element) {
  if (pitch == NULL) return CUDA_ERROR_INVALID_VALUE;
  size_t row = (width + GUARD_UNIT - 1) & ~(size_t)(GUARD_UNIT - 1), bytes; /* a driver that pads to more is charged afterwards */
  if (row < width || __builtin_mul_overflow(row, height, &bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  struct charge charge = {.units = units_for(bytes)};
  CUresult result = charge_current(&charge, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemAllocPitch_v2)(out, pitch, width, height, element);
  int64_t more = result == CUDA_SUCCESS ? units_for(*pitch * height) - charge.units : 0;
  if (more > 0 && !memory_reserve(charge.place, more)) {
    free_pointer(*out);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  } else {
    if (more < 0) memory_give_back(charge.place, -more);
    charge.units += more;
  }
  return charge_keep(&pointers, *out, charge, result, free_pointer);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  struct entry entry = table_take(&pointers, pointer);
  return charge_drop(&pointers, entry, REAL(cuMemFree_v2)(pointer));
}

/* --- arrays: their layout is undocumented; rows are assumed to be padded to 64 bytes and their number to 8 */

#define DEFERRED 0xc0 /* CUDA_ARRAY3D_SPARSE | _DEFERRED_MAPPING: memory mapped into them later is charged by cuMemCreate */

static int64_t array_units(size_t width, size_t height, size_t depth, CUarray_format format, unsigned int channels) {
  size_t bytes = format == CU_AD_FORMAT_UNSIGNED_INT8 || format == CU_AD_FORMAT_SIGNED_INT8   ? 1
                 : format == CU_AD_FORMAT_UNSIGNED_INT32 || format == CU_AD_FORMAT_SIGNED_INT32 ? 4
                 : format == CU_AD_FORMAT_FLOAT                                                 ? 4
                                                                                                : 2;
  size_t rows = height > SIZE_MAX - 8 ? height : height > 1 ? (height + 7) & ~(size_t)7 : 1;
  if (__builtin_mul_overflow(bytes * channels, width, &bytes) || bytes > SIZE_MAX - 64) return INT64_MAX;
  bytes = (bytes + 63) & ~(size_t)63;
  if (__builtin_mul_overflow(bytes, rows, &bytes) || __builtin_mul_overflow(bytes, depth > 1 ? depth : 1, &bytes)) return INT64_MAX;
  return units_for(bytes);
}

static int64_t mipmap_units(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels) {
  int64_t sum = 0;
  for (unsigned int level = 0; level < levels && level < 32; level++) {
    size_t width = shape->Width >> level, height = shape->Height >> level, depth = shape->Depth >> level;
    if (__builtin_add_overflow(sum, array_units(width > 0 ? width : 1, height, depth, shape->Format, shape->NumChannels), &sum))
      return INT64_MAX;
  }
  return sum;
}

static void free_array(uint64_t key) { (void)REAL(cuArrayDestroy)((CUarray)(uintptr_t)key); }
static void free_mipmap(uint64_t key) { (void)REAL(cuMipmappedArrayDestroy)((CUmipmappedArray)(uintptr_t)key); }

CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape) {
  if (shape == NULL) return CUDA_ERROR_INVALID_VALUE;
  struct charge charge = {.units = array_units(shape->Width, shape->Height, 0, shape->Format, shape->NumChannels)};
  CUresult result = charge_current(&charge, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuArrayCreate_v2)(out, shape);
  return charge_keep(&arrays, id(*out), charge, result, free_array);
}

CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
  if (shape == NULL) return CUDA_ERROR_INVALID_VALUE;
  struct charge charge = {0};
  if (!(shape->Flags & DEFERRED))
    charge.units = array_units(shape->Width, shape->Height, shape->Depth, shape->Format, shape->NumChannels);
  CUresult result = charge_current(&charge, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuArray3DCreate_v2)(out, shape);
  return charge_keep(&arrays, id(*out), charge, result, free_array);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels) {
  if (shape == NULL) return CUDA_ERROR_INVALID_VALUE;
  struct charge charge = {.units = shape->Flags & DEFERRED ? 0 : mipmap_units(shape, levels)};
  CUresult result = charge_current(&charge, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMipmappedArrayCreate)(out, shape, levels);
  return charge_keep(&arrays, id(*out), charge, result, free_mipmap);
}

CUresult cuArrayDestroy(CUarray array) {
  struct entry entry = table_take(&arrays, id(array));
  return charge_drop(&arrays, entry, REAL(cuArrayDestroy)(array));
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
  struct entry entry = table_take(&arrays, id(array));
  return charge_drop(&arrays, entry, REAL(cuMipmappedArrayDestroy)(array));
}

/* --- physical memory: it exists until it has no handle and no mapping */

static void let_go_of_piece(uint64_t piece) {
  if (table_count(&pieces, piece, -1).count == 0) memory_drop(table_take(&pieces, piece));
}

static void release_piece(uint64_t piece) { (void)REAL(cuMemRelease)(table_take_any(&handles, belongs_to, &piece).key); }

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags) {
  static _Atomic uint64_t made;
  guard_load();
  if (out == NULL || prop == NULL || guard_policy == NULL) return REAL(cuMemCreate)(out, bytes, prop, flags);
  struct charge charge = {.units = units_for(bytes)};
  CUresult result = memory_place(&prop->location, prop->type, &charge.place);
  if (result == CUDA_SUCCESS) result = charge_make(charge);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemCreate)(out, bytes, prop, flags);
  uint64_t piece = atomic_fetch_add(&made, 1) + 1;
  if (result == CUDA_SUCCESS && !table_put(&handles, (struct entry){.key = *out, .link = piece, .count = 1})) {
    (void)REAL(cuMemRelease)(*out);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  return charge_keep(&pieces, piece, charge, result, release_piece);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct entry entry = table_count(&handles, handle, -1);
  if (entry.key != 0 && entry.count == 0) (void)table_take(&handles, handle); /* before the call: the driver may reuse the number */
  CUresult result = REAL(cuMemRelease)(handle);
  if (entry.key == 0) return result;
  if (result == CUDA_SUCCESS) {
    let_go_of_piece(entry.link);
  } else if (entry.count == 0) {
    entry.count = 1;
    (void)table_put(&handles, entry);
  } else {
    (void)table_count(&handles, handle, 1);
  }
  return result;
}

/* Whoever has it keeps the memory, unseen, so it stays charged until this process ends. */
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  CUresult result = REAL(cuMemExportToShareableHandle)(out, handle, type, flags);
  struct entry entry = table_get(&handles, handle);
  if (result == CUDA_SUCCESS && entry.key != 0) (void)table_count(&pieces, entry.link, 1);
  return result;
}

struct range {
  uint64_t from, to;
};

static bool lies_in(const struct entry *entry, const void *what) {
  const struct range *range = what;
  return entry->key >= range->from && entry->key < range->to;
}

static bool holds(const struct entry *entry, const void *what) {
  const uint64_t *address = what;
  return entry->key <= *address && *address - entry->key < (uint64_t)entry->units;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
  CUresult result = REAL(cuMemRetainAllocationHandle)(out, address);
  if (result != CUDA_SUCCESS) return result;
  uint64_t at = id(address);
  struct entry mapping = table_take_any(&mappings, holds, &at);
  if (mapping.key == 0) return result;
  (void)table_put(&mappings, mapping);
  (void)table_count(&pieces, mapping.link, 1);
  if (table_count(&handles, *out, 1).key == 0) (void)table_put(&handles, (struct entry){.key = *out, .link = mapping.link, .count = 1});
  return result;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  CUresult result = REAL(cuMemMap)(at, bytes, offset, handle, flags);
  struct entry entry = table_get(&handles, handle);
  if (result != CUDA_SUCCESS || entry.key == 0) return result;
  struct entry mapping = {.key = at, .units = (int64_t)bytes, .link = entry.link};
  if (table_put(&mappings, mapping)) (void)table_count(&pieces, entry.link, 1);
  return result;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  CUresult result = REAL(cuMemUnmap)(at, bytes);
  if (result != CUDA_SUCCESS) return result;
  struct range range = {at, at + bytes};
  struct entry mapping;
  while ((mapping = table_take_any(&mappings, lies_in, &range)).key != 0) let_go_of_piece(mapping.link);
  return result;
}

void memory_context_gone(uint64_t context) {
  struct entry entry;
  while ((entry = table_take_any(&pointers, belongs_to, &context)).key != 0) memory_drop(entry);
  while ((entry = table_take_any(&arrays, belongs_to, &context)).key != 0) memory_drop(entry);
  pinned_context_gone(context);
}

/* --- queries: the job's current limit is reported as the total */

static void clamp(int device, size_t *free, size_t *total) {
  const struct guard_allowance *allowance = &guard_policy->allowances[device];
  uint64_t limit = atomic_load(&allowance->memory_limit), used = ledger_used(guard_job, (unsigned)device) * GUARD_UNIT;
  uint64_t whole = limit > used ? limit : used; /* the limit may be below what it holds */
  if (free != NULL && *free > whole - used) *free = (size_t)(whole - used);
  if (total != NULL && *total > whole) *total = (size_t)whole;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  CUresult result = REAL(cuMemGetInfo_v2)(free, total);
  int device;
  if (result != CUDA_SUCCESS || guard_current(&device) != CUDA_SUCCESS) return result;
  memory_settle();
  clamp(device, free, total);
  return result;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice number) {
  CUresult result = REAL(cuDeviceTotalMem_v2)(bytes, number);
  int device = result == CUDA_SUCCESS ? guard_device(number) : -1;
  if (device >= 0) clamp(device, NULL, bytes);
  return result;
}

/* --- memory of other processes */

static CUresult borrowed(CUresult result) {
  int device;
  if (result == CUDA_SUCCESS && guard_current(&device) == CUDA_SUCCESS) atomic_fetch_add(&guard_job->uses[device].borrowed, 1);
  return result;
}

CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *what) {
  return borrowed(REAL(cuImportExternalMemory)(out, what));
}

/* Memory that this process made and shared itself may come back under its handle, which then needs one more release. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shared, CUmemAllocationHandleType type) {
  CUresult result = REAL(cuMemImportFromShareableHandle)(out, shared, type);
  struct entry own = result == CUDA_SUCCESS ? table_count(&handles, *out, 1) : (struct entry){0};
  if (own.key == 0) return borrowed(result);
  (void)table_count(&pieces, own.link, 1);
  return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
  return borrowed(REAL(cuIpcOpenMemHandle)(out, handle, flags));
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
  return borrowed(REAL(cuIpcOpenMemHandle_v2)(out, handle, flags));
}

void memory_forked(void) {
  struct table *all[] = {&pointers, &arrays, &pieces, &handles, &mappings};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) table_clear(all[i]);
  (void)pthread_mutex_init(&ledger_mutex, NULL);
  pinned_forked();
  pools_forked();
  graphs_forked();
  contexts_forked();
}
