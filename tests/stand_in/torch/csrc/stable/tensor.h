// Stands for PyTorch's stable C++ interface, as far as a module's launching code uses it: tensors are places with sizes.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torch {
namespace headeronly {
enum class ScalarType { Float, Half, BFloat16, Bool };
}
namespace stable {
struct Tensor {
  struct Place {
    std::vector<int64_t> sizes;
    headeronly::ScalarType type;
    int32_t device;
    bool contiguous;
    uintptr_t address;
  };
  std::shared_ptr<Place> place;

  Tensor(std::shared_ptr<Place> place) : place(std::move(place)) {}
  explicit Tensor(Place* owned) : place(owned) {}
  bool is_cuda() const { return place->device >= 0; }
  int32_t get_device_index() const { return place->device; }
  headeronly::ScalarType scalar_type() const { return place->type; }
  int64_t dim() const { return static_cast<int64_t>(place->sizes.size()); }
  int64_t size(int64_t i) const { return place->sizes[static_cast<size_t>(i)]; }
  bool is_contiguous() const { return place->contiguous; }
  const void* const_data_ptr() const { return reinterpret_cast<const void*>(place->address); }
  void* mutable_data_ptr() const { return reinterpret_cast<void*>(place->address); }
};

// The next new tensor's address, 0x100 behind the last one's.
inline uintptr_t next_address = 0x900000;
inline Tensor made(const Tensor& like, std::vector<int64_t> sizes) {
  next_address += 0x100;
  return {std::make_shared<Tensor::Place>(Tensor::Place{std::move(sizes), like.place->type, like.place->device, true, next_address})};
}
inline Tensor contiguous(const Tensor& t) { return made(t, t.place->sizes); }
inline Tensor clone(const Tensor& t) { return made(t, t.place->sizes); }
namespace accelerator {
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
}  // namespace accelerator
}  // namespace stable
}  // namespace torch

#define STABLE_TORCH_LIBRARY_FRAGMENT(name, m) [[maybe_unused]] static void fragment(auto m)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) [[maybe_unused]] static void implementation(auto m)
#define TORCH_BOX(function) function
