// Where lanes of a warp meet.
#include <algorithm>
#include <cstring>
#include <string>

#include "emulate/block.h"

namespace openmsa::emulate {

const uint64_t (&Block::meet(uint32_t mask, uint64_t value, const char* instruction))[kWarpThreads] {
  maybe_give_way();
  Thread& self = thread();
  const int warp = self.warp(), lane = self.lane();
  const int lanes = std::min(threads() - warp * kWarpThreads, kWarpThreads);
  if (lanes < kWarpThreads) mask &= (1u << lanes) - 1;
  if ((mask >> lane & 1) == 0) fault(std::string(instruction) + ": the mask leaves out the lane that calls");

  auto& meetings = meetings_[static_cast<std::size_t>(warp)];
  auto found = std::find_if(meetings.begin(), meetings.end(), [&](const Meeting& m) { return m.mask == mask; });
  Meeting& meeting = found != meetings.end() ? *found : meetings.emplace_back();
  meeting.mask = mask;
  if (meeting.arrived == 0) {
    meeting.instruction = instruction;
    std::fill(std::begin(meeting.values[meeting.generation % 2]), std::end(meeting.values[meeting.generation % 2]),
              ~uint64_t{0});
  } else if (std::strcmp(meeting.instruction, instruction) != 0) {
    fault(std::string(instruction) + ": other lanes of the warp are at " + meeting.instruction);
  }
  auto& values = meeting.values[meeting.generation % 2];
  values[lane] = value;
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.generation;
    wake(meeting.waiting);
  } else {
    wait(meeting.waiting, instruction, &meeting);
  }
  return values;
}

}  // namespace openmsa::emulate
