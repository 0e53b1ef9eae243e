// The packed product, written once over a small vector class V; each matmul_<isa>.cpp supplies its
// V and includes this file. Everything is in an unnamed namespace: code compiled for one
// instruction set must never be merged by the linker with that of another.
//
// V works on `lanes` rows (16, 8 or 4), a sub-block. A kernel takes P sub-blocks at once, unpacks
// their 8 vectors of codes per group into registers, and multiplies them by U tokens at a time.
#pragma once

#include "matmul.h"

namespace minisgl {
namespace {

#define MINISGL_INLINE inline __attribute__((always_inline))

constexpr int kVectors = 8;  // of 4 columns, in a group

template <Format kFormat>
struct Traits {
  static constexpr FormatInfo kInfo = info(kFormat);
  static constexpr int kBits = kInfo.bits;
  static constexpr int kParts = kInfo.num_scales;  // sums per group: one per scale
  static constexpr bool kHasMin = kInfo.has_min;
  static constexpr bool kHasUnit = kInfo.has_unit;
  static constexpr int kSum = kParts == 1 ? kWholeSum : kLowSum;  // of the first part
  // By how much the stored sum is to be shifted down: its offset may be larger than the format's.
  static constexpr int kShift = offset_bits(kSum) - (kBits - 1);
  static_assert(kHasMin || kHasUnit || kInfo.offset << kShift == 1 << offset_bits(kSum));
  static_assert(!kHasUnit || (kBits == 4 && kInfo.offset == 8));  // see `sum_start`
};

// Codes and scales of one group of one sub-block, in registers.
template <class V, class T>
struct Block {
  typename V::Int code[kVectors];
  typename V::Float scale[T::kParts];
  typename V::Float minimum;
  typename V::Int whole;  // with a unit: 16-bit scales, minimums in the upper halves
};

// The fifth bit: bit v of each byte of `high` becomes bit 4 of vector v.
template <class V, int kV = 0>
MINISGL_INLINE void add_fifth_bit(typename V::Int high, typename V::Int* code) {
  if constexpr (kV < kVectors) {
    code[kV] = V::template or_bits<4 - kV, 0x10>(code[kV], high);
    add_fifth_bit<V, kV + 1>(high, code);
  }
}

// Bits 5 and 6: two bits per vector and byte, four vectors per line.
template <class V, int kV = 0>
MINISGL_INLINE void add_two_bits(typename V::Int high, typename V::Int* code) {
  if constexpr (kV < 4) {
    code[kV] = V::template or_bits<4 - 2 * kV, 0x30>(code[kV], high);
    add_two_bits<V, kV + 1>(high, code);
  }
}

template <class V, class T>
MINISGL_INLINE void unpack(const uint8_t* block, int sub, Block<V, T>* out) {
  const uint8_t* codes = block + sub * V::kLanes * 4;
  if constexpr (T::kBits == 8) {
    for (int v = 0; v < kVectors; ++v) out->code[v] = V::prepare8(V::load(codes + v * kLine));
  } else {
    for (int v = 0; v < 4; ++v) {
      const typename V::Int pair = V::load(codes + v * kLine);
      out->code[v] = V::low_nibbles(pair);
      out->code[v + 4] = V::high_nibbles(pair);
    }
    if constexpr (T::kBits == 5) add_fifth_bit<V>(V::load(codes + 4 * kLine), out->code);
    if constexpr (T::kBits == 6) {
      add_two_bits<V>(V::load(codes + 4 * kLine), out->code);
      add_two_bits<V>(V::load(codes + 5 * kLine), out->code + 4);
    }
  }
  const uint8_t* scales = block + T::kInfo.code_bytes() + sub * V::kLanes * 2;
  if constexpr (T::kHasUnit) {
    out->whole = T::kHasMin ? V::load(scales + sub * V::kLanes * 2) : V::load_low16(scales);
    return;
  }
  for (int i = 0; i < T::kParts; ++i) out->scale[i] = V::load_half(scales + i * kPanelRows * 2);
  if constexpr (T::kHasMin) out->minimum = V::load_half(scales + kPanelRows * 2);
}

// acc[p][u] += this group's share, for tokens at `index` .. index + U - 1 of the tile's arrays.
// The order of the float operations here is the definition of the result.
template <class V, class T, int P, int U>
MINISGL_INLINE void accumulate(const Block<V, T> (&block)[P], const ActivationTile& x,
                               int64_t index, typename V::Float (&acc)[P][U]) {
  constexpr int kStep = kVectors / T::kParts;
  for (int part = 0; part < T::kParts; ++part) {
    typename V::Int sum[P][U];
    for (int u = 0; u < U; ++u) {
      typename V::Int start = V::zero();
      if constexpr (!T::kHasMin && V::template kNeedsCorrection<T::kBits>) {
        start = V::broadcast(x.minus_sum[T::kSum + part] + index + u);
        if constexpr (T::kShift > 0) start = V::template shift_right<T::kShift>(start);
      }
      for (int p = 0; p < P; ++p) sum[p][u] = start;
    }
    V::template dot<T::kBits, kStep, P, U>(block, part * kStep, x.codes + index * kGroup, sum);
    for (int u = 0; u < U; ++u) {
      const typename V::Float scale = V::broadcast(x.scale + index + u);
      for (int p = 0; p < P; ++p) {
        const typename V::Float factor = V::mul(block[p].scale[part], scale);
        acc[p][u] = V::fma(V::to_float(sum[p][u]), factor, acc[p][u]);
      }
    }
  }
  if constexpr (T::kHasMin) {
    for (int u = 0; u < U; ++u) {
      const typename V::Float total = V::broadcast(x.scaled_sum + index + u);
      for (int p = 0; p < P; ++p) acc[p][u] = V::fma(block[p].minimum, total, acc[p][u]);
    }
  }
}

// The same for formats with a unit: sum[p][u] += this group's share, in units of weight and token.
template <class V, class T, int P, int U>
MINISGL_INLINE void add_group(const Block<V, T> (&block)[P], const ActivationTile& x,
                              int64_t index, typename V::Int (&sum)[P][U]) {
  typename V::Int group[P][U];
  for (int u = 0; u < U; ++u) {
    const typename V::Int start = V::broadcast(x.start + index + u);
    for (int p = 0; p < P; ++p) group[p][u] = start;
  }
  V::template dot<T::kBits, kVectors, P, U>(block, 0, x.codes + index * kGroup, group);
  for (int u = 0; u < U; ++u) {
    const typename V::Int factor = V::broadcast(x.factor + index + u);
    for (int p = 0; p < P; ++p) {
      sum[p][u] = V::dot16(sum[p][u], group[p][u], V::scale16(block[p].whole, factor));
    }
  }
}

// Where the sub-blocks of a pass lie.
template <class V, int P>
struct Units {
  static constexpr int kSubs = kPanelRows / V::kLanes;
  const uint8_t* panel[P];
  int sub[P];
  int64_t row[P];

  MINISGL_INLINE Units(const PanelTask& task, int64_t first) {
    for (int p = 0; p < P; ++p) {
      panel[p] = task.weight + (first + p) / kSubs * task.panel_bytes;
      sub[p] = static_cast<int>((first + p) % kSubs);
      row[p] = (first + p) * V::kLanes;
    }
  }

  // The units of sub-block p's rows.
  template <class T>
  MINISGL_INLINE typename V::Float unit(const PanelTask& task, int p) const {
    const uint8_t* units = panel[p] + task.groups * T::kInfo.block_bytes();
    return V::load_float(reinterpret_cast<const float*>(units) + sub[p] * V::kLanes);
  }
};

// The hardware's prefetcher stops at each page and starts late on each panel; asking for the block
// two kilobytes ahead, across the seam to the next pass, more than doubled the rate with one row.
constexpr int64_t kPrefetchBytes = 2048;

template <class V, class T, int P>
MINISGL_INLINE void prefetch_blocks(const PanelTask& task, const Units<V, P>& units,
                                    int64_t offset) {
  constexpr int kPanels = P < Units<V, P>::kSubs ? 1 : P / Units<V, P>::kSubs;
  int64_t ahead = offset + kPrefetchBytes;
  if (ahead >= task.panel_bytes) ahead += (kPanels - 1) * task.panel_bytes;
  for (int p = 0; p < kPanels; ++p) {
    const uint8_t* block = units.panel[p * (P / kPanels)] + ahead;
    for (int i = 0; i < T::kInfo.block_bytes(); i += kLine) __builtin_prefetch(block + i, 0, 3);
    if constexpr (T::kHasUnit) {  // what lies between the last block and the next panel
      if (offset == 0) __builtin_prefetch(block - kLine, 0, 3);
    }
  }
}

// One group of each sub-block, and the next ones on their way.
template <class V, class T, int P>
MINISGL_INLINE void load_blocks(const PanelTask& task, const Units<V, P>& units, int64_t g,
                                Block<V, T> (&block)[P]) {
  const int64_t offset = g * T::kInfo.block_bytes();
  prefetch_blocks<V, T, P>(task, units, offset);
  for (int p = 0; p < P; ++p) unpack<V, T>(units.panel[p] + offset, units.sub[p], &block[p]);
}

template <class V>
MINISGL_INLINE void store_rows(const PanelTask& task, int64_t token, int64_t row,
                               typename V::Float value) {
  float* out = task.out + token * task.out_stride + row;
  if (row + V::kLanes <= task.rows) {
    V::store(out, value);
  } else {
    float buffer[V::kLanes];
    V::store(buffer, value);
    for (int64_t i = 0; row + i < task.rows; ++i) out[i] = buffer[i];
  }
}

// Up to a handful of tokens: their sums stay in registers through all groups.
template <class V, class T, int P, int U>
void run_few(const PanelTask& task, int64_t first) {
  const Units<V, P> units(task, first);
  typename V::Float acc[P][U];
  for (int p = 0; p < P; ++p) {
    for (int u = 0; u < U; ++u) acc[p][u] = V::zero_float();
  }
  for (int64_t begin = 0; begin < task.groups; begin += kSpan) {
    const int64_t end = begin + kSpan < task.groups ? begin + kSpan : task.groups;
    typename V::Int sum[P][U];
    for (int p = 0; p < P; ++p) {
      for (int u = 0; u < U; ++u) sum[p][u] = V::zero();
    }
    for (int64_t g = begin; g < end; ++g) {
      Block<V, T> block[P];
      load_blocks<V, T, P>(task, units, g, block);
      if constexpr (T::kHasUnit) {
        add_group<V, T, P, U>(block, task.x, g * U, sum);
      } else {
        accumulate<V, T, P, U>(block, task.x, g * U, acc);
      }
    }
    if constexpr (T::kHasUnit) {
      for (int u = 0; u < U; ++u) {
        const typename V::Float unit = V::broadcast(task.x.unit + begin / kSpan * U + u);
        for (int p = 0; p < P; ++p) acc[p][u] = V::fma(V::to_float(sum[p][u]), unit, acc[p][u]);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    for (int u = 0; u < U; ++u) {
      if constexpr (T::kHasUnit) acc[p][u] = V::mul(acc[p][u], units.template unit<T>(task, p));
      store_rows<V>(task, u, units.row[p], acc[p][u]);
    }
  }
}

// What the tokens of a larger tile have gathered: [token][sub-block][lane].
template <class V, int P, int U>
struct Sums {
  static constexpr int kTokens = (kTileTokens + U - 1) / U * U;
  alignas(64) float all[kTokens * P * V::kLanes];
  alignas(64) int32_t span[kTokens * P * V::kLanes];  // of the current span, with a unit

  static MINISGL_INLINE int64_t at(int64_t t, int p) { return (t * P + p) * V::kLanes; }
};

// One group for tokens t .. t + U - 1. kLast: it ends a span, whose sums are then 0 again.
template <class V, class T, int P, int U, bool kLast>
MINISGL_INLINE void run_step(const Block<V, T> (&block)[P], const ActivationTile& x, int64_t g,
                             int64_t t, Sums<V, P, U>* sums) {
  const int64_t index = g * x.stride + t;
  if constexpr (T::kHasUnit) {
    typename V::Int sum[P][U];
    for (int u = 0; u < U; ++u) {
      for (int p = 0; p < P; ++p) sum[p][u] = V::load(sums->span + sums->at(t + u, p));
    }
    add_group<V, T, P, U>(block, x, index, sum);
    for (int u = 0; u < U; ++u) {
      const typename V::Float unit = V::broadcast(x.unit + g / kSpan * x.stride + t + u);
      for (int p = 0; p < P; ++p) {
        const int64_t at = sums->at(t + u, p);
        if constexpr (kLast) {
          const typename V::Float before = V::load_float(sums->all + at);
          V::store(sums->all + at, V::fma(V::to_float(sum[p][u]), unit, before));
        }
        V::store(sums->span + at, kLast ? V::zero() : sum[p][u]);
      }
    }
  } else {
    typename V::Float acc[P][U];
    for (int u = 0; u < U; ++u) {
      for (int p = 0; p < P; ++p) acc[p][u] = V::load_float(sums->all + sums->at(t + u, p));
    }
    accumulate<V, T, P, U>(block, x, index, acc);
    for (int u = 0; u < U; ++u) {
      for (int p = 0; p < P; ++p) V::store(sums->all + sums->at(t + u, p), acc[p][u]);
    }
  }
}

// The rows of the output come from far away and are written all at once in the end: each group asks
// for those of some tokens. All of them at the start would keep what the first group reads waiting.
MINISGL_INLINE int64_t tokens_per_group(const PanelTask& task) {
  return (task.x.stride + task.groups - 1) / task.groups;
}
template <class V, int P>
MINISGL_INLINE void prefetch_output(const PanelTask& task, const Units<V, P>& units, int64_t g,
                                    int64_t tokens) {
  const int64_t begin = g * tokens, end = begin + tokens;
  for (int64_t t = begin; t < end && t < task.x.stride; ++t) {
    const float* out = task.out + t * task.out_stride;
    for (int p = 0; p < P; p += kLine / (4 * V::kLanes)) __builtin_prefetch(out + units.row[p], 1);
  }
}

// Many tokens: a block is unpacked once for all of them, which go through U at a time. The last step
// works on whatever lies behind the tile, and nobody looks at what comes out of it: quicker than
// steps of one or two tokens, whose sums wait for each other.
template <class V, class T, int P, int U>
void run_many(const PanelTask& task, int64_t first) {
  static_assert(U <= kSpareTokens);
  const Units<V, P> units(task, first);
  const ActivationTile x = task.x;
  const int64_t tokens = x.stride;
  Sums<V, P, U> sums;
  for (int64_t i = 0; i < (tokens + U - 1) / U * U * P; ++i) {
    V::store(sums.all + i * V::kLanes, V::zero_float());
    if constexpr (T::kHasUnit) V::store(sums.span + i * V::kLanes, V::zero());
  }
  const int64_t asked = tokens_per_group(task);
  for (int64_t g = 0; g < task.groups; ++g) {
    Block<V, T> block[P];
    load_blocks<V, T, P>(task, units, g, block);
    prefetch_output<V, P>(task, units, g, asked);
    if (!T::kHasUnit || (g % kSpan != kSpan - 1 && g != task.groups - 1)) {
      for (int64_t t = 0; t < tokens; t += U) run_step<V, T, P, U, false>(block, x, g, t, &sums);
    } else {
      for (int64_t t = 0; t < tokens; t += U) run_step<V, T, P, U, true>(block, x, g, t, &sums);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int p = 0; p < P; ++p) {
      typename V::Float sum = V::load_float(sums.all + sums.at(t, p));
      if constexpr (T::kHasUnit) sum = V::mul(sum, units.template unit<T>(task, p));
      store_rows<V>(task, t, units.row[p], sum);
    }
  }
}

// All sub-blocks of a task, P at a time.
template <class V, class T, int P, int U, bool kMany>
void run_units(const PanelTask& task, int64_t first = 0) {
  const int64_t units = task.panels * Units<V, 1>::kSubs;
  for (; first + P <= units; first += P) {
    if constexpr (kMany) {
      run_many<V, T, P, U>(task, first);
    } else {
      run_few<V, T, P, U>(task, first);
    }
  }
  if constexpr (P > 1) run_units<V, T, 1, U, kMany>(task, first);
}

// Whether steps of `fewer` tokens make up for being more by doing less in vain.
constexpr bool is_shorter_better(int64_t tokens, int64_t fewer, int64_t more) {
  const auto whole = [=](int64_t step) { return (tokens + step - 1) / step * step; };
  return 12 * (whole(more) - whole(fewer)) >= tokens;
}

template <class V, Format kFormat>
void run_panels(const PanelTask& task) {
  using T = Traits<kFormat>;
  constexpr int kFew = V::kUnitsFew, kMany = V::kUnitsMany, kTokens = V::kTokens;
  if (task.x.stride == 1) return run_units<V, T, kFew, 1, false>(task);
  if (task.x.stride == 2) return run_units<V, T, kFew, 2, false>(task);
  if constexpr (kTokens > 2) {
    if (is_shorter_better(task.x.stride, kTokens - 1, kTokens)) {
      return run_units<V, T, kMany, kTokens - 1, true>(task);
    }
  }
  run_units<V, T, kMany, kTokens, true>(task);
}

template <class V>
constexpr void fill_packed(MatmulKernels* kernels) {
  kernels->packed[static_cast<int>(Format::kQ4)] = run_panels<V, Format::kQ4>;
  kernels->packed[static_cast<int>(Format::kQ4m)] = run_panels<V, Format::kQ4m>;
  kernels->packed[static_cast<int>(Format::kQ5)] = run_panels<V, Format::kQ5>;
  kernels->packed[static_cast<int>(Format::kQ5m)] = run_panels<V, Format::kQ5m>;
  kernels->packed[static_cast<int>(Format::kQ6)] = run_panels<V, Format::kQ6>;
  kernels->packed[static_cast<int>(Format::kQ8)] = run_panels<V, Format::kQ8>;
}

}  // namespace
}  // namespace minisgl
