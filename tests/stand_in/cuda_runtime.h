// Stands for CUDA's runtime: a launch is printed as one line of JSON.
#pragma once
#include <cstddef>
#include <cstdint>

using cudaStream_t = void*;
using cudaFunction_t = struct Function*;
enum cudaError_t { cudaSuccess, cudaErrorUnknown };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeNone, cudaLaunchAttributeProgrammaticStreamSerialization };
enum { cudaEnableDefault };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel);
#if CUDART_VERSION >= 13000
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned version, unsigned long long flags, cudaDriverEntryPointQueryResult* result);
#else
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** found, unsigned long long flags, cudaDriverEntryPointQueryResult* result);
#endif
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "stood in for"; }
