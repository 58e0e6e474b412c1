// The order in which the sums of query tiles are added to rows that they share: ascending by tile, whichever thread is
// faster. A tile meets its blocks in ascending order and tells how far it came; a later tile that wants to add to the
// same rows waits until every earlier one is past them. Tiles are taken up in ascending order, so the earliest that is
// at work never waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>

namespace openmsa::cpu {

class KeyOrder {
 public:
  explicit KeyOrder(int64_t items) : items_(new Item[static_cast<size_t>(items)]) {}

  // Before the loop: the item will add to rows in [first, end).
  void expect(int64_t item, int64_t first, int64_t end) {
    Item& it = items_[static_cast<size_t>(item)];
    it.next.store(first < end ? first : kDone, std::memory_order_relaxed);
    it.end = end;
  }

  // Returns once no earlier item will add to rows in [first, end).
  void wait(int64_t item, int64_t first, int64_t end) {
    int64_t earlier = done_below_.load(std::memory_order_acquire);
    bool all_done = true;
    for (; earlier < item; ++earlier) {
      const Item& it = items_[static_cast<size_t>(earlier)];
      int64_t next = it.next.load(std::memory_order_acquire);
      while (next < end && first < it.end) {
        std::this_thread::yield();
        next = it.next.load(std::memory_order_acquire);
      }
      all_done = all_done && next == kDone;
      if (all_done) done_below_.store(earlier + 1, std::memory_order_release);
    }
  }

  // The item will add to no row before `next` any more.
  void advance(int64_t item, int64_t next) {
    items_[static_cast<size_t>(item)].next.store(next, std::memory_order_release);
  }
  void finish(int64_t item) { advance(item, kDone); }

 private:
  static constexpr int64_t kDone = std::numeric_limits<int64_t>::max();
  struct alignas(64) Item {
    std::atomic<int64_t> next{kDone};
    int64_t end = 0;
  };
  std::unique_ptr<Item[]> items_;
  std::atomic<int64_t> done_below_{0};  // items below are done; may lag behind
};

}  // namespace openmsa::cpu
