#include "driver.h"

#include <stdio.h>
#include <string.h>

static CUresult device_find(CUdevice number, struct device **out) {
  if (number < 0 || (uint32_t)number >= driver_world->config.devices) return CUDA_ERROR_INVALID_DEVICE;
  *out = &driver_world->devices[number];
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  CALL(cuDeviceGetCount);
  REFUSE_IF(count == NULL, CUDA_ERROR_INVALID_VALUE);
  *count = (int)driver_world->config.devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal) {
  struct device *device;
  CALL(cuDeviceGet);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(ordinal, &device));
  *out = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice number) {
  struct device *device;
  CALL(cuDeviceGetName);
  REFUSE_IF(name == NULL || length <= 0, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(number, &device));
  snprintf(name, (size_t)length, "%s", device->name);
  return CUDA_SUCCESS;
}

static CUresult uuid(CUuuid *out, CUdevice number) {
  struct device *device;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(number, &device));
  memcpy(out->bytes, device->uuid, sizeof out->bytes);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *out, CUdevice number) {
  CALL(cuDeviceGetUuid);
  return uuid(out, number);
}

CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice number) {
  CALL(cuDeviceGetUuid_v2);
  return uuid(out, number);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice number) {
  struct device *device;
  CALL(cuDeviceTotalMem_v2);
  REFUSE_IF(bytes == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(number, &device));
  *bytes = device->memory;
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice number) {
  struct device *device;
  CALL(cuDeviceComputeCapability);
  REFUSE_IF(major == NULL || minor == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(number, &device));
  *major = (int)driver_world->config.capability / 10;
  *minor = (int)driver_world->config.capability % 10;
  return CUDA_SUCCESS;
}

/* Those that programs decide by; all others are 0, which is no lie about a device that computes nothing. */
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice number) {
  static const struct {
    int attribute, value;
  } known[] = {
      {1, 1024},       /* threads per block */
      {2, 1024},       /* block x */
      {3, 1024},       /* block y */
      {4, 64},         /* block z */
      {5, 0x7fffffff}, /* grid x */
      {6, 65535},      /* grid y */
      {7, 65535},      /* grid z */
      {8, 49152},      /* shared memory per block */
      {10, 32},        /* warp */
      {13, 1980000},   /* clock, kHz */
      {14, 512},       /* texture alignment */
      {15, 1},         /* copies beside kernels */
      {16, 132},       /* multiprocessors */
      {19, 1},         /* host memory can be mapped */
      {31, 1},         /* concurrent kernels */
      {38, 50 << 20},  /* L2 */
      {39, 2048},      /* threads per multiprocessor */
      {40, 3},         /* copy engines */
      {41, 1},         /* unified addresses */
      {78, 1},         /* stream priorities */
      {81, 233472},    /* shared memory per multiprocessor */
      {83, 1},         /* managed memory */
      {89, 1},         /* managed memory beside the host's */
      {95, 1},         /* cooperative launch */
      {102, 1},        /* virtual memory management */
      {103, 1},        /* its handles as file descriptors */
      {115, 1},        /* memory pools */
      {122, 1},        /* streams wait for values of 64 bits */
      {123, 1},        /* and by NOR */
  };
  struct device *device;
  CALL(cuDeviceGetAttribute);
  REFUSE_IF(value == NULL || attribute < 1, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(number, &device));
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute) *value = known[i].value;
  if (attribute == 33) *value = number + 1; /* PCI bus */
  if (attribute == 75) *value = (int)driver_world->config.capability / 10;
  if (attribute == 76) *value = (int)driver_world->config.capability % 10;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice number) {
  struct device *device;
  CALL(cuDeviceGetPCIBusId);
  REFUSE_IF(text == NULL || length <= 0, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(number, &device));
  snprintf(text, (size_t)length, "0000:%02X:00.0", number + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice from, CUdevice to) {
  struct device *device;
  CALL(cuDeviceCanAccessPeer);
  REFUSE_IF(can == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(device_find(from, &device));
  TRY(device_find(to, &device));
  *can = 0;
  return CUDA_SUCCESS;
}

static const struct {
  CUresult error;
  const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
};

CUresult cuGetErrorName(CUresult error, const char **out) {
  TRY(driver_count(CALL_cuGetErrorName));
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  *out = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) *out = errors[i].name;
  return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
  TRY(driver_count(CALL_cuGetErrorString));
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  *out = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) *out = errors[i].text;
  return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
