#if defined(__x86_64__)
#include "matmul_avx2_body.h"

namespace minisgl {

const MatmulKernels& matmul_kernels_avx2() {
  static const MatmulKernels kernels = [] {
    MatmulKernels k{};
    fill_packed<Avx2<false>>(&k);
    fill_float<FloatAvx2>(&k);
    return k;
  }();
  return kernels;
}

}  // namespace minisgl
#endif
