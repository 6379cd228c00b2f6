/* Functions of the program's own that a stream calls when it comes to them. One thread runs them, as in the real driver; it is
 * there once the first has been asked for. */
#include "driver.h"

#include <stdlib.h>

struct request {
  void (*function)(void *);
  void (*callback)(CUstream, CUresult, void *); /* the older kind; one of both */
  void *data;
  CUstream stream;
  uint32_t lane;
  uint64_t mark;
  struct request *next;
};

static struct request *requests;
static _Atomic uint32_t asked; /* futex word */

/* The first that is due, or how long until one may be. */
static struct request *due(int64_t *until) {
  int64_t wait = WORLD_NEVER;
  for (struct request **c = &requests; *c != NULL; c = &(*c)->next) {
    struct request *call = *c;
    if (driver_self->lanes[call->lane].retired + 1 == call->mark && world_reached(driver_self, call->lane)) {
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
  REFUSE_IF(wanted.function == NULL && wanted.callback == NULL, CUDA_ERROR_INVALID_VALUE);
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
