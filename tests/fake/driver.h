/* What the driver keeps within one process: handles, and which of them a thread uses. Everything here is under `driver_lock`
 * unless it says otherwise; what other processes can see is in the world, under the world's lock, which is taken last. */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include "abi.h"
#include "world.h"

/* What abi.h has no need of. Macros, so that it may come to. */
#define CUDA_ERROR_ARRAY_IS_MAPPED 207
#define CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE 708
#define CUDA_ERROR_CONTEXT_IS_DESTROYED 709
#define CUDA_ERROR_STREAM_CAPTURE_INVALIDATED 901
#define CUDA_ERROR_STREAM_CAPTURE_MERGE 902
#define CUDA_ERROR_STREAM_CAPTURE_UNMATCHED 903
#define CUDA_ERROR_STREAM_CAPTURE_UNJOINED 904
#define CUDA_ERROR_STREAM_CAPTURE_ISOLATION 905
#define CUDA_ERROR_CAPTURED_EVENT 907
#define CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD 908
#define CUDA_ERROR_TIMEOUT 909

#define HOOK(name, parameters) CALL_##name,
#define COPY(name, ...) CALL_##name,
#define PAUSE(name, ...) CALL_##name,
#define DENY(name, error) CALL_##name,
#define EXPORT(name) CALL_##name,
enum call {
#include "hooks.def"
#include "exports.def"
  CALLS
};
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY
#undef EXPORT
_Static_assert((int)CALLS <= (int)WORLD_CALLS, "a counter for each");

#ifndef STUBS
/* A definition that differs from what the guard takes the call to be does not compile. */
#define HOOK(name, parameters) CUresult name parameters;
#define COPY(name, ...)
#define PAUSE(name, ...)
#define DENY(name, error)
#include "hooks.def"
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY
#endif

enum magic {
  MAGIC_DEAD = 0xdead,
  MAGIC_CONTEXT = 0xc0de00,
  MAGIC_STREAM,
  MAGIC_EVENT,
  MAGIC_MODULE,
  MAGIC_FUNCTION,
  MAGIC_POOL,
  MAGIC_PHYSICAL,
  MAGIC_ARRAY,
  MAGIC_MIPMAP,
  MAGIC_GRAPH,
  MAGIC_NODE,
  MAGIC_EXEC,
  MAGIC_EXTERNAL,
  MAGIC_TICKET,
  MAGIC_GREEN,
};

/* Whether a handle is one of ours, and lives. */
#define IS(handle, what) ((handle) != NULL && *(const enum magic *)(handle) == MAGIC_##what)

extern struct world *driver_world;
extern struct process *driver_self;
extern pthread_mutex_t driver_lock;

/* How each call begins: it is counted, may be made to fail, and waits while the process is locked for a checkpoint. */
CUresult driver_count(enum call call);
CUresult driver_enter(enum call call); /* and is refused before cuInit */

#define REFUSE_IF(refused, error) \
  do {                            \
    if (refused) return (error);  \
  } while (0)
#define TRY(answer)              \
  do {                           \
    CUresult problem = (answer); \
    if (problem) return problem; \
  } while (0)
#define CALL(name) TRY(driver_enter(CALL_##name))

/* A call with a variant for programs whose default stream is their thread's own. `implied` is the one that NULL stands for. */
#define STREAM_CALL_AS(name, variant, parameters, answer) \
  CUresult name parameters {                              \
    const CUstream implied = CU_STREAM_LEGACY;            \
    CALL(name);                                           \
    return answer;                                        \
  }                                                       \
  CUresult name##variant parameters {                     \
    const CUstream implied = CU_STREAM_PER_THREAD;        \
    CALL(name##variant);                                  \
    return answer;                                        \
  }
#define STREAM_CALL(name, parameters, answer) STREAM_CALL_AS(name, _ptsz, parameters, answer)

/* Holds the lock to the end of the block. */
#define LOCKED __attribute__((cleanup(driver_release), unused)) const int held = driver_hold()
int driver_hold(void);
void driver_release(const int *held);

/* Memory: see heap.c. */
struct block {
  uint64_t address, size;
  struct chunk *chunk;
  struct block *before, *after, *chain; /* in the chunk; in the table */
  bool used, managed;
  uint32_t lane; /* once freed: may be used again by this lane, and by all once it has reached the mark */
  uint64_t mark;
};
struct chunk {
  uint64_t address, size;
  struct heap *heap;
  struct block *first;
  struct chunk *next;
  bool whole; /* for one allocation alone */
};
enum { HEAP_HOST = WORLD_DEVICES }; /* the device of a heap of the host's memory, of which no world keeps account */
struct heap {
  int device;
  uint64_t chunk_size, limit, keep; /* limit: 0 is none; keep: what stays reserved at a synchronisation */
  bool pooled;                      /* chunks stay until trimmed */
  uint64_t reserved, used, reserved_high, used_high;
  struct chunk *chunks;
};
uint64_t heap_address(uint64_t bytes, uint64_t alignment); /* addresses alone; 0 if there are none left */
void heap_vacate(uint64_t address, uint64_t bytes);
void heap_map(uint64_t address, uint64_t bytes, bool there);
bool heap_ours(uint64_t address);  /* of a device, with memory behind it that may be used */
bool heap_known(uint64_t address); /* that or the host's */
struct block *heap_allocate(struct heap *heap, uint64_t bytes, uint32_t lane);
void heap_free(struct block *block, uint32_t lane, uint64_t mark);
struct block *heap_find(uint64_t address); /* that begins there and is in use */
struct block *heap_containing(uint64_t address);
void heap_trim(struct heap *heap, uint64_t keep);
void heap_clear(struct heap *heap);

bool memory_is_pinned(uint64_t address); /* of the host, and seen by devices; under the lock */

/* Contexts, and the streams, events and memory that are theirs. */
struct context {
  enum magic magic;
  int device;
  unsigned int flags, retained;
  uint32_t number, part_ppm; /* of the device that it may use */
  bool primary; /* the device's, or a part of it, which shares its events and its memory */
  uint32_t open, channels; /* streams, and what they have taken memory for */
  struct heap heap;
  struct stream *streams, *legacy;
  struct green *green; /* that it is of */
  struct context *next;
};
bool context_shares(const struct context *one, const struct context *other); /* each other's events */
struct context *context_current(void); /* NULL: none. No lock is needed */
CUresult context_need(struct context **out);
void context_synchronize(const struct context *context); /* without the lock */
struct context *context_of_part(int device, uint32_t part_ppm, struct green *green); /* current nowhere; under the lock */
void context_end(struct context *context);                      /* without it */

/* Nodes of a graph that what is captured next comes after. */
enum { FRONT = 32 };
struct front {
  struct node *nodes[FRONT];
  size_t count;
};

struct stream {
  enum magic magic;
  struct context *context;
  uint32_t lane;
  unsigned int flags;
  int priority;
  struct capture *capture;
  struct front front;
  struct stream *next;
};
CUresult stream_find(CUstream handle, CUstream implied, struct stream **out);    /* takes the lock itself */
CUresult stream_submit(struct stream *stream, struct item item, uint64_t *mark); /* without the lock; waits for room */
void stream_await(const struct stream *stream, uint64_t mark);                   /* without the lock */
void stream_free_all(struct context *context);
CUresult stream_create(CUstream *out, struct context *context, unsigned int flags, int priority);

struct event {
  enum magic magic;
  const struct context *context;
  unsigned int flags;
  bool recorded;
  uint16_t stamp;
  uint32_t lane;
  uint64_t mark;
  struct capture *capture; /* that has recorded it last; it may have ended */
  uint64_t capture_id;
  struct front front;
};

struct function {
  enum magic magic;
  char name[64];
  int64_t ns;
  enum { PER_LAUNCH, PER_BLOCK, PER_THREAD_OF_BLOCK, PER_ARGUMENT } per;
  uint32_t ranks; /* of a collective */
  uint32_t width_ppm;
  _Atomic bool loaded;
  struct module *module;
  struct function *next;
};
struct shape {
  uint64_t blocks, threads;
  void **params;
};
CUresult function_time(CUfunction function, const struct shape *shape, int64_t *ns);

/* Capture: see capture.c. */
bool capture_forbids(void); /* whether this thread may not make calls that are unsafe during capture; it ends what minds them */
bool capture_ends_in(const struct context *context); /* whether there was any; no capture survives a wait for its context */
CUresult capture_check(struct stream *stream, bool *capturing); /* of a call that puts work into a stream */
CUresult capture_touch(struct stream *stream);                  /* of one that looks at a stream, which no capture survives */
CUresult capture_work(struct stream *stream, int type, int64_t ns);
CUresult capture_record(struct stream *stream, struct event *event);
CUresult capture_wait(struct stream *stream, struct event *event);
CUresult capture_ask(const struct event *event); /* whether it is done; the capture that has recorded it does not survive that */
CUresult capture_allocate(struct stream *stream, int device, uint64_t bytes, CUdeviceptr *out);
CUresult capture_free(struct stream *stream, CUdeviceptr pointer);
bool shared_free(CUdeviceptr pointer); /* whether it was others' memory, seen here: no longer */
bool graph_owns(CUdeviceptr pointer);  /* whether it is the memory of a graph */
bool graph_free(CUdeviceptr pointer);  /* the same, and frees it */

/* Pools of stream-ordered memory. */
struct pool {
  enum magic magic;
  struct heap heap;
  struct pool *next;
};
struct pool *pool_default(int device);
void pool_synchronized(int device);

#endif
