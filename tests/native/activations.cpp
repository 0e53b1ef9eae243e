// Quantisation, seen through a product with the identity matrix.
#include "activations.h"

#include <algorithm>

#include "matmul.h"
#include "test.h"
#include "weights.h"

namespace minisgl_test {
namespace {

Floats seen(const Activations& activations, PackedWeight& weight) {
  Floats out(static_cast<size_t>(activations.tokens() * activations.columns()));
  const PackedJob job{weight.view, out.data(), activations.columns()};
  matmul_packed(activations, &job, 1);
  return out;
}

// Within half a step of 127 to the largest of its group; a group that is not finite is NaN, and a
// token with such a group is NaN as a whole.
void check_error(Family& family, const std::string& what, const float* x, const float* y,
                 int64_t columns) {
  bool finite = true;
  for (int64_t k = 0; k < columns; ++k) finite &= std::isfinite(x[k]);
  for (int64_t first = 0; first < columns; first += kGroup) {
    const int64_t end = std::min<int64_t>(first + kGroup, columns);
    float largest = 0;
    for (int64_t k = first; k < end; ++k) largest = std::fmax(largest, std::fabs(x[k]));
    for (int64_t k = first; k < end; ++k) {
      const float bound = largest / 254 * 1.0001f + 1e-30f;
      family.check(finite ? std::fabs(x[k] - y[k]) <= bound : y[k] != y[k], what + ": too far off");
    }
  }
}

}  // namespace

void test_activations(Family& family) {
  Random random(2);
  for (int round = 0; round < 100; ++round) {
    const int64_t tokens = random.between(1, 70), columns = random.between(1, 150);
    const int64_t stride = columns + random.between(0, 3);
    const float scale = std::ldexp(1.0f, static_cast<int>(random.between(-120, 100)));
    Floats x = random.normals((tokens - 1) * stride + columns);
    for (float& value : x) {
      value = random.one_in(999) ? random.strange() : value * scale;
      if (random.one_in(9)) value = std::nearbyint(value / scale) * 0.5f * scale;  // ties
    }
    PackedWeight weight = identity(columns);
    const std::string what = text(tokens, " tokens, ", columns, " columns");
    const Floats wanted = same_everywhere(family, what, [&] {
      Activations activations(tokens, columns);
      activations.quantize(x.data(), stride);
      return seen(activations, weight);
    });
    same_everywhere(family, what + " one by one", [&] {
      Activations activations(tokens, columns);
      for (int64_t t = tokens - 1; t >= 0; --t) {
        activations.quantize_token(t, x.data() + t * stride);
      }
      const Floats result = seen(activations, weight);
      family.expect_equal(wanted, result, what + " one by one against all at once");
      return result;
    });
    for (int64_t t = 0; t < tokens; ++t) {
      check_error(family, what, x.data() + t * stride, wanted.data() + t * columns, columns);
    }
  }
}

}  // namespace minisgl_test
