/* Graphs: their nodes allocate when the graph is launched. */
#include "pools.h"

/* By graph, executable graph or capture, and device -> units allocated by its nodes; count: runs. */
static struct table graphs = TABLE_EMPTY;

/* Addresses have 48 bits at most, and captures are numbered. */
static uint64_t key_of(uint64_t graph, unsigned place) { return graph ^ (uint64_t)(place + 1) << 56; }

static void graph_allocates(uint64_t graph, int place, int64_t units) {
  if (place < 0 || place >= GUARD_DEVICES) return;
  struct entry entry = table_get(&graphs, key_of(graph, (unsigned)place));
  entry = (struct entry){.key = key_of(graph, (unsigned)place), .units = entry.units + units, .device = place};
  (void)table_put(&graphs, entry);
}

static void graph_includes(uint64_t graph, uint64_t other) {
  for (unsigned place = 0; graphs.used != 0 && place < guard_policy->devices; place++) {
    struct entry part = table_get(&graphs, key_of(other, place));
    if (part.key != 0) graph_allocates(graph, part.device, part.units);
  }
}

static void graph_ends(uint64_t graph) {
  for (unsigned place = 0; graphs.used != 0 && place < guard_policy->devices; place++) (void)table_take(&graphs, key_of(graph, place));
}

static CUresult place_of(const CUDA_MEM_ALLOC_NODE_PARAMS *node, int *place) {
  return memory_place(&node->poolProps.location, node->poolProps.allocType, place);
}

static void node_added(CUgraph graph, const CUDA_MEM_ALLOC_NODE_PARAMS *node) {
  int place;
  if (place_of(node, &place) == CUDA_SUCCESS) graph_allocates(id(graph), place, units_for(node->bytesize));
}

/* After a call with this result, which is returned. */
static CUresult graph_becomes(CUresult result, const CUgraphExec *exec, CUgraph graph) {
  if (result != CUDA_SUCCESS) return result;
  graph_ends(id(*exec));
  graph_includes(id(*exec), id(graph));
  return result;
}

static bool is_foreign(const CUDA_MEM_ALLOC_NODE_PARAMS *node) {
  int place;
  return node != NULL && place_of(node, &place) == CUDA_ERROR_NOT_PERMITTED;
}

static bool is_any_foreign(const CUgraphNodeParams *node) {
  return node != NULL && node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && is_foreign(&node->alloc);
}

static CUresult any_node_added(CUresult result, CUgraph graph, const CUgraphNodeParams *node) {
  if (result != CUDA_SUCCESS) return result;
  if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) node_added(graph, &node->alloc);
  if (node->type == CU_GRAPH_NODE_TYPE_GRAPH) graph_includes(id(graph), id(node->graph.graph));
  return result;
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *node) {
  if (is_foreign(node)) return CUDA_ERROR_NOT_PERMITTED;
  CUresult result = REAL(cuGraphAddMemAllocNode)(out, graph, after, count, node);
  if (result == CUDA_SUCCESS) node_added(graph, node);
  return result;
}

CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *node) {
  if (is_any_foreign(node)) return CUDA_ERROR_NOT_PERMITTED;
  return any_node_added(REAL(cuGraphAddNode)(out, graph, after, count, node), graph, node);
}

CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count,
                           CUgraphNodeParams *node) {
  if (is_any_foreign(node)) return CUDA_ERROR_NOT_PERMITTED;
  return any_node_added(REAL(cuGraphAddNode_v2)(out, graph, after, edges, count, node), graph, node);
}

CUresult cuGraphAddNode_v3(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count,
                           CUgraphNodeParams *node) {
  if (is_any_foreign(node)) return CUDA_ERROR_NOT_PERMITTED;
  return any_node_added(REAL(cuGraphAddNode_v3)(out, graph, after, edges, count, node), graph, node);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph child) {
  CUresult result = REAL(cuGraphAddChildGraphNode)(out, graph, after, count, child);
  if (result == CUDA_SUCCESS) graph_includes(id(graph), id(child));
  return result;
}

CUresult cuGraphClone(CUgraph *out, CUgraph graph) {
  CUresult result = REAL(cuGraphClone)(out, graph);
  if (result == CUDA_SUCCESS) graph_includes(id(*out), id(graph));
  return result;
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
  return graph_becomes(REAL(cuGraphInstantiate)(out, graph, error, log, size), out, graph);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size) {
  return graph_becomes(REAL(cuGraphInstantiate_v2)(out, graph, error, log, size), out, graph);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  return graph_becomes(REAL(cuGraphInstantiateWithFlags)(out, graph, flags), out, graph);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  return graph_becomes(REAL(cuGraphInstantiateWithParams)(out, graph, params), out, graph);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  return graph_becomes(REAL(cuGraphInstantiateWithParams_ptsz)(out, graph, params), out, graph);
}

CUresult cuGraphDestroy(CUgraph graph) {
  graph_ends(id(graph));
  return REAL(cuGraphDestroy)(graph);
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
  graph_ends(id(exec));
  return REAL(cuGraphExecDestroy)(exec);
}

/* --- captures: what is allocated in one belongs to the graph that it becomes */

uint64_t memory_capture(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t number = 0;
  if (DRIVER(cuStreamGetCaptureInfo)(stream, &status, &number) != CUDA_SUCCESS) return 0;
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? number << 1 | 1 : 0; /* no address */
}

void graphs_captured(CUstream stream, int place, int64_t units) { graph_allocates(memory_capture(stream), place, units); }

void memory_captured(uint64_t capture, const CUgraph *graph) {
  if (graph != NULL) graph_includes(id(*graph), capture);
  graph_ends(capture);
}

void memory_recaptured(CUgraph graph) { graph_ends(id(graph)); }

/* --- runs */

/* After a run or an upload: what the driver has reserved takes the place of what was held back. */
static void settle_graph(struct graph_hold *hold) {
  for (unsigned place = 0; hold->places >> place != 0; place++) {
    if (!(hold->places >> place & 1)) continue;
    pools_graph_memory(guard_number((int)place), (int)place);
    memory_give_back((int)place, hold->units[place]);
    hold->units[place] = 0;
  }
}

static void has_run(CUgraphExec exec, const struct graph_hold *hold) {
  for (unsigned place = 0; hold->places >> place != 0; place++) (void)table_count(&graphs, key_of(id(exec), place), 1);
}

/* The nodes may use memory of each other, so that the graph fits although their sum does not: then its memory is made before the run, and
 * dropped again if it is too much. */
static CUresult upload_first(CUgraphExec exec, CUstream stream, struct graph_hold *hold) {
  CUresult result = REAL(cuGraphUpload)(exec, stream);
  settle_graph(hold);
  bool fits = result == CUDA_SUCCESS;
  for (unsigned place = 0; hold->places >> place != 0; place++) {
    uint64_t limit = atomic_load(&guard_policy->allowances[place].memory_limit) / GUARD_UNIT;
    if (!(hold->places >> place & 1) || ledger_used(guard_job, place) <= limit) continue;
    atomic_fetch_add(&guard_job->uses[place].refused, 1);
    fits = false;
  }
  if (fits) {
    has_run(exec, hold);
    return CUDA_SUCCESS;
  }
  for (unsigned place = 0; hold->places >> place != 0; place++)
    if (hold->places >> place & 1) (void)cuDeviceGraphMemTrim(guard_number((int)place));
  return result != CUDA_SUCCESS ? result : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The reservation until the driver reports its own: everything, unless the graph ran before and its memory exists. */
CUresult memory_before_graph(CUgraphExec exec, CUstream stream, struct graph_hold *hold) {
  bool whole = true;
  int64_t step = (int64_t)(CHUNK / GUARD_UNIT);
  hold->places = 0;
  for (unsigned place = 0; graphs.used != 0 && place < guard_policy->devices; place++) {
    struct entry entry = table_get(&graphs, key_of(id(exec), place));
    if (entry.key == 0 || entry.units == 0) continue;
    hold->places |= 1u << place;
    hold->units[place] = 0;
    if (entry.count > 0) continue;
    int64_t units = (entry.units + step - 1) / step * step;
    if (!memory_fits((int)place, units) && !memory_fits((int)place, units = entry.units)) units = 0;
    hold->units[place] = units;
    whole = whole && units != 0;
  }
  return whole ? CUDA_SUCCESS : upload_first(exec, stream, hold);
}

void memory_after_graph(CUgraphExec exec, struct graph_hold *hold, CUresult result) {
  settle_graph(hold);
  if (result == CUDA_SUCCESS) has_run(exec, hold);
}

static CUresult upload(CUgraphExec exec, CUstream stream) {
  struct graph_hold hold;
  CUresult result = memory_before_graph(exec, stream, &hold);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuGraphUpload)(exec, stream);
  memory_after_graph(exec, &hold, result);
  return result;
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) { return upload(exec, legacy_stream(stream)); }
CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) { return upload(exec, own_stream(stream)); }

static void has_not_run(struct entry *entry, void *with) {
  (void)with;
  entry->count = 0;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
  CUresult result = REAL(cuDeviceGraphMemTrim)(device);
  table_each(&graphs, has_not_run, NULL);
  memory_settle();
  return result;
}

void graphs_forked(void) { table_clear(&graphs); }
