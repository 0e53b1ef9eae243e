// Choosing tokens from rows of logits.
//
// A row's token depends on that row and its draw alone. What may be drawn is the beginning of the
// row in falling order (equal logits by rising index): the top_k first; of those while less than
// top_p of their mass lies before; of those with at least min_p of the first one's mass. The draw
// takes the first of them with more than `uniform` of their mass up to and with it.
#pragma once

#include <cstdint>

namespace minisgl {

struct Draw {
  double temperature = 0.0;  // 0: the largest logit
  int64_t top_k = 1;         // from the size of the row on: all
  double top_p = 1.0, min_p = 0.0;
  double uniform = 0.0;  // in [0, 1)
};

// -1 for a row without a finite maximum (a NaN anywhere, an infinity, nothing but -infinity).
int32_t choose_token(const float* logits, int64_t n, const Draw& draw);

}  // namespace minisgl
