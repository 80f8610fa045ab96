#include <torch/csrc/stable/tensor.h>
