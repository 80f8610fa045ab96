// Runs a module's launching code (launch.inc) with the inputs of inputs.inc, once or `twice`; pointers.inc: how many pointers each kernel takes.
// What is asked of CUDA and PyTorch, and what comes of it, are lines of JSON. Words on the command line: what fails.
#include "launch.inc"

#include <cstdio>
#include <cstring>
#include <exception>

static char** words;
static bool said(const char* word) {
  for (char** each = words; *each; ++each)
    if (std::strcmp(*each, word) == 0) return true;
  return false;
}

static int places[32];  // for the kernels' addresses, and behind them the driver's handles of them
extern "C" const void* axialtune_kernel(int index) { return &places[index]; }
static int number(const void* kernel) { return static_cast<int>(static_cast<const int*>(kernel) - places); }

extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(0x70 + device);
  return 0;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  std::printf("{\"allows\": %d, \"bytes\": %d}\n", number(kernel), value);
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  std::printf("{\"handle of\": %d}\n", number(kernel));
  *function = reinterpret_cast<cudaFunction_t>(&places[16 + number(kernel)]);
  return cudaSuccess;
}

static void print(const char* by, int which, dim3 grid, dim3 block, size_t shared, cudaStream_t stream, int early, void** arguments) {
  static const int pointers[] = {
#include "pointers.inc"
  };
  std::printf("{\"by\": \"%s\", \"kernel\": %d, \"blocks\": [%u, %u, %u], ", by, which, grid.x, grid.y, grid.z);
  std::printf("\"threads\": [%u, %u, %u], \"shared\": %zu, ", block.x, block.y, block.z, shared);
  std::printf("\"stream\": %zu, \"early\": %d, \"pointers\": [", reinterpret_cast<size_t>(stream), early);
  for (int i = 0; i < pointers[which]; ++i) std::printf("%s%zu", i ? ", " : "", *static_cast<size_t*>(arguments[i]));
  std::printf("], \"items\": %d}\n", *static_cast<int*>(arguments[pointers[which]]));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  if (said("runtime refuses")) return cudaErrorUnknown;
  const bool early = config->numAttrs == 1 && config->attrs->id == cudaLaunchAttributeProgrammaticStreamSerialization;
  const int allowed = early ? config->attrs->val.programmaticStreamSerializationAllowed : 0;
  print("runtime", number(kernel), config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, allowed, arguments);
  return cudaSuccess;
}

static CUresult by_driver(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  if (said("driver refuses") || extra) return CUDA_ERROR_INVALID_CONTEXT;
  const bool early = config->numAttrs == 1 && config->attrs->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  const int allowed = early ? config->attrs->value.programmaticStreamSerializationAllowed : 0;
  const dim3 grid(config->gridDimX, config->gridDimY, config->gridDimZ), block(config->blockDimX, config->blockDimY, config->blockDimZ);
  print("driver", number(function) - 16, grid, block, config->sharedMemBytes, config->hStream, allowed, arguments);
  return CUDA_SUCCESS;
}

static cudaError_t entry_point(const char* symbol, void** found) {
  std::printf("{\"asked for\": \"%s\"}\n", symbol);
  *found = said("driver unknown") ? nullptr : reinterpret_cast<void*>(&by_driver);
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*) {
  return entry_point(symbol, found);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** found, unsigned long long, cudaDriverEntryPointQueryResult*) {
  return entry_point(symbol, found);
}
#endif

extern "C" int aoti_torch_empty_strided(
    int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t type, int32_t device_type, int32_t device, AtenTensorHandle* made) {
  int64_t step = 1;
  bool contiguous = device_type == aoti_torch_device_type_cuda();
  for (int64_t i = dim; i-- > 0; step *= sizes[i]) contiguous = contiguous && strides[i] == step;
  if (said("no memory") || !contiguous) return 1;
  torch::stable::next_address += 0x100;
  std::printf("{\"made\": %lld, \"at\": %zu}\n", static_cast<long long>(step), static_cast<size_t>(torch::stable::next_address));
  const auto kind = static_cast<torch::headeronly::ScalarType>(type);
  *made = new Tensor::Place{{sizes, sizes + dim}, kind, device, true, torch::stable::next_address};
  return 0;
}

static Tensor tensor(std::vector<int64_t> sizes, torch::headeronly::ScalarType type, uintptr_t address, bool contiguous = true, int device = 3) {
  return {std::make_shared<Tensor::Place>(Tensor::Place{std::move(sizes), type, device, contiguous, address})};
}

static void once() {
  const Tensor y = launch(
#include "inputs.inc"
  );
  std::printf("{\"y\": %zu, \"sizes\": [", reinterpret_cast<size_t>(y.const_data_ptr()));
  for (int64_t i = 0; i < y.dim(); ++i) std::printf("%s%lld", i ? ", " : "", static_cast<long long>(y.size(i)));
  std::printf("]}\n");
}

int main(int, char** given) {
  words = given;
  try {
    once();
    if (said("twice")) once();
  } catch (const std::exception& error) {
    std::printf("{\"refused\": \"%s\"}\n", error.what());
  }
}
