#include "elementwise_body.h"

namespace minisgl {

const ElementwiseKernels& elementwise_kernels_portable() { return kRowKernels; }

}  // namespace minisgl
