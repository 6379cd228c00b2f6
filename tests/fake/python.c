/* What tests see of a world, and do to it. */
#include "world.h"

#include <errno.h>
#include <string.h>

#define HOOK(name, parameters) #name,
#define COPY(name, ...) #name,
#define PAUSE(name, ...) #name,
#define DENY(name, error) #name,
#define EXPORT(name) #name,
static const char *const names[] = {
#include "hooks.def"
#include "exports.def"
};

int python_create(const char *path, const struct world_config *config) { return world_create(path, config); }

size_t python_config_size(void) { return sizeof(struct world_config); }

struct world *python_open(const char *path) { return world_open(path); }

void python_close(struct world *world) { world_close(world); }

/* How often an export was called in all processes together; -1: there is no such. */
int64_t python_calls(struct world *world, const char *name) {
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strcmp(names[i], name) == 0) return (int64_t)world->calls[i];
  return -1;
}

static void look(struct world *world) {
  world_lock(world);
  world_reap(world);
}

int64_t python_executed_ns(struct world *world, int pid, int device) {
  look(world);
  const struct process *process = world_find(world, pid);
  int64_t ns = process != NULL ? process->executed_ns[device] : 0;
  world_unlock(world);
  return ns;
}

int64_t python_last_ns(struct world *world, int pid, int device) {
  look(world);
  const struct process *process = world_find(world, pid);
  int64_t ns = process != NULL ? process->last_ns[device] : 0;
  world_unlock(world);
  return ns;
}

int64_t python_memory(struct world *world, int pid, int device) {
  look(world);
  const struct process *process = world_find(world, pid);
  int64_t bytes = process != NULL ? (int64_t)process->memory[device] : 0;
  world_unlock(world);
  return bytes;
}

int64_t python_used(struct world *world, int device) {
  look(world);
  int64_t bytes = (int64_t)world->devices[device].used;
  world_unlock(world);
  return bytes;
}

int64_t python_busy_ns(struct world *world, int device) {
  look(world);
  int64_t ns = world->devices[device].busy_ns;
  world_unlock(world);
  return ns;
}

int64_t python_copied_ns(struct world *world, int device) {
  look(world);
  int64_t ns = world->devices[device].copied_ns;
  world_unlock(world);
  return ns;
}

/* Items that are not done, in all lanes of the process. */
int64_t python_pending(struct world *world, int pid) {
  look(world);
  const struct process *process = world_find(world, pid);
  int64_t items = process != NULL ? (int64_t)process->items : 0;
  world_unlock(world);
  return items;
}

int64_t python_now_ns(struct world *world) { return world_now(world); }

int python_advance(struct world *world, int64_t ns) {
  if (world->config.virtual_ns == 0) return EINVAL;
  world_lock(world);
  world->virtual_ns += ns;
  world_advance(world, world_now(world));
  world_unlock(world);
  return 0;
}
