// Operands of warpgroup products in shared memory.
#pragma once

namespace openmsa::cuda {

// Rows of 16-bit elements in panels of 64 columns, which hold 128 bytes of a row with the 128-byte swizzle.
inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

template <int kColumns, int kRows>
struct alignas(1024) StagedRows {
  static constexpr int kPanels = kColumns / kPanelColumns;
  static_assert(kColumns % kPanelColumns == 0 && kRows % 8 == 0);  // the swizzle repeats every 8 rows
  unsigned char panels[kPanels][kRows][kPanelRowBytes];
};

}  // namespace openmsa::cuda
