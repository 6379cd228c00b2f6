// What the kernel does with packets at this node's edge. `mesh_guest` sits on both directions of an interface that is a guest's
// alone; `mesh_device` sees what leaves by the machine's own interface. The words of the cut and the classes come from program.py.
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#define SECTION(name) __attribute__((section(name), used))

// Their kinds and sizes are program.py's, which makes them; here they are only names to be put into the code.
struct map {
  int unused;
};
struct map cut SECTION("maps");    // one word
struct map guests SECTION("maps"); // by number of interface: whether this one is cut

static void *(*lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;

static __attribute__((always_inline)) __u32 words(void) {
  __u32 first = 0, *found = lookup(&cut, &first);
  return found ? *found : 0;
}

SECTION("tc/guest") int mesh_guest(struct __sk_buff *packet) {
  __u32 interface = packet->ifindex, *alone = lookup(&guests, &interface);
  return (words() & CUT_GUESTS) || (alone && *alone) ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

SECTION("tc/device") int mesh_device(struct __sk_buff *packet) {
  __u32 class = packet->priority, from = packet->ingress_ifindex, *alone;
  if (class == CLASS_HOST || class == CLASS_URGENT || class == CLASS_BULK)
    return words() & CUT_MIGRATION ? TC_ACT_SHOT : TC_ACT_UNSPEC;
  alone = from ? lookup(&guests, &from) : 0; // none: the machine's own
  if (!alone)
    return TC_ACT_UNSPEC;
  if ((words() & CUT_GUESTS) || *alone)
    return TC_ACT_SHOT;
  packet->priority = CLASS_GUEST;
  return TC_ACT_UNSPEC;
}

char terms[] SECTION("license") = "Apache-2.0";
