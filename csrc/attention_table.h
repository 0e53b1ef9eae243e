// Fills the table of one instruction set from its vector class.
#pragma once

#include "attention_rope_body.h"
#include "attention_task_body.h"

namespace minisgl {
namespace {

template <class V, KvKind kKind>
void fill_kind(AttentionKernels* kernels) {
  constexpr int kIndex = static_cast<int>(kKind);
  kernels->run[kIndex] = run_attention<V, kKind>;
  kernels->store[kIndex] = store_tokens<V, kKind>;
  kernels->rope[kIndex] = rope_tokens<V, kKind>;
}

template <class V>
float probe_fma(int64_t steps) {
  constexpr int kCount = V::kSums;  // as many as the micro-kernels keep
  typename V::Vec sum[kCount];
#pragma GCC unroll 32
  for (int i = 0; i < kCount; ++i) sum[i] = V::broadcast(static_cast<float>(steps + i));
  const auto factor = V::broadcast(0.5f), add = V::broadcast(1.0f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 32
    for (auto& x : sum) x = V::fma(x, factor, add);
  }
#pragma GCC unroll 32
  for (int i = 1; i < kCount; ++i) sum[0] = V::add(sum[0], sum[i]);
  return V::sum(sum[0]);
}

template <class V>
const AttentionKernels& attention_table() {
  static const AttentionKernels kernels = [] {
    AttentionKernels k{};
    fill_kind<V, KvKind::kFloat32>(&k);
    fill_kind<V, KvKind::kBfloat16>(&k);
    fill_kind<V, KvKind::kFloat16>(&k);
    fill_kind<V, KvKind::kInt8>(&k);
    fill_kind<V, KvKind::kInt16>(&k);
    k.merge = merge_partials<V>;
    k.probe = probe_fma<V>;
    k.probe_floats = V::kSums * kVecLanes;
    return k;
  }();
  return kernels;
}

}  // namespace
}  // namespace minisgl
