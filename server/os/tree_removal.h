#ifndef OPTSTATE_SERVER_OS_TREE_REMOVAL_H_
#define OPTSTATE_SERVER_OS_TREE_REMOVAL_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace optstate::os {

// How far a removal has come.
//
// Threads: thread-safe.
struct RemovalProgress {
  std::atomic<uint64_t> bytes = 0;        // that its files have given back
  std::atomic<uint64_t> bytes_total = 0;  // 0: not known yet
};

struct TreeToRemove {
  std::string path;
  // Other processes may have mapped its files. They would die of SIGBUS if a
  // file became shorter, and keep what they have mapped if it is removed whole.
  bool may_be_mapped = false;
};

// Files that no one maps are cut by so much at a time before they are removed:
// the removal of a file of terabytes takes long, and would say nothing until
// its end.
inline constexpr uint64_t kRemovalPieceBytes = uint64_t{1} << 30;

// Removes all trees, as RemoveTree() does, whatever becomes of one of them;
// returns the first error. Trees that no one else changes alone: each has been
// given a name for it. `piece_bytes`: another one is for tests.
absl::Status RemoveTrees(const std::vector<TreeToRemove>& trees,
                         RemovalProgress* progress,
                         uint64_t piece_bytes = kRemovalPieceBytes);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_TREE_REMOVAL_H_
