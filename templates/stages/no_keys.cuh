// Queries that may attend to no key: all their logits are minus infinity. The running maximum begins at a finite number instead, below
// every other logit, so that no tile of such keys makes a NaN of two infinities; being a power of two, it is scaled without rounding. The
// sum of weights then stays 0, and so does the result.
constexpr float LOWEST_LOGIT = -0x1p126f;

__device__ __forceinline__ float inverse_or_zero(float sum) { return sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f; }
