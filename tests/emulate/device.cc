#include "emulate/device.h"

#include "cuda/common/instructions/mbarrier.cuh"
#include "emulate/block.h"

namespace openmsa::emulate {

int sync_block(bool vote) { return Block::current().arrive_named(0, 0, true, "__syncthreads", vote); }
void sync_named(int id, int threads) { Block::current().arrive_named(id, threads, true, "bar.sync"); }
void arrive_named(int id, int threads) { Block::current().arrive_named(id, threads, false, "bar.arrive"); }
void give_way() { Block::current().give_way(); }
void trap() { Block::current().fault("trap"); }
uint32_t shared_address(const void* pointer) { return SharedMemory::address(pointer); }
int lane_id() { return Block::current().thread().lane(); }
void set_register_limit(int count, bool raise) { Block::current().set_register_limit(count, raise); }

const uint64_t* meet_lanes(uint32_t mask, uint64_t value, const char* instruction) {
  return Block::current().meet(mask, value, instruction);
}

}  // namespace openmsa::emulate

namespace openmsa::cuda {

using emulate::Block;

void barrier_init(uint64_t* barrier, int arrivals) { Block::current().init_memory_barrier(barrier, arrivals); }

void barrier_arrive(uint64_t* barrier) {
  Block::current().maybe_give_way();
  Block::current().arrive(barrier, 1, "mbarrier.arrive");
}

void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  constexpr const char* kName = "mbarrier.arrive.expect_tx";
  Block::current().maybe_give_way();
  Block::current().expect_bytes(barrier, bytes, kName);
  Block::current().arrive(barrier, 1, kName);
}

void barrier_wait(uint64_t* barrier, uint32_t parity) { Block::current().wait_phase(barrier, parity); }

}  // namespace openmsa::cuda
