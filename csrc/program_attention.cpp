// The attention step of a program.
#include <cmath>
#include <stdexcept>

#include "program.h"

namespace minisgl {

void Program::attention(int qkv, int out, const AttentionParams& a) {
  const int64_t d = a.head_dim, heads = a.num_q + 2 * a.num_kv;
  if (a.num_q < 1 || a.num_kv < 1 || a.num_q % a.num_kv != 0 || width(qkv) != heads * d ||
      width(out) != a.num_q * d) {
    throw std::invalid_argument("attention and its buffers do not match");
  }
  add_row_step("rope", heads * d, [=](const Tile& tile, int64_t row) {
    const int64_t half = a.rotary_half;
    const float* cos = a.cos + tile.positions[row] * half;
    const float* sin = a.sin + tile.positions[row] * half;
    for (int64_t h = 0; h < a.num_q + a.num_kv; ++h) {
      float* x = at(qkv, row) + h * d;
      for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
      }
    }
    const float* k = at(qkv, row) + a.num_q * d;
    const int64_t where = tile.out_loc[row] * a.num_kv * d;
    for (int64_t i = 0; i < a.num_kv * d; ++i) {
      static_cast<float*>(a.k_cache)[where + i] = k[i];
      static_cast<float*>(a.v_cache)[where + i] = k[a.num_kv * d + i];
    }
  });
  add_whole_step("attention", 0, [=](const Tile& tile) {
    for (int64_t r = 0; r < tile.requests->count(); ++r) {
      const int32_t* locs = tile.requests->rows + r * tile.requests->row_stride;
      const int64_t begin = tile.requests->query_start[r], end = tile.requests->query_start[r + 1];
      parallel_for((end - begin) * a.num_q, [&](int64_t task) {
        const int64_t t = begin + task / a.num_q, h = task % a.num_q;
        const int64_t len = tile.requests->kv_len[r] - (end - 1 - t);
        const int64_t kv = h / (a.num_q / a.num_kv);
        const float* q = at(qkv, t) + h * d;
        float* o = at(out, t) + h * d;
        std::vector<float> score(static_cast<size_t>(len));
        float max = -INFINITY, sum = 0;
        const int64_t low = a.window > 0 && len > a.window ? len - a.window : 0;
        for (int64_t j = low; j < len; ++j) {
          const float* k = static_cast<float*>(a.k_cache) + (locs[j] * a.num_kv + kv) * d;
          float s = 0;
          for (int64_t i = 0; i < d; ++i) s += q[i] * k[i];
          score[j] = s / std::sqrt(static_cast<float>(d));
          max = std::fmax(max, score[j]);
        }
        for (int64_t i = 0; i < d; ++i) o[i] = 0;
        for (int64_t j = low; j < len; ++j) {
          const float* v = static_cast<float*>(a.v_cache) + (locs[j] * a.num_kv + kv) * d;
          const float p = std::exp(score[j] - max);
          sum += p;
          for (int64_t i = 0; i < d; ++i) o[i] += p * v[i];
        }
        for (int64_t i = 0; i < d; ++i) o[i] /= sum;
      });
    }
  });
}

}  // namespace minisgl
