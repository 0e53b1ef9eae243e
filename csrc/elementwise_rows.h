// for_rows(): see elementwise.h.
#pragma once

#include "pool.h"

namespace minisgl {

template <class Body>
void for_rows(int64_t rows, int64_t elements_per_row, Body&& body) {
  // About two microseconds, several times what a task costs. An element is a norm's; a gate's
  // counts as 4, one that is quantised as 6.
  constexpr int64_t kElementsPerTask = 16384;
  const int64_t width = elements_per_row < 1 ? 1 : elements_per_row;
  const int64_t chunk = width < kElementsPerTask ? kElementsPerTask / width : 1;
  const int64_t tasks = (rows + chunk - 1) / chunk;
  parallel_for(tasks, [&](int64_t task) {
    const int64_t end = (task + 1) * chunk < rows ? (task + 1) * chunk : rows;
    for (int64_t row = task * chunk; row < end; ++row) body(row);
  });
}

}  // namespace minisgl
