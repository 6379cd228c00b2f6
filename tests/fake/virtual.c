/* Virtual memory management: physical memory, addresses, and one put at the other. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Lives until all its handles are released and all its mappings gone. */
struct physical {
  enum magic magic;
  uint64_t size, handles, mappings, offset; /* offset: of its contents in `contents` */
  CUmemAllocationProp prop;
};

struct mapping {
  uint64_t address, size;
  struct physical *physical;
  struct mapping *next;
};

struct reservation {
  uint64_t address, size;
  struct reservation *next;
};

static struct mapping *mappings;
static struct reservation *reservations;
static int contents = -1; /* what is in all physical memory, so that two mappings of it show the same */
static uint64_t contents_size;

static bool on_device(const CUmemAllocationProp *prop) { return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE; }

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option) {
  CALL(cuMemGetAllocationGranularity);
  REFUSE_IF(out == NULL || prop == NULL || option < 0 || option > 1, CUDA_ERROR_INVALID_VALUE);
  *out = driver_world->config.granule;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  CALL(cuMemCreate);
  REFUSE_IF(out == NULL || prop == NULL || flags != 0 || prop->type != 1, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(bytes == 0 || bytes % driver_world->config.granule != 0, CUDA_ERROR_INVALID_VALUE);
  bool device = on_device(prop);
  REFUSE_IF(device && (prop->location.id < 0 || (uint32_t)prop->location.id >= driver_world->config.devices),
            CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  world_lock(driver_world);
  bool taken = !device || world_take(driver_world, driver_self, prop->location.id, bytes);
  world_unlock(driver_world);
  REFUSE_IF(!taken, CUDA_ERROR_OUT_OF_MEMORY);
  struct physical *physical = calloc(1, sizeof *physical);
  *physical = (struct physical){.magic = MAGIC_PHYSICAL, .size = bytes, .handles = 1, .offset = contents_size, .prop = *prop};
  if (contents < 0) contents = memfd_create("fake-gpu-memory", MFD_CLOEXEC);
  contents_size += bytes;
  *out = (CUmemGenericAllocationHandle)(uintptr_t)physical;
  return ftruncate(contents, (off_t)contents_size) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void let_go(struct physical *physical) {
  if (physical->handles > 0 || physical->mappings > 0) return;
  physical->magic = MAGIC_DEAD;
  fallocate(contents, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)physical->offset, (off_t)physical->size);
  if (!on_device(&physical->prop)) return;
  world_lock(driver_world);
  world_give(driver_world, driver_self, physical->prop.location.id, physical->size);
  world_unlock(driver_world);
}

static struct physical *physical_of(CUmemGenericAllocationHandle handle) {
  struct physical *physical = (struct physical *)(uintptr_t)handle;
  return IS(physical, PHYSICAL) ? physical : NULL;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  CALL(cuMemRelease);
  LOCKED;
  struct physical *physical = physical_of(handle);
  REFUSE_IF(physical == NULL || physical->handles == 0, CUDA_ERROR_INVALID_VALUE);
  physical->handles--;
  let_go(physical);
  return CUDA_SUCCESS;
}

/* What it hands out can be read as the memory, and stands for a handle that nobody here releases. */
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  CALL(cuMemExportToShareableHandle);
  LOCKED;
  struct physical *physical = physical_of(handle);
  REFUSE_IF(out == NULL || physical == NULL || flags != 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
  physical->handles++;
  *(int *)out = fcntl(contents, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
  CALL(cuMemGetAllocationPropertiesFromHandle);
  LOCKED;
  struct physical *physical = physical_of(handle);
  REFUSE_IF(prop == NULL || physical == NULL, CUDA_ERROR_INVALID_VALUE);
  *prop = physical->prop;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
  CALL(cuMemAddressReserve);
  (void)wish; /* only ever a wish */
  uint64_t granule = driver_world->config.granule;
  REFUSE_IF(out == NULL || bytes == 0 || bytes % granule != 0 || flags > 1, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(alignment & (alignment - 1), CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  uint64_t address = heap_address(bytes, alignment > granule ? alignment : granule);
  REFUSE_IF(address == 0, CUDA_ERROR_OUT_OF_MEMORY);
  struct reservation *reservation = calloc(1, sizeof *reservation);
  *reservation = (struct reservation){.address = address, .size = bytes, .next = reservations};
  reservations = reservation;
  *out = address;
  return CUDA_SUCCESS;
}

static bool overlaps(uint64_t address, uint64_t bytes) {
  for (const struct mapping *m = mappings; m != NULL; m = m->next)
    if (address < m->address + m->size && m->address < address + bytes) return true;
  return false;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  CALL(cuMemAddressFree);
  LOCKED;
  for (struct reservation **r = &reservations; *r != NULL; r = &(*r)->next) {
    struct reservation *reservation = *r;
    if (reservation->address != address || reservation->size != bytes) continue;
    REFUSE_IF(overlaps(address, bytes), CUDA_ERROR_INVALID_VALUE);
    *r = reservation->next;
    free(reservation);
    heap_vacate(address, bytes);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

static bool reserved(uint64_t address, uint64_t bytes) {
  for (const struct reservation *r = reservations; r != NULL; r = r->next)
    if (address >= r->address && address + bytes <= r->address + r->size) return true;
  return false;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  CALL(cuMemMap);
  uint64_t granule = driver_world->config.granule;
  LOCKED;
  struct physical *physical = physical_of(handle);
  REFUSE_IF(physical == NULL || flags != 0 || bytes == 0 || offset != 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(bytes > physical->size || (bytes | address) % granule != 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!reserved(address, bytes) || overlaps(address, bytes), CUDA_ERROR_INVALID_VALUE);
  struct mapping *mapping = calloc(1, sizeof *mapping);
  *mapping = (struct mapping){.address = address, .size = bytes, .physical = physical, .next = mappings};
  mappings = mapping;
  physical->mappings++;
  mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, contents, (off_t)physical->offset);
  return CUDA_SUCCESS;
}

/* Whole mappings only. */
static bool covered(uint64_t address, uint64_t bytes) {
  uint64_t sum = 0;
  for (const struct mapping *m = mappings; m != NULL; m = m->next)
    if (m->address >= address && m->address + m->size <= address + bytes) sum += m->size;
  return sum == bytes;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  CALL(cuMemUnmap);
  LOCKED;
  REFUSE_IF(bytes == 0 || !covered(address, bytes), CUDA_ERROR_INVALID_VALUE);
  for (struct mapping **m = &mappings; *m != NULL;) {
    struct mapping *mapping = *m;
    if (mapping->address < address || mapping->address >= address + bytes) {
      m = &mapping->next;
      continue;
    }
    *m = mapping->next;
    mapping->physical->mappings--;
    let_go(mapping->physical);
    free(mapping);
  }
  heap_map(address, bytes, false);
  mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  return CUDA_SUCCESS;
}

/* CUmemAccessDesc; flags: 0 for none. */
struct access {
  CUmemLocation location;
  int flags;
};

/* Until this, what is mapped cannot be used. */
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const struct access *access, size_t count) {
  CALL(cuMemSetAccess);
  LOCKED;
  REFUSE_IF(access == NULL || count == 0 || !covered(address, bytes), CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; i++)
    if (access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE) heap_map(address, bytes, access[i].flags != 0);
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address) {
  CALL(cuMemRetainAllocationHandle);
  LOCKED;
  for (const struct mapping *m = mappings; m != NULL && out != NULL; m = m->next) {
    if ((uint64_t)(uintptr_t)address - m->address >= m->size) continue;
    m->physical->handles++;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)m->physical;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
