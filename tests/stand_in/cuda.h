// Stands for CUDA's driver, as far as a module's launching code names it.
#pragma once
#include <cuda_runtime.h>

using CUfunction = cudaFunction_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_CONTEXT };
enum CUlaunchAttributeID { CU_LAUNCH_ATTRIBUTE_IGNORE, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed;
  } value;
};
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  cudaStream_t hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra);
