/* Kernels. The name of one says how long it runs: k_250us, whatever its grid, or k_10us_per_block, k_1us_per_thread (of a block),
 * k_5us_per_arg (its first parameter, of 32 bits). k_100us_of4 is a collective of four ranks; its first parameter, if there are any,
 * says which. Any image may be loaded, and has every kernel that is named so. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_THREADS = 1024 };

struct module {
  enum magic magic;
  struct function *functions;
};

static bool suffix(const char *text, struct function *function) {
  static const char *const per[] = {[PER_LAUNCH] = "", "_per_block", "_per_thread", "_per_arg"};
  for (size_t i = 0; i < sizeof per / sizeof *per; i++) {
    function->per = i;
    if (strcmp(text, per[i]) == 0) return true;
  }
  function->per = PER_LAUNCH;
  return sscanf(text, "_of%u", &function->ranks) == 1 && function->ranks > 0;
}

static bool parse(const char *name, struct function *function) {
  static const struct {
    const char *unit;
    int64_t ns;
  } units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}};
  if (strncmp(name, "k_", 2) != 0 || strlen(name) >= sizeof function->name || name[2] < '0' || name[2] > '9') return false;
  char *rest;
  int64_t number = strtoll(name + 2, &rest, 10);
  size_t length = strcspn(rest, "_");
  for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
    if (strlen(units[i].unit) != length || strncmp(rest, units[i].unit, length) != 0) continue;
    function->ns = number * units[i].ns;
    return suffix(rest + length, function) && strcpy(function->name, name) != NULL;
  }
  return false;
}

static CUresult load(void **out, const void *image) {
  struct context *context;
  REFUSE_IF(out == NULL || image == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  struct module *module = calloc(1, sizeof *module);
  module->magic = MAGIC_MODULE;
  *out = module;
  return CUDA_SUCCESS;
}

static CUresult unload(struct module *module) {
  REFUSE_IF(!IS(module, MODULE), CUDA_ERROR_INVALID_HANDLE);
  LOCKED;
  module->magic = MAGIC_DEAD;
  for (struct function *f = module->functions; f != NULL; f = f->next) f->magic = MAGIC_DEAD;
  return CUDA_SUCCESS;
}

static CUresult function_of(void **out, struct module *module, const char *name) {
  struct function found = {.magic = MAGIC_FUNCTION, .module = module};
  REFUSE_IF(out == NULL || name == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!IS(module, MODULE), CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(!parse(name, &found), CUDA_ERROR_NOT_FOUND);
  LOCKED;
  struct function *function = module->functions;
  while (function != NULL && strcmp(function->name, name) != 0) function = function->next;
  if (function == NULL) {
    function = malloc(sizeof *function);
    *function = found;
    function->width_ppm = world_width_ppm(driver_world, name);
    function->next = module->functions;
    module->functions = function;
  }
  *out = function;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(void **out, const char *path) {
  CALL(cuModuleLoad);
  return load(out, path);
}

CUresult cuModuleLoadData(void **out, const void *image) {
  CALL(cuModuleLoadData);
  return load(out, image);
}

CUresult cuModuleLoadDataEx(void **out, const void *image, unsigned int count, int *options, void **values) {
  CALL(cuModuleLoadDataEx);
  (void)count, (void)options, (void)values;
  return load(out, image);
}

CUresult cuModuleUnload(void *module) {
  CALL(cuModuleUnload);
  return unload(module);
}

CUresult cuModuleGetFunction(void **out, void *module, const char *name) {
  CALL(cuModuleGetFunction);
  return function_of(out, module, name);
}

/* Libraries are modules of no context in particular, and their kernels functions. */

CUresult cuLibraryLoadData(void **out, const void *code, int *jit, void **jit_values, unsigned int jit_count, int *options,
                           void **values, unsigned int count) {
  CALL(cuLibraryLoadData);
  (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
  return load(out, code);
}

CUresult cuLibraryUnload(void *library) {
  CALL(cuLibraryUnload);
  return unload(library);
}

CUresult cuLibraryGetKernel(void **out, void *library, const char *name) {
  CALL(cuLibraryGetKernel);
  return function_of(out, library, name);
}

CUresult cuKernelGetFunction(void **out, void *kernel) {
  CALL(cuKernelGetFunction);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!IS(kernel, FUNCTION), CUDA_ERROR_INVALID_HANDLE);
  *out = kernel;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **out, CUfunction function) {
  CALL(cuFuncGetName);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!IS(function, FUNCTION), CUDA_ERROR_INVALID_HANDLE);
  *out = ((const struct function *)function)->name;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(void **out, CUfunction function) {
  CALL(cuFuncGetModule);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(!IS(function, FUNCTION), CUDA_ERROR_INVALID_HANDLE);
  *out = ((const struct function *)function)->module;
  return CUDA_SUCCESS;
}

static uint32_t first_of(void **params) { return params != NULL && params[0] != NULL ? *(const uint32_t *)params[0] : 0; }

CUresult function_time(CUfunction handle, const struct shape *shape, int64_t *ns) {
  const struct function *function = (const struct function *)handle;
  REFUSE_IF(!IS(function, FUNCTION), CUDA_ERROR_INVALID_HANDLE);
  REFUSE_IF(shape->blocks == 0 || shape->threads == 0 || shape->threads > BLOCK_THREADS, CUDA_ERROR_INVALID_VALUE);
  const uint64_t times[] = {1, shape->blocks, shape->threads, first_of(shape->params)};
  *ns = function->ns * (int64_t)times[function->per];
  return CUDA_SUCCESS;
}

/* The driver loads a kernel's code, or compiles it, when it is first launched. */
static void load_lazily(struct function *function) {
  if (!atomic_exchange(&function->loaded, true)) world_spend(driver_world, world_load_ns(driver_world, function->name));
}

static CUresult launch(CUfunction handle, struct shape shape, CUstream stream_handle, CUstream implied) {
  struct function *function = (struct function *)handle;
  struct stream *stream;
  int64_t ns;
  bool capturing, taken = true;
  TRY(function_time(handle, &shape, &ns));
  TRY(stream_find(stream_handle, implied, &stream));
  TRY(capture_check(stream, &capturing));
  load_lazily(function);
  if (capturing) return capture_work(stream, 0, ns);
  world_lock(driver_world);
  struct item item = {.kind = ITEM_WORK, .left_ns = world_chance(driver_world, driver_self, ns), .width_ppm = function->width_ppm};
  if (function->ranks > 0)
    taken = world_gather(driver_world, driver_self, stream->context->device, first_of(shape.params), function->ranks, &item);
  if (taken) world_submit(driver_world, driver_self, stream->lane, item);
  world_unlock(driver_world);
  return taken ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static uint64_t volume(unsigned int x, unsigned int y, unsigned int z) { return (uint64_t)x * y * z; }

STREAM_CALL(cuLaunchKernel,
            (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
             unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra),
            ((void)shared, (void)extra,
             launch(function, (struct shape){volume(gx, gy, gz), volume(bx, by, bz), params}, stream, implied)))

STREAM_CALL(cuLaunchCooperativeKernel,
            (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
             unsigned int bz, unsigned int shared, CUstream stream, void **params),
            ((void)shared,
             launch(function, (struct shape){volume(gx, gy, gz), volume(bx, by, bz), params}, stream, implied)))

static CUresult launch_configured(const CUlaunchConfig *c, CUfunction function, void **params, CUstream implied) {
  REFUSE_IF(c == NULL, CUDA_ERROR_INVALID_VALUE);
  const struct shape shape = {volume(c->gridDimX, c->gridDimY, c->gridDimZ), volume(c->blockDimX, c->blockDimY, c->blockDimZ),
                              params};
  return launch(function, shape, c->hStream, implied);
}

STREAM_CALL(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **params, void **extra),
            ((void)extra, launch_configured(config, function, params, implied)))

/* One after another, each on the device of its own stream. */
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
  CALL(cuLaunchCooperativeKernelMultiDevice);
  REFUSE_IF(list == NULL || count == 0 || flags > 3, CUDA_ERROR_INVALID_VALUE);
  for (unsigned int i = 0; i < count; i++) {
    const CUDA_LAUNCH_PARAMS *p = &list[i];
    const struct shape shape = {volume(p->gridDimX, p->gridDimY, p->gridDimZ), volume(p->blockDimX, p->blockDimY, p->blockDimZ),
                                p->kernelParams};
    TRY(launch(p->function, shape, p->hStream, CU_STREAM_LEGACY));
  }
  return CUDA_SUCCESS;
}

/* From before CUDA 4. */

CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z) {
  CALL(cuFuncSetBlockShape);
  REFUSE_IF(!IS(function, FUNCTION), CUDA_ERROR_INVALID_HANDLE);
  return x > 0 && y > 0 && z > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunch(CUfunction function) {
  CALL(cuLaunch);
  return launch(function, (struct shape){1, 1, NULL}, NULL, CU_STREAM_LEGACY);
}

CUresult cuLaunchGrid(CUfunction function, int width, int height) {
  CALL(cuLaunchGrid);
  REFUSE_IF(width <= 0 || height <= 0, CUDA_ERROR_INVALID_VALUE);
  return launch(function, (struct shape){volume((unsigned int)width, (unsigned int)height, 1), 1, NULL}, NULL, CU_STREAM_LEGACY);
}

CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
  CALL(cuLaunchGridAsync);
  REFUSE_IF(width <= 0 || height <= 0, CUDA_ERROR_INVALID_VALUE);
  return launch(function, (struct shape){volume((unsigned int)width, (unsigned int)height, 1), 1, NULL}, stream, CU_STREAM_LEGACY);
}
