// Asynchronous copies from global to shared memory (PTX ISA, cp.async), of BYTES (4, 8 or 16) each; what is not `real` becomes zeros and
// is not read. A thread's copies up to a commit_copies() are a group; wait_for_copies<N>() returns when all but its N latest groups are
// there, for this thread: others see them behind a barrier.
#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

template <int BYTES>
__device__ __forceinline__ void copy_async(float* shared_to, const float* from, bool real) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared_to));
  const int size = real ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

#endif
