#include "program.h"

#include "pool.h"

#include <algorithm>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace minisgl {
namespace {

[[noreturn]] void fail(const char* what) { throw std::invalid_argument(what); }

template <class T>
void check_range(const T* values, int64_t n, int64_t limit, const char* what) {
  bool ok = true;
  for (int64_t i = 0; i < n; ++i) ok &= values[i] >= 0 && values[i] < limit;
  if (!ok) throw std::out_of_range(what);
}

}  // namespace

Program::Program(int64_t num_ids, int64_t num_locations, int64_t num_positions, int64_t padding)
    : num_ids_(num_ids),
      num_locations_(num_locations),
      num_positions_(num_positions),
      commit_(std::make_shared<CommitAhead>(padding)) {}

Program::~Program() {
  forget_idle(commit_.get());
  for (Buffer& buffer : buffers_) std::free(buffer.data);
}

void Program::reserve(int64_t rows) {
  if (rows <= capacity_) return;
  for (Buffer& buffer : buffers_) {
    std::free(buffer.data);
    buffer.data = nullptr;
  }
  capacity_ = 0;
  for (Buffer& buffer : buffers_) {
    const int64_t bytes = (rows * buffer.width * 4 + 63) / 64 * 64;
    buffer.data = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  capacity_ = rows;
}

void Program::check(const RunArgs& a) const {
  if (tail_begin_ == 0) fail("the program has no end");
  if (a.num_tokens < 0 || a.requests.num_reqs < 0 || a.num_wanted < 0) fail("negative size");
  int64_t total = 0;
  for (int64_t r = 0; r < a.requests.num_reqs; ++r) {
    const int64_t end = a.requests.query_start[r + 1], kv_len = a.requests.kv_len[r];
    if (a.requests.query_start[r] != total || end < total || kv_len < end - total ||
        kv_len > a.requests.row_stride) {
      fail("a request's lengths do not fit each other or its row");
    }
    total = end;
    check_range(a.requests.rows + r * a.requests.row_stride, kv_len, num_locations_,
                "a KV location is out of range");
  }
  if (total != a.num_tokens) fail("the requests' tokens do not add up");
  check_range(a.input_ids, total, num_ids_, "a token id is out of range");
  check_range(a.positions, total, num_positions_, "a position is out of range");
  check_range(a.out_loc, total, num_locations_, "an output location is out of range");
  check_range(a.wanted, a.num_wanted, total, "a wanted row is out of range");
  for (int64_t i = 1; i < a.num_wanted; ++i) {
    if (a.wanted[i] < a.wanted[i - 1]) fail("wanted rows must not fall");
  }
}

void Program::cut_requests(const RunArgs& args, int64_t begin, int64_t end,
                           TileRequests* out) {
  out->query_start.assign(1, 0);
  out->kv_len.clear();
  const AttentionBatch& all = args.requests;
  for (int64_t r = 0; r < all.num_reqs && all.query_start[r] < end; ++r) {
    const int64_t stop = all.query_start[r + 1], last = std::min(stop, end);
    if (out->kv_len.empty() && last <= begin) continue;
    if (out->kv_len.empty()) out->rows = all.rows + r * all.row_stride;
    out->query_start.push_back(static_cast<int32_t>(last - begin));
    out->kv_len.push_back(static_cast<int32_t>(all.kv_len[r] - (stop - last)));
  }
}

void Program::run_timed(size_t begin, size_t end, const std::function<void()>& body) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  body();
  const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  std::string name;
  int64_t bytes = 0;
  for (size_t i = begin; i < end; ++i) {
    name += (i > begin ? "+" : "") + std::string(steps_[i].name);
    bytes += steps_[i].bytes;
  }
  times_.push_back({name, spent.count(), bytes});
}

std::vector<StepTime> Program::take_profile() {
  std::lock_guard<std::mutex> lock(busy_);
  return std::exchange(times_, {});
}

void Program::run_parts(const Tile& tile, size_t begin, size_t end) {
  int64_t elements = 0, groups = steps_[begin].groups;
  for (size_t i = begin; i < end; ++i) {
    elements += steps_[i].elements;
    if (steps_[i].groups != groups) groups = 0;
  }
  // A task of about two microseconds, several times what handing it out costs. With many tokens
  // their blocks are tasks enough.
  constexpr int64_t kElementsPerTask = 32768;
  const int64_t blocks = (tile.rows + kTokenBlock - 1) / kTokenBlock;
  const int64_t wanted = tile.rows * elements / kElementsPerTask / blocks;
  const int64_t most = blocks > 8 ? 1 : std::max<int64_t>(groups, 1);
  const int64_t slices = std::clamp<int64_t>(wanted, 1, most);
  parallel_for(blocks * slices, [&](int64_t task) {
    const int64_t row = task / slices * kTokenBlock, slice = task % slices;
    const Part part{row, std::min(row + kTokenBlock, tile.rows), groups * slice / slices,
                    groups * (slice + 1) / slices};
    for (size_t i = begin; i < end; ++i) {
      Part own = part;
      if (groups == 0) own.end_group = steps_[i].groups;
      steps_[i].part(tile, own);
    }
  });
}

void Program::run_steps(const Tile& tile, size_t begin, size_t end) {
  for (size_t i = begin; i < end;) {
    size_t stop = i + 1;
    while (!steps_[i].whole && stop < end && !steps_[stop].whole) ++stop;
    const auto body = [&] {
      if (steps_[i].whole) return steps_[i].whole(tile);
      run_parts(tile, i, stop);
    };
    if (profile_) {
      run_timed(i, stop, body);
    } else {
      body();
    }
    i = stop;
  }
}

void Program::make_quantized(int64_t rows, bool is_tail) {
  for (auto& [place, x] : quantized_) {
    const auto [columns, of_tail, is_inside] = place;
    (void)is_inside;
    if (of_tail != is_tail || (*x && (*x)->tokens() == rows)) continue;
    *x = std::make_unique<Activations>(rows, columns);
  }
}

int64_t Program::run_tail(int64_t rows, const RunArgs& args, int64_t done) {
  Tile tile{};
  tile.rows = rows;
  tile.logits = args.logits + done * args.logits_stride;
  make_quantized(rows, true);
  if (rows > 0) run_steps(tile, tail_begin_, steps_.size());
  return done + rows;
}

void Program::run(const RunArgs& args) {
  std::lock_guard<std::mutex> lock(busy_);
  check(args);
  reserve(std::min(kTileRows, std::max(args.num_tokens, args.num_wanted)));
  logits_stride_ = args.logits_stride;
  TileRequests requests;
  int64_t done = 0, waiting = 0;  // wanted rows whose logits are there; that are selected
  for (int64_t begin = 0; begin < args.num_tokens; begin += kTileRows) {
    const int64_t end = std::min(begin + kTileRows, args.num_tokens);
    cut_requests(args, begin, end, &requests);
    const AttentionBatch batch{requests.count(), requests.query_start.data(),
                               requests.kv_len.data(), requests.rows, args.requests.row_stride};
    const Tile tile{end - begin,          args.input_ids + begin, args.positions + begin,
                    args.out_loc + begin, &batch,                 nullptr};
    make_quantized(tile.rows, false);
    run_steps(tile, 0, tail_begin_);
    while (done + waiting < args.num_wanted && args.wanted[done + waiting] < end) {
      if (waiting == capacity_) {
        done = run_tail(waiting, args, done);
        waiting = 0;
      }
      const int64_t row = args.wanted[done + waiting] - begin;
      for (const auto& [from, to] : selects_) {
        std::memcpy(at(to, waiting), at(from, row), static_cast<size_t>(width(from)) * 4);
      }
      ++waiting;
    }
  }
  run_tail(waiting, args, done);
  commit_->use(args.out_loc, args.num_tokens);
  when_idle(commit_);
}

}  // namespace minisgl
