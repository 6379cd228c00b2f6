#include "graph.h"

#include <stdlib.h>
#include <string.h>

enum { AUTO_FREE = 1, MOVE = 1 };

/* What can be launched. It takes as long as the longest path through its graph, which is what its kernels need side by side. */
struct exec {
  enum magic magic;
  const struct graph *graph; /* of a graph with memory there is one at most; NULL once that is destroyed */
  int device;
  int64_t ns;
  uint64_t bytes;    /* what it allocates */
  bool resident;     /* it has that */
  unsigned int live; /* grants of its last launch that nobody has freed yet */
  unsigned long long flags;
  struct grant **allocates, **frees;
  size_t allocate_count, free_count;
  uint32_t lane; /* of its last launch */
  uint64_t mark;
  struct exec *next;
};

/* Memory of graphs stays reserved once launched, until it is trimmed. All of it counts as used, as it does for the real driver. */
static struct {
  uint64_t reserved, reserved_high, resident;
} cache[WORLD_DEVICES];
static struct grant *grants;
static struct exec *execs;

static bool is_device(CUdevice device) { return device >= 0 && (uint32_t)device < driver_world->config.devices; }

struct graph *graph_new(void) {
  struct graph *graph = calloc(1, sizeof *graph);
  graph->magic = MAGIC_GRAPH;
  return graph;
}

void graph_delete(struct graph *graph) {
  graph->magic = MAGIC_DEAD;
  for (struct exec *exec = execs; exec != NULL; exec = exec->next)
    if (exec->graph == graph) exec->graph = NULL;
  for (struct node *node = graph->first, *next; node != NULL; node = next) {
    next = node->next;
    node->magic = MAGIC_DEAD;
    if (node->child != NULL) graph_delete(node->child);
    free(node->after);
    free(node);
  }
  free(graph);
}

struct node *graph_add(struct graph *graph, enum node_type type, struct node *const *after, size_t count) {
  struct node *node = calloc(1, sizeof *node);
  *node = (struct node){.magic = MAGIC_NODE, .type = type, .graph = graph, .count = count};
  if (count > 0) memcpy(node->after = calloc(count, sizeof *after), after, count * sizeof *after);
  if (graph->last != NULL)
    graph->last->next = node;
  else
    graph->first = node;
  graph->last = node;
  graph->nodes++;
  return node;
}

struct node *graph_allocate(struct graph *graph, int device, uint64_t bytes, struct node *const *after, size_t count) {
  uint64_t size = world_granules(driver_world, bytes), address = heap_address(size, driver_world->config.granule);
  if (address == 0) return NULL;
  struct grant *grant = calloc(1, sizeof *grant);
  *grant = (struct grant){.address = address, .size = size, .device = device, .next = grants};
  grants = grant;
  heap_map(address, size, true);
  struct node *node = graph_add(graph, NODE_ALLOC, after, count);
  node->grant = grant;
  graph->memory = true;
  return node;
}

static struct grant *grant_at(CUdeviceptr address) {
  struct grant *grant = grants;
  while (grant != NULL && grant->address != address) grant = grant->next;
  return grant;
}

struct node *graph_release(struct graph *graph, CUdeviceptr address, struct node *const *after, size_t count) {
  struct grant *grant = grant_at(address);
  if (grant == NULL || grant->freed_inside) return NULL;
  for (const struct node *n = graph->first; n != NULL; n = n->next) grant->freed_inside |= n->grant == grant;
  struct node *node = graph_add(graph, NODE_FREE, after, count);
  node->grant = grant;
  graph->memory = true;
  return node;
}

/* Memory while it lives. */

static void settle(struct exec *exec) {
  if (exec->magic != MAGIC_DEAD || exec->live > 0) return;
  if (exec->resident) cache[exec->device].resident -= exec->bytes;
  for (struct exec **e = &execs; *e != NULL; e = &(*e)->next)
    if (*e == exec) {
      *e = exec->next;
      break;
    }
  free(exec->allocates);
  free(exec->frees);
  free(exec);
}

static void end_grant(struct grant *grant) {
  struct exec *exec = grant->live;
  if (exec == NULL) return;
  grant->live = NULL;
  exec->live--;
  settle(exec);
}

bool graph_owns(CUdeviceptr pointer) {
  const struct grant *grant = grant_at(pointer);
  return grant != NULL && grant->live != NULL;
}

bool graph_free(CUdeviceptr pointer) {
  if (!graph_owns(pointer)) return false;
  end_grant(grant_at(pointer));
  return true;
}

static bool settle_in(struct exec *exec) {
  if (exec->resident) return true;
  uint64_t cached = cache[exec->device].reserved - cache[exec->device].resident;
  uint64_t missing = exec->bytes > cached ? exec->bytes - cached : 0;
  world_lock(driver_world);
  bool taken = world_take(driver_world, driver_self, exec->device, missing);
  world_unlock(driver_world);
  if (!taken) return false;
  exec->resident = true;
  cache[exec->device].resident += exec->bytes;
  cache[exec->device].reserved += missing;
  if (cache[exec->device].reserved > cache[exec->device].reserved_high)
    cache[exec->device].reserved_high = cache[exec->device].reserved;
  return true;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
  CALL(cuDeviceGraphMemTrim);
  REFUSE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  world_lock(driver_world);
  for (struct exec *exec = execs; exec != NULL; exec = exec->next) {
    bool idle = exec->live == 0 && (exec->mark == 0 || driver_self->lanes[exec->lane].retired >= exec->mark);
    if (exec->device != device || !exec->resident || !idle) continue;
    exec->resident = false;
    cache[device].resident -= exec->bytes;
  }
  world_give(driver_world, driver_self, device, cache[device].reserved - cache[device].resident);
  world_unlock(driver_world);
  cache[device].reserved = cache[device].resident;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *value) {
  CALL(cuDeviceGetGraphMemAttribute);
  REFUSE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(value == NULL || (int)which < 0 || (int)which > 3, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  *(uint64_t *)value = (int)which % 2 == 1 ? cache[device].reserved_high : cache[device].reserved;
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *value) {
  CALL(cuDeviceSetGraphMemAttribute);
  REFUSE_IF(!is_device(device), CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(value == NULL || *(const uint64_t *)value != 0 || (which != 1 && which != 3), CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  cache[device].reserved_high = cache[device].reserved;
  return CUDA_SUCCESS;
}

/* Making graphs. */

static struct node *const *nodes_of(const CUgraphNode *handles) { return (struct node *const *)(const void *)handles; }

static CUresult check(CUgraph graph, const CUgraphNode *after, size_t count) {
  REFUSE_IF(!IS(graph, GRAPH) || (count > 0 && after == NULL), CUDA_ERROR_INVALID_VALUE);
  for (size_t i = 0; i < count; i++)
    REFUSE_IF(!IS(after[i], NODE) || ((struct node *)after[i])->graph != (struct graph *)graph, CUDA_ERROR_INVALID_VALUE);
  return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *out, unsigned int flags) {
  CALL(cuGraphCreate);
  REFUSE_IF(out == NULL || flags != 0, CUDA_ERROR_INVALID_VALUE);
  *out = (CUgraph)graph_new();
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  CALL(cuGraphDestroy);
  REFUSE_IF(!IS(graph, GRAPH) || ((struct graph *)graph)->owned, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  graph_delete((struct graph *)graph);
  return CUDA_SUCCESS;
}

static struct graph *clone(const struct graph *graph) {
  struct graph *copy = graph_new();
  for (struct node *node = graph->first; node != NULL; node = node->next) {
    node->copy = graph_add(copy, node->type, node->after, node->count);
    node->copy->ns = node->ns;
    if (node->child != NULL) {
      node->copy->child = clone(node->child);
      node->copy->child->owned = true;
    }
  }
  for (struct node *node = copy->first; node != NULL; node = node->next)
    for (size_t i = 0; i < node->count; i++) node->after[i] = node->after[i]->copy;
  return copy;
}

CUresult cuGraphClone(CUgraph *out, CUgraph handle) {
  const struct graph *graph = (const struct graph *)handle;
  CALL(cuGraphClone);
  REFUSE_IF(out == NULL || !IS(graph, GRAPH), CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  REFUSE_IF(graph->memory, CUDA_ERROR_NOT_SUPPORTED);
  *out = (CUgraph)clone(graph);
  return CUDA_SUCCESS;
}

/* The part of CUDA_KERNEL_NODE_PARAMS that all its versions begin with, and what the later ones add. */
struct kernel_params {
  CUfunction function;
  unsigned int gx, gy, gz, bx, by, bz, shared;
  void **params, **extra;
  CUfunction kernel;
  CUcontext context;
};

static CUresult add_kernel(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                           const struct kernel_params *p, bool later) {
  int64_t ns;
  REFUSE_IF(out == NULL || p == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(check(graph, after, count));
  const struct shape shape = {(uint64_t)p->gx * p->gy * p->gz, (uint64_t)p->bx * p->by * p->bz, p->params};
  TRY(function_time(later && p->function == NULL ? p->kernel : p->function, &shape, &ns));
  struct node *node = graph_add((struct graph *)graph, NODE_KERNEL, nodes_of(after), count);
  node->ns = ns;
  *out = (CUgraphNode)node;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, const void *params) {
  CALL(cuGraphAddKernelNode);
  LOCKED;
  return add_kernel(out, graph, after, count, params, false);
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, const void *params) {
  CALL(cuGraphAddKernelNode_v2);
  LOCKED;
  return add_kernel(out, graph, after, count, params, true);
}

static CUresult add_empty(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count) {
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(check(graph, after, count));
  *out = (CUgraphNode)graph_add((struct graph *)graph, NODE_EMPTY, nodes_of(after), count);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count) {
  CALL(cuGraphAddEmptyNode);
  LOCKED;
  return add_empty(out, graph, after, count);
}

static CUresult add_alloc(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                          CUDA_MEM_ALLOC_NODE_PARAMS *params) {
  REFUSE_IF(out == NULL || params == NULL || params->bytesize == 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
  REFUSE_IF(!is_device(params->poolProps.location.id), CUDA_ERROR_INVALID_VALUE);
  TRY(check(graph, after, count));
  struct node *node =
      graph_allocate((struct graph *)graph, params->poolProps.location.id, params->bytesize, nodes_of(after), count);
  REFUSE_IF(node == NULL, CUDA_ERROR_OUT_OF_MEMORY);
  params->dptr = node->grant->address;
  *out = (CUgraphNode)node;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *params) {
  CALL(cuGraphAddMemAllocNode);
  LOCKED;
  return add_alloc(out, graph, after, count, params);
}

static CUresult add_free(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUdeviceptr address) {
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(check(graph, after, count));
  struct node *node = graph_release((struct graph *)graph, address, nodes_of(after), count);
  *out = (CUgraphNode)node;
  return node != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUdeviceptr address) {
  CALL(cuGraphAddMemFreeNode);
  LOCKED;
  return add_free(out, graph, after, count, address);
}

/* A copy of the child, unless it is given away: with memory in it, it must be. */
static CUresult add_child(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph handle, bool move) {
  struct graph *child = (struct graph *)handle;
  REFUSE_IF(out == NULL || !IS(child, GRAPH) || handle == graph || (move && child->owned), CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(child->memory && !move, CUDA_ERROR_NOT_SUPPORTED);
  TRY(check(graph, after, count));
  struct node *node = graph_add((struct graph *)graph, NODE_GRAPH, nodes_of(after), count);
  node->child = move ? child : clone(child);
  node->child->owned = true;
  node->graph->memory |= child->memory;
  *out = (CUgraphNode)node;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph child) {
  CALL(cuGraphAddChildGraphNode);
  LOCKED;
  return add_child(out, graph, after, count, child, false);
}

static CUresult add_node(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *params) {
  struct {
    CUgraph graph;
    int ownership;
  } child;
  CUdeviceptr address;
  REFUSE_IF(params == NULL, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  switch ((int)params->type) {
    case NODE_KERNEL:
      return add_kernel(out, graph, after, count, (const struct kernel_params *)(const void *)params->reserved1, true);
    case NODE_EMPTY:
      return add_empty(out, graph, after, count);
    case NODE_GRAPH:
      memcpy(&child, params->reserved1, sizeof child);
      return add_child(out, graph, after, count, child.graph, child.ownership == MOVE);
    case NODE_ALLOC:
      return add_alloc(out, graph, after, count, &params->alloc);
    case NODE_FREE:
      memcpy(&address, params->reserved1, sizeof address);
      return add_free(out, graph, after, count, address);
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *params) {
  CALL(cuGraphAddNode);
  return add_node(out, graph, after, count, params);
}

CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                           size_t count, CUgraphNodeParams *params) {
  CALL(cuGraphAddNode_v2);
  REFUSE_IF(edges != NULL, CUDA_ERROR_NOT_SUPPORTED);
  return add_node(out, graph, after, count, params);
}

/* Looking at them. */

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *out, size_t *count) {
  const struct graph *graph = (const struct graph *)handle;
  CALL(cuGraphGetNodes);
  REFUSE_IF(!IS(graph, GRAPH) || count == NULL, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  struct node *node = graph->first;
  if (out != NULL)
    for (size_t i = 0; i < *count; i++) {
      out[i] = (CUgraphNode)node;
      if (node != NULL) node = node->next;
    }
  if (out == NULL || *count > graph->nodes) *count = graph->nodes;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *out) {
  CALL(cuGraphNodeGetType);
  REFUSE_IF(!IS(node, NODE) || out == NULL, CUDA_ERROR_INVALID_VALUE);
  *out = (CUgraphNodeType)((const struct node *)node)->type;
  return CUDA_SUCCESS;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *out) {
  CALL(cuGraphChildGraphNodeGetGraph);
  REFUSE_IF(!IS(node, NODE) || out == NULL || ((const struct node *)node)->type != NODE_GRAPH, CUDA_ERROR_INVALID_VALUE);
  *out = (CUgraph)((const struct node *)node)->child;
  return CUDA_SUCCESS;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS *out) {
  const struct node *node = (const struct node *)handle;
  CALL(cuGraphMemAllocNodeGetParams);
  REFUSE_IF(!IS(node, NODE) || out == NULL || node->type != NODE_ALLOC, CUDA_ERROR_INVALID_VALUE);
  *out = (CUDA_MEM_ALLOC_NODE_PARAMS){
      .poolProps = {.allocType = 1, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = node->grant->device}},
      .bytesize = node->grant->size,
      .dptr = node->grant->address,
  };
  return CUDA_SUCCESS;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr *out) {
  const struct node *node = (const struct node *)handle;
  CALL(cuGraphMemFreeNodeGetParams);
  REFUSE_IF(!IS(node, NODE) || out == NULL || node->type != NODE_FREE, CUDA_ERROR_INVALID_VALUE);
  *out = node->grant->address;
  return CUDA_SUCCESS;
}

/* Running them. */

static int64_t longest(struct graph *graph);

/* When a node is done, its graph having begun at 0. A node only comes after older ones, so there are no circles. */
static int64_t end_of(struct node *node) {
  if (node->end_ns >= 0) return node->end_ns;
  int64_t start = 0;
  for (size_t i = 0; i < node->count; i++) {
    int64_t end = end_of(node->after[i]);
    if (end > start) start = end;
  }
  return node->end_ns = start + (node->child != NULL ? longest(node->child) : node->ns);
}

static void forget_ends(struct graph *graph) {
  for (struct node *node = graph->first; node != NULL; node = node->next) node->end_ns = -1;
}

static int64_t longest(struct graph *graph) {
  int64_t most = 0;
  forget_ends(graph);
  for (struct node *node = graph->first; node != NULL; node = node->next) {
    int64_t end = end_of(node);
    if (end > most) most = end;
  }
  return most;
}

bool graph_ends_with(struct graph *graph, const struct front *front, const struct front *end) {
  forget_ends(graph);
  for (size_t i = 0; i < end->count; i++) end_of(end->nodes[i]); /* looks at all that come before them, and at no others */
  for (size_t i = 0; i < front->count; i++)
    if (front->nodes[i]->end_ns < 0) return false;
  return true;
}

static bool comes_before(const struct node *first, const struct node *node) {
  for (size_t i = 0; i < node->count; i++)
    if (node->after[i] == first || comes_before(first, node->after[i])) return true;
  return false;
}

/* Whether memory that the graph has freed before this node is there for it; each is used once. */
static bool reuses(const struct graph *graph, struct node *node) {
  for (struct node *n = graph->first; n != NULL; n = n->next) {
    if (n->type != NODE_FREE || !n->grant->freed_inside || n->grant->device != node->grant->device) continue;
    if (n->reused || n->grant->size < node->grant->size || !comes_before(n, node)) continue;
    return n->reused = true;
  }
  return false;
}

static void gather(struct exec *exec, const struct graph *graph) {
  for (struct node *node = graph->first; node != NULL; node = node->next) {
    if (node->child != NULL) gather(exec, node->child);
    if (node->grant == NULL) continue;
    struct grant ***list = node->type == NODE_ALLOC ? &exec->allocates : &exec->frees;
    size_t *count = node->type == NODE_ALLOC ? &exec->allocate_count : &exec->free_count;
    *list = realloc(*list, (*count + 1) * sizeof **list);
    (*list)[(*count)++] = node->grant;
    if (node->type == NODE_ALLOC) {
      if (!reuses(graph, node)) exec->bytes += node->grant->size;
      exec->device = node->grant->device;
    }
  }
}

static bool instantiated(const struct graph *graph) {
  for (const struct exec *exec = execs; exec != NULL; exec = exec->next)
    if (exec->graph == graph && IS(exec, EXEC)) return true;
  return false;
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
  struct graph *graph = (struct graph *)handle;
  REFUSE_IF(out == NULL || !IS(graph, GRAPH) || flags > 15, CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  REFUSE_IF(graph->memory && instantiated(graph), CUDA_ERROR_INVALID_VALUE);
  int64_t ns = longest(graph);
  struct exec *exec = calloc(1, sizeof *exec);
  *exec = (struct exec){.magic = MAGIC_EXEC, .graph = graph, .ns = ns, .flags = flags, .next = execs};
  execs = exec;
  gather(exec, graph);
  *out = (CUgraphExec)exec;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
  CALL(cuGraphInstantiate);
  if (error != NULL) *error = NULL;
  if (log != NULL && size > 0) *log = 0;
  return instantiate(out, graph, 0);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
  CALL(cuGraphInstantiate_v2);
  if (error != NULL) *error = NULL;
  if (log != NULL && size > 0) *log = 0;
  return instantiate(out, graph, 0);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  CALL(cuGraphInstantiateWithFlags);
  return instantiate(out, graph, flags);
}

static CUresult upload(CUgraphExec handle, CUstream stream, CUstream implied) {
  struct exec *exec = (struct exec *)handle;
  struct stream *found;
  REFUSE_IF(!IS(exec, EXEC), CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(stream, implied, &found));
  LOCKED;
  return settle_in(exec) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

STREAM_CALL(cuGraphUpload, (CUgraphExec exec, CUstream stream), upload(exec, stream, implied))

struct CUDA_GRAPH_INSTANTIATE_PARAMS_st {
  cuuint64_t flags;
  CUstream stream;
  CUgraphNode error;
  int result;
};

static CUresult instantiate_with(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params, CUstream implied) {
  enum { UPLOAD = 2 };
  REFUSE_IF(params == NULL, CUDA_ERROR_INVALID_VALUE);
  params->error = NULL;
  params->result = 1;
  TRY(instantiate(out, graph, params->flags));
  if (params->flags & UPLOAD) TRY(upload(*out, params->stream, implied));
  params->result = 0;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuGraphInstantiateWithParams, (CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params),
            instantiate_with(out, graph, params, implied))

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  struct exec *exec = (struct exec *)handle;
  CALL(cuGraphExecDestroy);
  REFUSE_IF(!IS(exec, EXEC), CUDA_ERROR_INVALID_VALUE);
  LOCKED;
  exec->magic = MAGIC_DEAD;
  settle(exec); /* or once its memory is freed */
  return CUDA_SUCCESS;
}

/* As if at the launch, which is when the host sees the accounts change. */
static CUresult account(struct exec *exec) {
  REFUSE_IF(exec->live > 0 && !(exec->flags & AUTO_FREE), CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!settle_in(exec), CUDA_ERROR_OUT_OF_MEMORY);
  for (size_t i = 0; i < exec->allocate_count; i++) {
    struct grant *grant = exec->allocates[i];
    end_grant(grant);
    if (grant->freed_inside) continue;
    grant->live = exec;
    exec->live++;
  }
  for (size_t i = 0; i < exec->free_count; i++) end_grant(exec->frees[i]);
  return CUDA_SUCCESS;
}

static CUresult launch(CUgraphExec handle, CUstream stream_handle, CUstream implied) {
  struct exec *exec = (struct exec *)handle;
  struct stream *stream;
  bool capturing;
  REFUSE_IF(!IS(exec, EXEC), CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(stream_handle, implied, &stream));
  TRY(capture_check(stream, &capturing));
  if (capturing) return exec->bytes > 0 ? CUDA_ERROR_NOT_SUPPORTED : capture_work(stream, NODE_EMPTY, exec->ns);
  {
    LOCKED;
    TRY(account(exec));
  }
  world_lock(driver_world);
  const struct item item = {.kind = ITEM_WORK,
                            .left_ns = world_chance(driver_world, driver_self, exec->ns),
                            .width_ppm = driver_world->config.traits.width_least_ppm > 0 ? WORLD_WHOLE : 0};
  exec->mark = world_submit(driver_world, driver_self, stream->lane, item);
  world_unlock(driver_world);
  exec->lane = stream->lane;
  return CUDA_SUCCESS;
}

STREAM_CALL(cuGraphLaunch, (CUgraphExec exec, CUstream stream), launch(exec, stream, implied))
