// Runs a module's launching code (launch.inc) once with the inputs of inputs.inc; pointers.inc: how many pointers each kernel takes. What is asked
// of CUDA, and what comes of it, are lines of JSON.
#include "launch.inc"

#include <cstdio>
#include <exception>

static int places[16];  // for the kernels' addresses
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

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  static const int pointers[] = {
#include "pointers.inc"
  };
  const int which = number(kernel);
  const bool early = config->numAttrs == 1 && config->attrs->id == cudaLaunchAttributeProgrammaticStreamSerialization;
  std::printf("{\"kernel\": %d, \"blocks\": %u, \"threads\": %u, ", which, config->gridDim.x, config->blockDim.x);
  std::printf("\"shared\": %zu, \"stream\": %zu, ", config->dynamicSmemBytes, reinterpret_cast<size_t>(config->stream));
  std::printf("\"early\": %d, \"pointers\": [", early ? config->attrs->val.programmaticStreamSerializationAllowed : 0);
  for (int i = 0; i < pointers[which]; ++i) std::printf("%s%zu", i ? ", " : "", *static_cast<size_t*>(arguments[i]));
  std::printf("], \"items\": %d}\n", *static_cast<int*>(arguments[pointers[which]]));
  return cudaSuccess;
}

static Tensor tensor(std::vector<int64_t> sizes, torch::headeronly::ScalarType type, uintptr_t address, bool contiguous = true, int device = 3) {
  return {std::make_shared<Tensor::Place>(Tensor::Place{std::move(sizes), type, device, contiguous, address})};
}

int main() {
  try {
    const Tensor y = launch(
#include "inputs.inc"
    );
    std::printf("{\"y\": %zu, \"sizes\": [", reinterpret_cast<size_t>(y.const_data_ptr()));
    for (int64_t i = 0; i < y.dim(); ++i) std::printf("%s%lld", i ? ", " : "", static_cast<long long>(y.size(i)));
    std::printf("]}\n");
  } catch (const std::exception& error) {
    std::printf("{\"refused\": \"%s\"}\n", error.what());
  }
}
