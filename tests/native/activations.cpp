// Quantisation, seen through a product with the identity matrix, and by pieces.
#include "activations.h"

#include <algorithm>
#include <utility>

#include "matmul.h"
#include "test.h"
#include "weights.h"

namespace minisgl_test {
namespace {

Floats seen(const Activations& activations, PackedWeight& weight) {
  Floats out(static_cast<size_t>(activations.tokens() * activations.columns()));
  const PackedJob job{&activations, weight.view, out.data(), activations.columns()};
  matmul_packed(&job, 1);
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

struct Piece {
  int64_t begin, end, first_group, end_group;
};

// Ranges of tokens, each cut into ranges of groups, in a random order.
std::vector<Piece> cut(Random& random, int64_t tokens, int64_t groups) {
  std::vector<Piece> pieces;
  for (int64_t begin = 0; begin < tokens;) {
    const int64_t end = std::min(tokens, begin + random.between(1, 40));
    for (int64_t first = 0; first < groups;) {
      const int64_t last = std::min(groups, first + random.between(1, 3));
      pieces.push_back({begin, end, first, last});
      first = last;
    }
    begin = end;
  }
  for (size_t i = pieces.size(); i > 1; --i) {
    std::swap(pieces[i - 1], pieces[random.between(0, static_cast<int64_t>(i) - 1)]);
  }
  return pieces;
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
    const std::vector<Piece> pieces = cut(random, tokens, (columns + kGroup - 1) / kGroup);
    same_everywhere(family, what + " by pieces", [&] {
      Activations whole(tokens, columns), parts(tokens, columns);
      whole.quantize(x.data(), stride);
      parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
        const Piece& p = pieces[static_cast<size_t>(i)];
        parts.quantize_part(x.data() + p.begin * stride + p.first_group * kGroup, stride, p.begin,
                            p.end, p.first_group, p.end_group);
      });
      parts.relate_scales();
      const Floats result = contents(parts);
      family.expect_equal(contents(whole), result, what + " by pieces against all at once");
      return result;
    });
    for (int64_t t = 0; t < tokens; ++t) {
      check_error(family, what, x.data() + t * stride, wanted.data() + t * columns, columns);
    }
  }
}

}  // namespace minisgl_test
