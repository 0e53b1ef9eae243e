// native_tests [FAMILY...]: runs the families of tests, all of them if none is named. Standard
// output has one line per family that is the same on every architecture.
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "test.h"

namespace minisgl_test {

void Family::fail(const std::string& what) {
  if (++failures <= 10) std::fprintf(stderr, "FAILED %s: %s\n", name.c_str(), what.c_str());
}

void Family::expect_equal(const Floats& wanted, const Floats& actual, const std::string& what) {
  ++comparisons;
  if (wanted.size() != actual.size()) return fail(what + ": another number of results");
  for (size_t i = 0; i < wanted.size(); ++i) {
    const float a = wanted[i], b = actual[i];
    if ((a != a && b != b) || std::memcmp(&a, &b, 4) == 0) continue;
    char difference[96];
    std::snprintf(difference, sizeof(difference), ": [%zu of %zu] is %a, wanted %a", i,
                  wanted.size(), static_cast<double>(b), static_cast<double>(a));
    return fail(what + difference);
  }
}

}  // namespace minisgl_test

int main(int argc, char** argv) {
  using namespace minisgl_test;
  const struct {
    const char* name;
    void (*run)(Family& family);
  } families[] = {
      {"pool", test_pool},           {"arena", test_arena},
      {"pack", test_pack},           {"activations", test_activations},
      {"matmul", test_matmul},       {"elementwise", test_elementwise},
      {"attention", test_attention}, {"rope", test_rope},
      {"sample", test_sample},
  };
  std::fprintf(stderr, "instruction sets:");
  for (int i = 0; i < kNumIsas; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (isa_available(isa)) std::fprintf(stderr, " %s", isa_name(isa));
  }
  std::fprintf(stderr, "\n");
  int64_t failures = 0, comparisons = 0;
  for (const auto& entry : families) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted |= std::strcmp(argv[i], entry.name) == 0;
    if (!wanted) continue;
    Family family;
    family.name = entry.name;
    entry.run(family);
    std::printf("%-12s %5" PRId64 " cases, digest %016" PRIx64 "\n", entry.name, family.cases,
                family.digest);
    std::fflush(stdout);
    failures += family.failures;
    comparisons += family.comparisons;
  }
  std::fprintf(stderr, "%" PRId64 " comparisons, %" PRId64 " failures\n", comparisons, failures);
  return failures == 0 ? 0 : 1;
}
