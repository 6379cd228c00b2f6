#include "cover.h"

#include <string.h>

static void drop(struct cover *cover, int from, int count) {
  int after = cover->count - from - count;
  memmove(&cover->starts[from], &cover->starts[from + count], (size_t)after * sizeof *cover->starts);
  memmove(&cover->ends[from], &cover->ends[from + count], (size_t)after * sizeof *cover->ends);
  cover->count -= count;
}

static void insert(struct cover *cover, int at, int64_t start, int64_t end) {
  int after = cover->count - at;
  memmove(&cover->starts[at + 1], &cover->starts[at], (size_t)after * sizeof *cover->starts);
  memmove(&cover->ends[at + 1], &cover->ends[at], (size_t)after * sizeof *cover->ends);
  cover->starts[at] = start;
  cover->ends[at] = end;
  cover->count++;
}

int64_t cover_add(struct cover *cover, int64_t start, int64_t end) {
  if (start < cover->floor) start = cover->floor;
  if (end <= start) return 0;
  int first = 0;
  while (first < cover->count && cover->ends[first] < start) first++;
  int64_t fresh = end - start, from = start, to = end;
  int last = first;
  for (; last < cover->count && cover->starts[last] <= end; last++) { /* merge the stretches that it touches */
    int64_t low = cover->starts[last], high = cover->ends[last];
    int64_t common = (high < end ? high : end) - (low > start ? low : start);
    if (common > 0) fresh -= common;
    if (low < from) from = low;
    if (high > to) to = high;
  }
  drop(cover, first, last - first);
  if (cover->count == COVER_MAX) {
    cover->floor = cover->ends[0];
    drop(cover, 0, 1);
    if (first > 0) first--;
  }
  if (from < cover->floor) { /* the dropped stretch came after it */
    from = cover->floor;
    if (to <= from) return fresh;
  }
  insert(cover, first, from, to);
  return fresh;
}
