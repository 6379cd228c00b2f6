/* Every other export of NVIDIA's management library. */
#define EXPORT(name) \
  __attribute__((weak)) int name() { return 3; /* NVML_ERROR_NOT_SUPPORTED */ }
#include "nvml_exports.def"
