/* Taking a process off its devices and back, from another one, which need not have called cuInit. */
#include "driver.h"

/* With the world's lock held if it succeeds. */
static CUresult aim(int pid, struct process **out) {
  REFUSE_IF(driver_world == NULL, CUDA_ERROR_NOT_INITIALIZED);
  world_lock(driver_world);
  world_reap(driver_world);
  *out = world_find(driver_world, pid);
  if (*out != NULL && (*out)->alive) return CUDA_SUCCESS;
  world_unlock(driver_world);
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult state_of(int pid, int *out) {
  struct process *process;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(aim(pid, &process));
  *out = (int)process->state;
  world_unlock(driver_world);
  return CUDA_SUCCESS;
}

CUresult cuCheckpointProcessGetState(int pid, int *out) {
  TRY(driver_count(CALL_cuCheckpointProcessGetState));
  return state_of(pid, out);
}

/* No thread of it begins another call. */
static void halt(struct process *process) { process->state = PROCESS_LOCKED; }

static void resume(struct process *process) {
  process->state = PROCESS_RUNNING;
  world_wake(&process->state);
}

static CUresult lock(int pid, unsigned int timeout_ms) {
  enum { LOOK_NS = 100000 };
  struct process *process;
  int64_t until = timeout_ms > 0 ? world_clock() + timeout_ms * 1000000ll : WORLD_NEVER;
  CUresult answer = CUDA_SUCCESS;
  TRY(aim(pid, &process));
  if (process->state != PROCESS_RUNNING)
    answer = CUDA_ERROR_ILLEGAL_STATE;
  else
    halt(process);
  while (answer == CUDA_SUCCESS && process->alive && process->items > 0) { /* what it has submitted is still done */
    if (world_clock() >= until) {
      answer = CUDA_ERROR_NOT_READY;
      resume(process);
      break;
    }
    uint32_t seen = process->bell;
    world_unlock(driver_world);
    world_sleep(&process->bell, seen, world_clock() + LOOK_NS);
    world_lock(driver_world);
  }
  world_unlock(driver_world);
  return answer;
}

CUresult cuCheckpointProcessLock(int pid, const unsigned int *args /* it begins with the timeout in milliseconds */) {
  TRY(driver_count(CALL_cuCheckpointProcessLock));
  return lock(pid, args != NULL ? *args : 0);
}

static CUresult put_away(int pid) {
  struct process *process;
  TRY(aim(pid, &process));
  CUresult answer = process->state == PROCESS_LOCKED ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
  for (uint32_t d = 0; d < driver_world->config.devices && answer == CUDA_SUCCESS; d++) {
    process->put_away[d] = process->memory[d];
    world_give(driver_world, process, (int)d, process->memory[d]);
  }
  if (answer == CUDA_SUCCESS) process->state = PROCESS_CHECKPOINTED;
  world_unlock(driver_world);
  return answer;
}

CUresult cuCheckpointProcessCheckpoint(int pid, const void *args) {
  TRY(driver_count(CALL_cuCheckpointProcessCheckpoint));
  (void)args;
  return put_away(pid);
}

static CUresult bring_back(int pid) {
  struct process *process;
  TRY(aim(pid, &process));
  CUresult answer = process->state == PROCESS_CHECKPOINTED ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
  uint32_t d = 0;
  for (; d < driver_world->config.devices && answer == CUDA_SUCCESS; d++)
    if (!world_take(driver_world, process, (int)d, process->put_away[d])) answer = CUDA_ERROR_OUT_OF_MEMORY;
  if (answer == CUDA_SUCCESS) process->state = PROCESS_LOCKED;
  if (answer == CUDA_ERROR_OUT_OF_MEMORY) /* all or nothing */
    for (d = 0; d < driver_world->config.devices; d++) world_give(driver_world, process, (int)d, process->memory[d]);
  world_unlock(driver_world);
  return answer;
}

CUresult cuCheckpointProcessRestore(int pid, const void *args) {
  TRY(driver_count(CALL_cuCheckpointProcessRestore));
  (void)args;
  return bring_back(pid);
}

static CUresult unlock(int pid) {
  struct process *process;
  TRY(aim(pid, &process));
  CUresult answer = process->state == PROCESS_LOCKED ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
  if (answer == CUDA_SUCCESS) resume(process);
  world_unlock(driver_world);
  return answer;
}

CUresult cuCheckpointProcessUnlock(int pid, const void *args) {
  TRY(driver_count(CALL_cuCheckpointProcessUnlock));
  (void)args;
  return unlock(pid);
}
