/* Memory of other processes, and of other interfaces: seen here, and charged to whoever has made it. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What is in a CUipcMemHandle. */
struct ticket {
  enum magic magic;
  int pid, device;
  uint64_t address, size;
};

struct external {
  enum magic magic;
  uint64_t size;
};

/* Somewhere that such memory is seen at. */
struct view {
  uint64_t address, size;
  struct view *next;
};

static struct view *views;

/* Whole pages of the arena. */
static uint64_t whole(uint64_t bytes) { return (bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20); }

static CUresult show(CUdeviceptr *out, uint64_t bytes) {
  uint64_t address = heap_address(whole(bytes), 2 << 20);
  REFUSE_IF(address == 0, CUDA_ERROR_OUT_OF_MEMORY);
  struct view *view = malloc(sizeof *view);
  *view = (struct view){.address = address, .size = whole(bytes), .next = views};
  views = view;
  heap_map(address, view->size, true);
  *out = address;
  return CUDA_SUCCESS;
}

bool shared_free(CUdeviceptr address) {
  for (struct view **v = &views; *v != NULL; v = &(*v)->next) {
    struct view *view = *v;
    if (view->address != address) continue;
    *v = view->next;
    heap_map(address, view->size, false);
    heap_vacate(address, view->size);
    free(view);
    return true;
  }
  return false;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer) {
  CALL(cuIpcGetMemHandle);
  LOCKED;
  const struct block *block = heap_containing(pointer);
  REFUSE_IF(out == NULL || block == NULL || block->managed || block->chunk->heap->pooled, CUDA_ERROR_INVALID_VALUE);
  const struct ticket ticket = {MAGIC_TICKET, getpid(), block->chunk->heap->device, block->address, block->size};
  memset(out, 0, sizeof *out);
  memcpy(out, &ticket, sizeof ticket);
  return CUDA_SUCCESS;
}

static CUresult open_handle(CUdeviceptr *out, const CUipcMemHandle *handle, unsigned int flags) {
  struct context *context;
  struct ticket ticket;
  memcpy(&ticket, handle, sizeof ticket);
  REFUSE_IF(out == NULL || flags != 1 || ticket.magic != MAGIC_TICKET, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  REFUSE_IF(ticket.pid == getpid(), CUDA_ERROR_INVALID_CONTEXT); /* as it is there already */
  LOCKED;
  return show(out, ticket.size);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
  CALL(cuIpcOpenMemHandle);
  return open_handle(out, &handle, flags);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) {
  CALL(cuIpcOpenMemHandle_v2);
  return open_handle(out, &handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  CALL(cuIpcCloseMemHandle);
  LOCKED;
  return shared_free(pointer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st {
  int type;
  void *handle[2];
  unsigned long long size;
  unsigned int flags, reserved[16];
};

CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *what) {
  struct context *context;
  CALL(cuImportExternalMemory);
  REFUSE_IF(out == NULL || what == NULL || what->type < 1 || what->size == 0, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  struct external *external = malloc(sizeof *external);
  *external = (struct external){.magic = MAGIC_EXTERNAL, .size = what->size};
  *out = (CUexternalMemory)external;
  return CUDA_SUCCESS;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, CUexternalMemory memory,
                                         const unsigned long long *place /* offset, size */) {
  const struct external *external = (const struct external *)memory;
  CALL(cuExternalMemoryGetMappedBuffer);
  REFUSE_IF(!IS(external, EXTERNAL), CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(out == NULL || place == NULL || place[1] == 0 || place[0] + place[1] > external->size, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  return show(out, place[1]);
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
  CALL(cuDestroyExternalMemory);
  REFUSE_IF(!IS(memory, EXTERNAL), CUDA_ERROR_INVALID_HANDLE);
  ((struct external *)memory)->magic = MAGIC_DEAD;
  return CUDA_SUCCESS;
}
