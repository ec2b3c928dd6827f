#ifndef OPTSTATE_STORAGE_TESTING_STORE_MOMENTS_H_
#define OPTSTATE_STORAGE_TESTING_STORE_MOMENTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "absl/types/span.h"
#include "storage/persist_in_order.h"

// Makes the states of some memory that a process killed at any store can leave.
//
// Between two points of PersistInOrder() a compiler may give stores any order.
// So a test takes the memory at each point, and tries the states in which any
// subset of the stores between two points was executed. A point without which
// nothing would be lost is not needed, and one that is missing in the code
// shows as a state that is not recovered.

namespace optstate::storage {

// The memory at a point; kCount: at the beginning or the end, or at a point of
// the test itself.
struct StoreMoment {
  PersistPoint point = PersistPoint::kCount;
  std::vector<std::byte> memory;
};

// Runs something and returns the moments that it passes, with its beginning and
// its end. One at a time in a process; the points are passed on this thread.
std::vector<StoreMoment> WatchStores(absl::Span<const std::byte> memory,
                                     const std::function<void()>& run);

// Makes `memory` what it is when, of the stores between two moments, so many
// percent were executed. Bytes before `words_end` are words of 8 bytes, which
// are stored whole; others are stored in pieces of 4.
void MixMoments(const StoreMoment& from, const StoreMoment& to,
                uint64_t words_end, uint64_t percent, std::mt19937_64* random,
                absl::Span<std::byte> memory);

// Tries some mixtures of two moments. Returns whether each is recovered.
bool AllMixturesRecover(const StoreMoment& from, const StoreMoment& to,
                        uint64_t words_end, std::mt19937_64* random,
                        absl::Span<std::byte> memory,
                        const std::function<bool()>& recovers);

// Returns the points without which some mixture is not recovered.
std::set<PersistPoint> NeededPoints(const std::vector<StoreMoment>& moments,
                                    uint64_t words_end, std::mt19937_64* random,
                                    absl::Span<std::byte> memory,
                                    const std::function<bool()>& recovers);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TESTING_STORE_MOMENTS_H_
