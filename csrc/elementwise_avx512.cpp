#if defined(__x86_64__)
#include "elementwise_body.h"

namespace minisgl {

const ElementwiseKernels& elementwise_kernels_avx512() { return kRowKernels; }

}  // namespace minisgl
#endif
