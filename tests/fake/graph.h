/* Graphs, and the capture of streams into them. Under `driver_lock`. */
#ifndef FAKE_GRAPH_H
#define FAKE_GRAPH_H

#include "driver.h"

enum node_type {
  NODE_KERNEL = 0,
  NODE_MEMCPY = 1,
  NODE_MEMSET = 2,
  NODE_HOST = 3,
  NODE_GRAPH = 4,
  NODE_EMPTY = 5,
  NODE_ALLOC = 10,
  NODE_FREE = 11,
};

/* Memory that a graph allocates: its address is fixed when the node is made, and good from a launch on until it is freed. */
struct grant {
  uint64_t address, size;
  int device;
  bool freed_inside; /* by the graph that allocates it */
  struct exec *live; /* whose launch has allocated it; NULL: not now */
  struct grant *next;
};

struct node {
  enum magic magic;
  enum node_type type;
  int64_t ns;
  struct grant *grant; /* of NODE_ALLOC and NODE_FREE */
  struct graph *graph, *child;
  struct node **after;
  size_t count;
  struct node *next, *copy;
  int64_t end_ns; /* scratch: see end_of */
  bool reused;    /* of NODE_FREE: a later node has this memory */
};

struct graph {
  enum magic magic;
  struct node *first, *last;
  size_t nodes;
  bool memory, owned; /* has nodes of memory; belongs to a node of another */
};

struct node *graph_add(struct graph *graph, enum node_type type, struct node *const *after, size_t count);
struct node *graph_allocate(struct graph *graph, int device, uint64_t bytes, struct node *const *after, size_t count);
struct node *graph_release(struct graph *graph, CUdeviceptr address, struct node *const *after, size_t count); /* may be NULL */
struct graph *graph_new(void);
void graph_delete(struct graph *graph);
/* Whether all nodes of `front` come before one of `end`. */
bool graph_ends_with(struct graph *graph, const struct front *front, const struct front *end);

#endif
