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
const AttentionKernels& attention_table() {
  static const AttentionKernels kernels = [] {
    AttentionKernels k{};
    fill_kind<V, KvKind::kFloat32>(&k);
    fill_kind<V, KvKind::kBfloat16>(&k);
    fill_kind<V, KvKind::kFloat16>(&k);
    fill_kind<V, KvKind::kInt8>(&k);
    k.merge = merge_partials<V>;
    return k;
  }();
  return kernels;
}

}  // namespace
}  // namespace minisgl
