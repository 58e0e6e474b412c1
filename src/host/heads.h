// How the heads of a call belong together.
#pragma once

#include <cstdint>

namespace openmsa::host {

// Heads of a call: index head r serves `group` query heads from r * group on, which share one KV head.
struct Heads {
  int64_t query = 1, kv = 1, index = 1, index_key = 1;

  int64_t group() const { return query / index; }
  int64_t kv_head(int64_t index_head) const { return index_head * kv / index; }
  int64_t index_key_head(int64_t index_head) const { return index_head * index_key / index; }
};

}  // namespace openmsa::host
