/* What a stream does on the host when it comes to it: functions of the program's own, and waits for and writes of values in memory.
 * One thread runs them, as in the real driver the functions; it is there once the first has been asked for. */
#include "driver.h"

#include <stdlib.h>

/* CUstreamBatchMemOpParams; its value is a union of both widths. */
struct memory_op {
  unsigned int operation;
  CUdeviceptr address;
  uint64_t value;
  unsigned int flags;
  CUdeviceptr alias;
  uint64_t rest;
};
enum { WAIT_32 = 1, WRITE_32 = 2, FLUSH = 3, WAIT_64 = 4, WRITE_64 = 5, BARRIER = 6 };

struct request {
  void (*function)(void *);
  void (*callback)(CUstream, CUresult, void *); /* the older kind */
  struct memory_op memory;                      /* one of the three */
  void *data;
  CUstream stream;
  uint32_t lane;
  uint64_t mark;
  struct request *next;
};

static struct request *requests;
static _Atomic uint32_t asked; /* futex word */

static uint64_t value_at(const struct memory_op *op, bool wide) {
  return wide ? *(_Atomic uint64_t *)(uintptr_t)op->address : *(_Atomic uint32_t *)(uintptr_t)op->address;
}

/* Whether there is nothing to wait for. */
static bool is_there(const struct memory_op *op) {
  bool wide = op->operation == WAIT_64;
  if (op->operation != WAIT_32 && !wide) return true;
  uint64_t value = value_at(op, wide), wanted = wide ? op->value : (uint32_t)op->value;
  switch (op->flags & 3) {
    case 0: /* at least, in a circle */
      return wide ? (int64_t)(value - wanted) >= 0 : (int32_t)(uint32_t)(value - wanted) >= 0;
    case 1:
      return value == wanted;
    case 2:
      return (value & wanted) != 0;
    default:
      return (wide ? ~(value | wanted) : (uint32_t) ~(value | wanted)) != 0;
  }
}

static void operate(const struct memory_op *op) {
  if (op->operation == WRITE_64) *(_Atomic uint64_t *)(uintptr_t)op->address = op->value;
  if (op->operation == WRITE_32) *(_Atomic uint32_t *)(uintptr_t)op->address = (uint32_t)op->value;
}

/* The first that is due, or how long until one may be. */
static struct request *due(int64_t *until) {
  int64_t wait = WORLD_NEVER;
  for (struct request **c = &requests; *c != NULL; c = &(*c)->next) {
    struct request *call = *c;
    if (driver_self->lanes[call->lane].retired + 1 == call->mark && world_reached(driver_self, call->lane) &&
        is_there(&call->memory)) {
      *c = call->next;
      return call;
    }
    int64_t left = world_due(driver_self, call->lane, call->mark);
    if (left < wait) wait = left;
  }
  enum { PATIENCE_NS = 50000 };
  bool known = driver_world->config.virtual_ns == 0 && wait > PATIENCE_NS; /* virtual time may jump */
  *until = wait == WORLD_NEVER ? WORLD_NEVER : world_clock() + (known ? wait : PATIENCE_NS);
  return NULL;
}

static void *serve(void *nothing) {
  for (;;) {
    int64_t until = WORLD_NEVER;
    uint32_t seen = asked;
    pthread_mutex_lock(&driver_lock);
    world_lock(driver_world);
    struct request *call = due(&until);
    world_unlock(driver_world);
    pthread_mutex_unlock(&driver_lock);
    if (call == NULL) {
      world_sleep(&asked, seen, until);
      continue;
    }
    if (call->function != NULL)
      call->function(call->data);
    else if (call->memory.operation != 0)
      operate(&call->memory);
    else
      call->callback(call->stream, CUDA_SUCCESS, call->data);
    world_lock(driver_world);
    world_returned(driver_world, driver_self, call->lane);
    world_unlock(driver_world);
    free(call);
  }
  return nothing;
}

static CUresult ask(struct request wanted, CUstream implied) {
  static pthread_t thread;
  static bool serving;
  struct stream *stream;
  bool capturing;
  REFUSE_IF(wanted.function == NULL && wanted.callback == NULL && wanted.memory.operation == 0, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(wanted.stream, implied, &stream));
  TRY(capture_check(stream, &capturing));
  if (capturing) return capture_work(stream, 3, 0);
  struct request *call = malloc(sizeof *call);
  *call = wanted;
  call->lane = stream->lane;
  TRY(stream_submit(stream, (struct item){.kind = ITEM_HOST}, &call->mark));
  LOCKED;
  struct request **end = &requests;
  while (*end != NULL) end = &(*end)->next;
  *end = call;
  if (!serving) serving = pthread_create(&thread, NULL, serve, NULL) == 0;
  asked++;
  world_wake(&asked);
  return CUDA_SUCCESS;
}

STREAM_CALL(cuLaunchHostFunc, (CUstream stream, void (*function)(void *), void *data),
            ask((struct request){.function = function, .data = data, .stream = stream}, implied))

STREAM_CALL(cuLaunchHostFunc_v2, (CUstream stream, void (*function)(void *), void *data, unsigned int mode),
            ((void)mode, ask((struct request){.function = function, .data = data, .stream = stream}, implied)))

STREAM_CALL(cuStreamAddCallback,
            (CUstream stream, void (*callback)(CUstream, CUresult, void *), void *data, unsigned int flags),
            flags != 0 ? CUDA_ERROR_INVALID_VALUE
                       : ask((struct request){.callback = callback, .data = data, .stream = stream}, implied))

static CUresult operate_in_stream(CUstream stream, CUstream implied, unsigned int count, const struct memory_op *ops) {
  REFUSE_IF(ops == NULL || count == 0 || count > 256, CUDA_ERROR_INVALID_VALUE);
  for (unsigned int i = 0; i < count; i++) {
    bool moves = ops[i].operation != FLUSH && ops[i].operation != BARRIER;
    REFUSE_IF(ops[i].operation == 0 || ops[i].operation > BARRIER, CUDA_ERROR_INVALID_VALUE);
    LOCKED;
    REFUSE_IF(moves && !heap_ours(ops[i].address) && !memory_is_pinned(ops[i].address), CUDA_ERROR_INVALID_VALUE);
  }
  for (unsigned int i = 0; i < count; i++) TRY(ask((struct request){.memory = ops[i], .stream = stream}, implied));
  return CUDA_SUCCESS;
}

/* The first versions of these calls are the same but for what they were allowed to. */
#define MEMORY_CALL(name, what, type)                                                                                   \
  STREAM_CALL(name, (CUstream stream, CUdeviceptr address, type value, unsigned int flags),                             \
              operate_in_stream(stream, implied, 1,                                                                     \
                                &(struct memory_op){.operation = (what), .address = address, .value = value, .flags = flags}))
MEMORY_CALL(cuStreamWaitValue32, WAIT_32, uint32_t)
MEMORY_CALL(cuStreamWaitValue32_v2, WAIT_32, uint32_t)
MEMORY_CALL(cuStreamWaitValue64, WAIT_64, uint64_t)
MEMORY_CALL(cuStreamWaitValue64_v2, WAIT_64, uint64_t)
MEMORY_CALL(cuStreamWriteValue32, WRITE_32, uint32_t)
MEMORY_CALL(cuStreamWriteValue32_v2, WRITE_32, uint32_t)
MEMORY_CALL(cuStreamWriteValue64, WRITE_64, uint64_t)
MEMORY_CALL(cuStreamWriteValue64_v2, WRITE_64, uint64_t)
STREAM_CALL(cuStreamBatchMemOp, (CUstream stream, unsigned int count, struct memory_op *ops, unsigned int flags),
            ((void)flags, operate_in_stream(stream, implied, count, ops)))
STREAM_CALL(cuStreamBatchMemOp_v2, (CUstream stream, unsigned int count, struct memory_op *ops, unsigned int flags),
            ((void)flags, operate_in_stream(stream, implied, count, ops)))
