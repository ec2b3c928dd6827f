#ifndef OPTSTATE_PROTO_SHM_PAGE_RESERVE_H_
#define OPTSTATE_PROTO_SHM_PAGE_RESERVE_H_

#include <cstdint>

#include "absl/status/status.h"

namespace optstate::shm {

// Checks that every byte of [0, bytes) of a file in memory (tmpfs, memfd,
// hugetlbfs) has its page, so that reading it through a mapping can neither
// raise SIGBUS nor take memory. The block count of stat does not show this:
// blocks behind the end of the file count like those within it.
//
// Pages that are reserved and were never written are holes to SEEK_HOLE;
// cachestat (Linux 6.5) counts them. Where the kernel cannot count, the holes
// of the range are given pages here, at this process's cost and bounded by
// `bytes`.
//
// INVALID_ARGUMENT: there are holes; the message says how much is there.
absl::Status CheckReserved(int fd, uint64_t bytes);

// Returns the end of the pages from `from`, a multiple of the page, on that
// were written without a gap, at most `bytes`: reading them takes no memory.
// Returns `from` where the kernel does not say (hugetlbfs). A page of a sealed
// segment that was written stays, so the result never becomes less.
//
// A peer that holds its own file can make this wait: call it without locks that
// others need.
uint64_t EndOfWritten(int fd, uint64_t from, uint64_t bytes);

// Acts as on a kernel without cachestat; for tests.
namespace internal {
absl::Status CheckReservedWithoutCounting(int fd, uint64_t bytes);
}  // namespace internal

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_PAGE_RESERVE_H_
