/* cuGetProcAddress: which of the exports a name means, for a program of some version. The table is made by build.py from
 * NVIDIA's own list, where that is installed. */
#include "driver.h"

#include <string.h>

/* Only addresses, as prototypes are of no use here. */
#define EXPORT(name) CUresult name();
#define COPY(name, ...) CUresult name();
#define PAUSE(name, ...) CUresult name();
#define HOOK(name, parameters)
#define DENY(name, error) CUresult name();
#include "exports.def"
#include "hooks.def"
#undef EXPORT
#undef COPY
#undef PAUSE
#undef HOOK
#undef DENY

enum { LEGACY = 1, PER_THREAD = 2 };

static const struct row {
  const char *name;
  int since;
  bool per_thread;
  void *address;
} rows[] = {
#define ROW(name, since, per_thread, symbol) {name, since, per_thread, (void *)(uintptr_t)symbol},
#include "table.inc"
#undef ROW
};

/* Other addresses of the calls that the guard hooks, as a driver may give them: no export has them. */
#ifdef __aarch64__
#define JUMP(name) "b " #name
#else
#define JUMP(name) "jmp " #name "@PLT"
#endif
#define ALIAS(name)                                                                                                      \
  __asm__(".text\n.type alias_" #name ", %function\nalias_" #name ": " JUMP(name) "\n.size alias_" #name ", .-alias_" #name "\n"); \
  extern const char alias_##name[];
#define HOOK(name, parameters) ALIAS(name)
#define COPY(name, ...) ALIAS(name)
#define PAUSE(name, ...) ALIAS(name)
#define DENY(name, error)
#include "hooks.def"
#undef HOOK
#undef COPY
#undef PAUSE
static const struct {
  void *address;
  const char *alias;
} aliases[] = {
#define HOOK(name, parameters) {(void *)(uintptr_t)name, alias_##name},
#define COPY(name, ...) {(void *)(uintptr_t)name, alias_##name},
#define PAUSE(name, ...) COPY(name)
#include "hooks.def"
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY
};

static void *given(void *address) {
  if (driver_world == NULL || !driver_world->config.traits.aliases) return address;
  for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
    if (aliases[i].address == address) return (void *)(uintptr_t)aliases[i].alias;
  return address;
}

static int newest(void) { return driver_world != NULL ? (int)driver_world->config.driver_version : 13000; }

static CUdriverProcAddressQueryResult resolve(const char *name, int version, bool per_thread, void **address) {
  const struct row *found = NULL;
  bool known = false, own = false;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    own |= rows[i].per_thread && rows[i].since <= newest() && strcmp(rows[i].name, name) == 0;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const struct row *row = &rows[i];
    if (row->since > newest() || strcmp(row->name, name) != 0) continue; /* this driver does not know of it */
    known = true;
    bool fits = row->per_thread == (per_thread && own) && (unsigned int)row->since <= (unsigned int)version;
    if (fits && (found == NULL || row->since > found->since)) found = row;
  }
  *address = found != NULL ? given(found->address) : NULL;
  if (found != NULL) return CU_GET_PROC_ADDRESS_SUCCESS;
  return known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

/* What these two answer is what the driver 535 does, which takes any of the lowest two bits for flags. The driver 580 knows no version
 * after its own. */
static bool is_later(int version) { return newest() >= 13000 && version > newest(); }

CUresult cuGetProcAddress(const char *symbol, void **address, int version, cuuint64_t flags) {
  void *found;
  TRY(driver_count(CALL_cuGetProcAddress));
  REFUSE_IF(symbol == NULL || address == NULL || flags > (LEGACY | PER_THREAD) || is_later(version), CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(resolve(symbol, version, flags & PER_THREAD, &found) != CU_GET_PROC_ADDRESS_SUCCESS, CUDA_ERROR_NOT_FOUND);
  *address = found;
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  TRY(driver_count(CALL_cuGetProcAddress_v2));
  REFUSE_IF(symbol == NULL || address == NULL || flags > (LEGACY | PER_THREAD) || is_later(version), CUDA_ERROR_INVALID_VALUE);
  CUdriverProcAddressQueryResult result = resolve(symbol, version, flags & PER_THREAD, address);
  if (status != NULL) *status = result;
  return CUDA_SUCCESS;
}
