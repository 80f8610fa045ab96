// 2^x on the multiply-add units, whose rate is eight times that of the special-function unit: 2^x = 2^n 2^f with n the nearest integer and a
// polynomial of third degree for 2^f (minimax, relative error 7.5e-5), which is less than 16-bit weights round. x is clamped to -96..32 by
// saturation, which costs 4e-6 of the result at most; what is 2^32 or more has to be caught.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float RANGE = 128.0f, LOWEST = -96.0f, ROUNDING = 12582912.0f;  // ROUNDING + n has n in its lowest bits
  const float within = __saturatef(fmaf(x, 1.0f / RANGE, -LOWEST / RANGE));
  const float rounded = fmaf(within, RANGE, ROUNDING + LOWEST);
  const float f = fmaf(within, RANGE, (ROUNDING + LOWEST) - rounded);
  const float power = fmaf(fmaf(fmaf(5.517166853e-02f, f, 2.426111251e-01f), f, 6.932609677e-01f), f, 9.999280572e-01f);
  return __uint_as_float(__float_as_uint(power) + (__float_as_uint(rounded) << 23));
}
