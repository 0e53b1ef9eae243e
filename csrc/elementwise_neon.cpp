#if defined(__aarch64__)
#include "elementwise_body.h"

namespace minisgl {

const ElementwiseKernels& elementwise_kernels_neon() { return kRowKernels; }

}  // namespace minisgl
#endif
