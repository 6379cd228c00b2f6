// Sees every packet that comes in by an interface: when the last one came (CLOCK_MONOTONIC), and how many.
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#define SECTION(name) __attribute__((section(name), used))

struct map {
  int unused;
};
struct map seen SECTION("maps"); // low and high half of the time, and the count

static void *(*lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*now)(void) = (void *)BPF_FUNC_ktime_get_ns;

SECTION("tc/witness") int witness(struct __sk_buff *packet) {
  __u32 first = 0, second = 1, third = 2;
  __u32 *low = lookup(&seen, &first), *high = lookup(&seen, &second), *count = lookup(&seen, &third);
  __u64 at = now();
  if (packet->len < 1000 || !low || !high || !count) // neighbours ask for addresses at any time
    return TC_ACT_UNSPEC;
  *low = (__u32)at;
  *high = at >> 32;
  *count += 1;
  return TC_ACT_UNSPEC;
}

char terms[] SECTION("license") = "GPL"; // the clock is for such programs only
