/* Calls that only advise or prepare, so that a device that computes nothing can honestly agree to them. */
#include "driver.h"

#define HARMLESS(name) \
  CUresult name() { return driver_enter(CALL_##name); }

HARMLESS(cuCtxResetPersistingL2Cache)
HARMLESS(cuCtxSetCacheConfig)
HARMLESS(cuCtxSetFlags)
HARMLESS(cuCtxSetSharedMemConfig)
HARMLESS(cuFuncLoad)
HARMLESS(cuFuncSetAttribute)
HARMLESS(cuFuncSetCacheConfig)
HARMLESS(cuFuncSetSharedMemConfig)
HARMLESS(cuFuncSetSharedSize)
HARMLESS(cuKernelSetAttribute)
HARMLESS(cuKernelSetCacheConfig)
HARMLESS(cuMemAdvise)
HARMLESS(cuMemAdvise_v2)
HARMLESS(cuMemPrefetchAsync)
HARMLESS(cuMemPrefetchAsync_ptsz)
HARMLESS(cuMemPrefetchAsync_v2)
HARMLESS(cuMemPrefetchAsync_v2_ptsz)
HARMLESS(cuParamSetSize)
HARMLESS(cuParamSetf)
HARMLESS(cuParamSeti)
HARMLESS(cuParamSetv)
HARMLESS(cuPointerSetAttribute)
HARMLESS(cuProfilerStart)
HARMLESS(cuProfilerStop)
HARMLESS(cuStreamAttachMemAsync)
HARMLESS(cuStreamAttachMemAsync_ptsz)
HARMLESS(cuStreamSetAttribute)
HARMLESS(cuStreamSetAttribute_ptsz)
