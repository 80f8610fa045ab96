#pragma once
#include <torch/csrc/stable/tensor.h>

using AtenTensorHandle = torch::stable::Tensor::Place*;
extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
extern "C" int aoti_torch_empty_strided(
    int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t type, int32_t device_type, int32_t device, AtenTensorHandle* made);
inline int32_t aoti_torch_dtype_float32() { return static_cast<int32_t>(torch::headeronly::ScalarType::Float); }
inline int32_t aoti_torch_dtype_float16() { return static_cast<int32_t>(torch::headeronly::ScalarType::Half); }
inline int32_t aoti_torch_dtype_bfloat16() { return static_cast<int32_t>(torch::headeronly::ScalarType::BFloat16); }
inline int32_t aoti_torch_device_type_cuda() { return 1; }
