/* Every export there is, for those that nothing else here defines: counted, and otherwise refused, as most of them have
 * something to hand out and no honest way to. Each counts for itself, so that no two of them can share an address. */
#define STUBS
#include "driver.h"

#define EXPORT(name)                                     \
  __attribute__((weak)) CUresult name() {                \
    CUresult problem = driver_enter(CALL_##name);        \
    return problem ? problem : CUDA_ERROR_NOT_SUPPORTED; \
  }
#define HOOK(name, parameters) EXPORT(name)
#define COPY(name, ...) EXPORT(name)
#define PAUSE(name, ...) EXPORT(name)
#define DENY(name, error) EXPORT(name)
#include "exports.def"
#include "hooks.def"
