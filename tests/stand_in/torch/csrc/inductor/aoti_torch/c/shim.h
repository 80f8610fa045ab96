#pragma once
#include <cstdint>
extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
