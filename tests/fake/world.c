#define _GNU_SOURCE
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x646c726f77756766ull /* "fguworld" */
#define LOCKS (1ll << 40) /* who lives holds a lock on its slot's byte of the file, past its end; it dies with the process */
#define REAP_NS 5000000

/* Every world opened here. Never closed: closing any descriptor of the file would let go of the process's lock. */
static struct {
  char path[256];
  struct world *world;
  int file;
} opened[64];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

int64_t world_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

int64_t world_now(const struct world *world) { return world->config.virtual_ns ? world->virtual_ns : world_clock(); }

int world_create(const char *path, const struct world_config *config) {
  int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return errno;
  struct world *world = MAP_FAILED;
  if (ftruncate(file, sizeof *world) == 0) world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  int problem = world == MAP_FAILED ? errno : 0;
  close(file);
  if (problem) return problem;
  world->config = *config;
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&world->lock, &kind);
  world->virtual_ns = config->virtual_ns;
  world->now_ns = world_now(world);
  world->next_sample_ns = world->now_ns + config->sample_ns;
  world->next_clock_ns = config->traits.clock_ns > 0 ? world->now_ns : WORLD_NEVER;
  for (uint32_t d = 0; d < config->devices; d++) {
    struct device *device = &world->devices[d];
    memcpy(device->name, config->name, sizeof device->name);
    memcpy(device->uuid, config->uuids[d], sizeof device->uuid);
    device->memory = config->memory;
    device->clock_ppm = WORLD_WHOLE;
  }
  world->magic = MAGIC;
  munmap(world, sizeof *world);
  return 0;
}

static struct world *map(const char *path, int *file) {
  *file = open(path, O_RDWR | O_CLOEXEC);
  if (*file < 0) return NULL;
  struct stat status;
  struct world *world = MAP_FAILED;
  if (fstat(*file, &status) == 0 && (size_t)status.st_size == sizeof *world)
    world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED, *file, 0);
  if (world != MAP_FAILED && world->magic == MAGIC) return world;
  if (world != MAP_FAILED) munmap(world, sizeof *world);
  close(*file);
  errno = EINVAL;
  return NULL;
}

struct world *world_open(const char *path) {
  struct world *world = NULL;
  pthread_mutex_lock(&opening);
  size_t free = sizeof opened / sizeof *opened;
  for (size_t i = 0; i < sizeof opened / sizeof *opened; i++) {
    if (opened[i].world == NULL)
      free = i;
    else if (strcmp(opened[i].path, path) == 0)
      world = opened[i].world;
  }
  if (world == NULL && free < sizeof opened / sizeof *opened && strlen(path) < sizeof opened[free].path) {
    world = opened[free].world = map(path, &opened[free].file);
    strcpy(opened[free].path, path);
  }
  pthread_mutex_unlock(&opening);
  return world;
}

void world_close(struct world *world) {
  pthread_mutex_lock(&opening);
  for (size_t i = 0; i < sizeof opened / sizeof *opened; i++) {
    if (opened[i].world != world) continue;
    munmap(world, sizeof *world);
    close(opened[i].file);
    opened[i].world = NULL;
  }
  pthread_mutex_unlock(&opening);
}

static int file_of(const struct world *world) {
  for (size_t i = 0; i < sizeof opened / sizeof *opened; i++)
    if (opened[i].world == world) return opened[i].file;
  return -1;
}

/* When the caller began, in ticks: others have its pid in their namespaces, or had it. */
static uint64_t begun_here(void) {
  char text[1024];
  int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
  if (file >= 0) close(file);
  text[length > 0 ? length : 0] = 0;
  char *at = strrchr(text, ')');
  for (int field = 2; at != NULL && field < 22; field++) at = strchr(at + 1, ' ');
  return at == NULL ? 0 : strtoull(at, NULL, 10);
}

/* As the caller's namespace numbers it; 0: it is dead. */
static int pid_here(const struct world *world, const struct process *process) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCKS + (process - world->processes), .l_len = 1};
  int result = fcntl(file_of(world), F_GETLK, &lock);
  if (result == 0 && lock.l_type == F_UNLCK) { /* nobody's lock stands in its own way */
    bool own = process->pid == getpid() && process->begun == begun_here();
    return own ? process->pid : 0;
  }
  return result == 0 && lock.l_pid > 0 ? lock.l_pid : -1;
}

static bool dead(const struct world *world, const struct process *process) { return pid_here(world, process) == 0; }

int world_pid(const struct world *world, const struct process *process) {
  int pid = process->alive ? pid_here(world, process) : 0;
  return pid > 0 ? pid : process->pid;
}

void world_reap(struct world *world) {
  world->reaped_ns = world_clock();
  for (uint32_t i = 0; i < world->joined; i++) {
    struct process *process = &world->processes[i];
    if (!process->alive || !dead(world, process)) continue;
    world_drop(world, process);
    for (uint32_t d = 0; d < world->config.devices; d++) world_give(world, process, (int)d, process->memory[d]);
    process->alive = 0;
  }
}

struct process *world_find(struct world *world, int pid) {
  for (uint32_t i = world->joined; i-- > 0;)
    if (world_pid(world, &world->processes[i]) == pid) return &world->processes[i];
  return NULL;
}

struct process *world_join(struct world *world) {
  struct process *process = NULL;
  world_lock(world);
  if (world->joined < WORLD_PROCESSES)
    process = &world->processes[world->joined++];
  else
    world_reap(world);
  for (uint32_t i = 0; i < WORLD_PROCESSES && process == NULL; i++)
    if (!world->processes[i].alive) memset(process = &world->processes[i], 0, sizeof *process);
  if (process != NULL) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCKS + (process - world->processes), .l_len = 1};
    fcntl(file_of(world), F_SETLK, &lock);
    process->pid = getpid();
    process->alive = 1;
    process->begun = begun_here();
  }
  world_unlock(world);
  return process;
}

void world_lock(struct world *world) {
  if (pthread_mutex_lock(&world->lock) == EOWNERDEAD) {
    pthread_mutex_consistent(&world->lock);
    world_reap(world);
  }
  if (world_clock() - world->reaped_ns > REAP_NS) world_reap(world); /* the dead run no kernels */
  world_advance(world, world_now(world));
}

void world_unlock(struct world *world) { pthread_mutex_unlock(&world->lock); }

uint64_t world_granules(const struct world *world, uint64_t bytes) {
  uint64_t granule = world->config.granule;
  return (bytes + granule - 1) / granule * granule;
}

bool world_take(struct world *world, struct process *process, int number, uint64_t bytes) {
  struct device *device = &world->devices[number];
  if (bytes > device->memory - device->used) world_reap(world);
  if (bytes > device->memory - device->used) return false;
  device->used += bytes;
  process->memory[number] += bytes;
  return true;
}

void world_give(struct world *world, struct process *process, int device, uint64_t bytes) {
  world->devices[device].used -= bytes;
  process->memory[device] -= bytes;
}

uint32_t world_open_lane(struct process *process, int device, uint32_t context, enum lane_kind kind) {
  for (uint32_t i = 0; i < WORLD_LANES; i++) {
    struct lane *lane = &process->lanes[i];
    if (lane->kind != LANE_UNUSED || lane->head != 0) continue; /* work of a destroyed stream still runs */
    lane->kind = kind;
    lane->device = device;
    lane->context = context;
    lane->part_ppm = WORLD_WHOLE;
    return i;
  }
  return WORLD_LANES;
}

void world_spend(struct world *world, int64_t ns) {
  enum { SPUN_NS = 100000 }; /* what is shorter is spun, as sleepers wake up late */
  if (ns <= 0) return;
  if (world->config.virtual_ns != 0) {
    world_lock(world);
    world->virtual_ns += ns;
    world_advance(world, world_now(world));
    world_unlock(world);
    return;
  }
  int64_t end = world_clock() + ns;
  struct timespec until = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
  if (ns > SPUN_NS)
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) continue;
  while (world_clock() < end) continue;
}

void world_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t until_ns) {
  struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
  /* The kernel may be 50 us late for ordinary sleepers, longer than most kernels run. */
  int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1);
  syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, until_ns == WORLD_NEVER ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
  prctl(PR_SET_TIMERSLACK, slack);
}

void world_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }
