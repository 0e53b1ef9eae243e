// What the tests of the native kernels share: seeded numbers, and the one question they ask.
//
// A case is a computation that returns floats. same_everywhere() runs it with the portable kernels
// on one thread and demands the same bits of every instruction set that this processor has, with
// one thread and with three. All NaNs count as one value: processors differ in their payloads.
// What the portable kernels gave goes into the digest of the family as well, so the runs on two
// architectures can be compared by the lines they print.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "half.h"
#include "isa.h"
#include "pool.h"

namespace minisgl_test {

using namespace minisgl;
using Floats = std::vector<float>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMark = 12345.0f;  // stands where nothing may be written

// The same numbers on every machine (splitmix64; the distributions of <random> may differ).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  // In [low, high], both included.
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == 1; }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }  // [0, 1)
  float normal() {  // near enough: the sum of four, variance 1
    return (uniform() + uniform() + uniform() + uniform() - 2.0f) * 1.7320508f;
  }
  // Zeros of both signs, tiny and huge numbers, infinities and NaNs.
  float strange() {
    const float kinds[] = {0.0f,   -0.0f,  1e-41f, -1e-41f, 1e-31f, 1e30f,
                           -1e30f, 65519,  65520,  kInf,    -kInf,  kNan};
    return kinds[between(0, 11)];
  }
  Floats normals(int64_t count) {
    Floats x(static_cast<size_t>(count));
    for (float& value : x) value = normal();
    return x;
  }

 private:
  uint64_t state_;
};

// What a family of tests has done so far.
struct Family {
  std::string name;
  int64_t cases = 0, comparisons = 0, failures = 0;
  uint64_t digest = 0xcbf29ce484222325u;

  void fail(const std::string& what);
  void check(bool holds, const std::string& what) {
    if (!holds) fail(what);
  }
  void expect_equal(const Floats& wanted, const Floats& actual, const std::string& what);
};

template <class Compute>
Floats same_everywhere(Family& family, const std::string& what, Compute&& compute) {
  set_isa(Isa::kPortable);
  set_num_threads(1);
  const Floats wanted = compute();
  ++family.cases;
  for (const float value : wanted) {
    uint32_t bits = 0x7fc00000u;
    if (value == value) std::memcpy(&bits, &value, 4);
    family.digest = (family.digest ^ bits) * 0x100000001b3u;
  }
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    for (int i = 0; i < kNumIsas; ++i) {
      const Isa isa = static_cast<Isa>(i);
      if ((isa == Isa::kPortable && threads == 1) || !set_isa(isa)) continue;
      family.expect_equal(wanted, compute(), what + " by " + isa_name(isa) + " on " +
                                                 std::to_string(threads) + " threads");
    }
  }
  return wanted;
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string all;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      all += std::to_string(part);
    } else {
      all += part;
    }
  };
  (add(parts), ...);
  return all;
}

// A float as an element of 16 bits, and back.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return value == value ? static_cast<uint16_t>(bits >> 16) : 0x7fc0;
}
inline float from_bfloat16(uint16_t raw) {
  const uint32_t bits = static_cast<uint32_t>(raw) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void test_activations(Family& family);
void test_arena(Family& family);
void test_attention(Family& family);
void test_elementwise(Family& family);
void test_matmul(Family& family);
void test_pack(Family& family);
void test_pool(Family& family);
void test_rope(Family& family);
void test_sample(Family& family);

}  // namespace minisgl_test
