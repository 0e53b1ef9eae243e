// Memory for weights: aligned, disjoint, all of it writable, and given back in whole chunks. (That
// nothing leaks or is used after it was freed shows under AddressSanitizer.)
#include "arena.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "test.h"

namespace minisgl_test {
namespace {

struct Piece {
  std::shared_ptr<uint8_t> memory;
  int64_t bytes;
  uint8_t mark;

  Piece(int64_t size, uint8_t value) : memory(weight_memory(size)), bytes(size), mark(value) {
    std::memset(memory.get(), mark, static_cast<size_t>(bytes));
  }
  bool intact() const {
    return std::all_of(memory.get(), memory.get() + bytes,
                       [this](uint8_t byte) { return byte == mark; });
  }
};

void test_pieces(Family& family, Random& random) {
  std::vector<Piece> pieces;
  for (int i = 0; i < 200; ++i) {
    ++family.cases;
    // From a byte to a megabyte, now and then more than a chunk holds of such.
    const int64_t most = int64_t{1} << random.between(0, 20);
    const int64_t bytes = random.one_in(60) ? int64_t{20} << 20 : random.between(1, most);
    pieces.emplace_back(bytes, static_cast<uint8_t>(i));
    const auto address = reinterpret_cast<uintptr_t>(pieces.back().memory.get());
    family.check(address % 64 == 0, text(bytes, " bytes on no line's boundary"));
    if (!random.one_in(3)) continue;
    const int64_t gone = random.between(0, static_cast<int64_t>(pieces.size()) - 1);
    family.check(pieces[gone].intact(), "another piece was written into");
    pieces.erase(pieces.begin() + gone);
  }
  for (const Piece& piece : pieces) family.check(piece.intact(), "pieces overlap");
}

void test_lifetime(Family& family) {
  ++family.cases;
  std::weak_ptr<uint8_t> chunk;
  {
    const std::shared_ptr<uint8_t> first = weight_memory(100);
    std::shared_ptr<uint8_t> second = weight_memory(100);
    chunk = second;
    second.reset();
    family.check(!chunk.expired(), "a chunk is gone while a piece of it is used");
  }
  family.check(chunk.expired(), "a chunk is kept although nothing in it is used");
  family.check(Piece(100, 1).intact(), "no memory after a chunk was given back");
}

void test_threads(Family& family) {
  ++family.cases;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint8_t t = 0; t < 4; ++t) {
    threads.emplace_back([&wrong, t] {
      for (int round = 0; round < 50; ++round) {
        const Piece a(1000 + round, t), b(5000, static_cast<uint8_t>(t + 100));
        wrong += !a.intact() || !b.intact();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  family.check(wrong == 0, "pieces of several threads overlap");
}

}  // namespace

void test_arena(Family& family) {
  Random random(8);
  test_lifetime(family);
  test_pieces(family, random);
  test_threads(family);
}

}  // namespace minisgl_test
