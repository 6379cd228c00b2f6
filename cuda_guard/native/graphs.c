/* Graphs: their nodes allocate when the graph is launched. */
#include "pools.h"

static struct table graphs = TABLE_EMPTY; /* graph or executable graph -> units allocated by its nodes; count: runs */

static void graph_allocates(CUgraph graph, int device, int64_t units) {
  struct entry entry = table_get(&graphs, id(graph));
  entry = (struct entry){.key = id(graph), .units = entry.units + units, .device = device};
  (void)table_put(&graphs, entry);
}

static void graph_includes(CUgraph graph, CUgraph other) {
  struct entry part = table_get(&graphs, id(other));
  if (part.key != 0) graph_allocates(graph, part.device, part.units);
}

static void node_added(CUgraph graph, const CUDA_MEM_ALLOC_NODE_PARAMS *node) {
  if (node->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
    graph_allocates(graph, guard_device(node->poolProps.location.id), units_for(node->bytesize));
}

/* After a call with this result, which is returned. */
static CUresult graph_becomes(CUresult result, const CUgraphExec *exec, CUgraph graph) {
  struct entry entry = result == CUDA_SUCCESS ? table_get(&graphs, id(graph)) : (struct entry){0};
  if (entry.key == 0) return result;
  entry.key = id(*exec);
  entry.count = 0;
  (void)table_put(&graphs, entry);
  return result;
}

static bool is_foreign(const CUDA_MEM_ALLOC_NODE_PARAMS *node) {
  return node != NULL && node->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE && guard_device(node->poolProps.location.id) < 0;
}

static bool is_any_foreign(const CUgraphNodeParams *node) {
  return node != NULL && node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && is_foreign(&node->alloc);
}

static CUresult any_node_added(CUresult result, CUgraph graph, const CUgraphNodeParams *node) {
  if (result != CUDA_SUCCESS) return result;
  if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) node_added(graph, &node->alloc);
  if (node->type == CU_GRAPH_NODE_TYPE_GRAPH) graph_includes(graph, node->graph.graph);
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
  if (result == CUDA_SUCCESS) graph_includes(graph, child);
  return result;
}

CUresult cuGraphClone(CUgraph *out, CUgraph graph) {
  CUresult result = REAL(cuGraphClone)(out, graph);
  if (result == CUDA_SUCCESS) graph_includes(*out, graph);
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
  (void)table_take(&graphs, id(graph));
  return REAL(cuGraphDestroy)(graph);
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
  (void)table_take(&graphs, id(exec));
  return REAL(cuGraphExecDestroy)(exec);
}

void memory_captured(CUgraph graph) {
  int64_t units = atomic_exchange(&pools_captured, 0);
  int device;
  if (units > 0 && guard_current(&device) == CUDA_SUCCESS) graph_allocates(graph, device, units);
}

void memory_recaptured(CUgraph graph) { (void)table_take(&graphs, id(graph)); }

/* The reservation until the driver reports its own: everything, unless the graph ran before and its memory exists. */
CUresult memory_before_graph(CUgraphExec exec, struct graph_hold *hold) {
  *hold = (struct graph_hold){.device = -1};
  struct entry entry = table_get(&graphs, id(exec));
  if (entry.key == 0 || entry.units == 0 || entry.device < 0) return CUDA_SUCCESS;
  hold->device = entry.device;
  if (entry.count > 0) return CUDA_SUCCESS;
  int64_t step = (int64_t)(CHUNK / GUARD_UNIT);
  hold->units = (entry.units + step - 1) / step * step;
  if (memory_reserve(hold->device, hold->units)) return CUDA_SUCCESS;
  hold->units = entry.units;
  if (memory_reserve(hold->device, hold->units)) return CUDA_SUCCESS;
  hold->device = -1;
  return CUDA_ERROR_OUT_OF_MEMORY;
}

void memory_after_graph(CUgraphExec exec, struct graph_hold hold, CUresult result) {
  if (hold.device < 0) return;
  CUdevice device;
  if (DRIVER(cuCtxGetDevice)(&device) == CUDA_SUCCESS) pools_graph_memory(device, hold.device);
  memory_give_back(hold.device, hold.units);
  if (result == CUDA_SUCCESS) (void)table_count(&graphs, id(exec), 1);
}

static CUresult upload(CUgraphExec exec, CUstream stream) {
  struct graph_hold hold;
  CUresult result = memory_before_graph(exec, &hold);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuGraphUpload)(exec, stream);
  memory_after_graph(exec, hold, result);
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
