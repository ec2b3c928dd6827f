#include "server/scheduler/workers/numa_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "server/scheduler/workers/worker_pool.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace optstate::scheduler {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
constexpr size_t kNodesMax = 1024;

uintptr_t RoundToHugePage(uintptr_t address) {
  return (address + kHugePage / 2) / kHugePage * kHugePage;
}

}  // namespace

std::vector<NodeShare> NodeShares(const WorkerPlacement& placement,
                                  size_t total) {
  std::vector<NodeShare> shares;
  const size_t participants = placement.seats.size();
  for (size_t i = 0; i < participants; ++i) {
    const IndexRange own = WorkerPool::ShareOf(i, participants, total);
    const int node = placement.seats[i].node;
    if (shares.empty() || shares.back().node != node) {
      shares.push_back({node, own.begin, own.end});
    }
    shares.back().end = own.end;
  }
  return shares;
}

absl::Status MoveToNode(absl::Span<std::byte> memory, int node) {
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t begin = RoundToHugePage(address);
  const uintptr_t end = RoundToHugePage(address + memory.size());
  if (begin >= end) return absl::OkStatus();
  // Pages within half a huge page of the ends belong to neighbours; beyond the
  // file's own ends there are none. mbind takes whole pages.
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t aligned = (std::max(begin, address) + page - 1) / page * page;
  const uintptr_t stop = std::min(end, address + memory.size());
  if (aligned >= stop) return absl::OkStatus();
  auto* const first = reinterpret_cast<void*>(aligned);
  const size_t bytes = stop - aligned;
  std::array<unsigned long, kNodesMax / kWordBits> nodes{};
  const auto index = static_cast<size_t>(node);
  if (index >= kNodesMax) return absl::OutOfRangeError("NUMA node number");
  nodes[index / kWordBits] = 1ul << (index % kWordBits);
  // Only pages in the page table are moved. Kernels before 5.14 refuse the
  // call, and then leave untouched pages where they are.
  (void)::madvise(first, bytes, MADV_POPULATE_READ);
  if (::syscall(SYS_mbind, first, bytes, MPOL_PREFERRED, nodes.data(),
                kNodesMax + 1, MPOL_MF_MOVE) != 0) {
    return OsError(errno, absl::StrCat("mbind to NUMA node ", node));
  }
  return absl::OkStatus();
}

}  // namespace optstate::scheduler
