#include "storage/testing/store_moments.h"

#include <algorithm>
#include <cstring>

namespace optstate::storage {
namespace {

// Pieces of bytes that are no words.
constexpr uint64_t kPieceBytes = 4;

std::vector<StoreMoment>* taken = nullptr;
absl::Span<const std::byte> watched;

void TakeMoment(PersistPoint point) {
  taken->push_back({point, {watched.begin(), watched.end()}});
}

}  // namespace

std::vector<StoreMoment> WatchStores(absl::Span<const std::byte> memory,
                                     const std::function<void()>& run) {
  std::vector<StoreMoment> moments;
  taken = &moments;
  watched = memory;
  TakeMoment(PersistPoint::kCount);
  persist_hook.store(&TakeMoment);
  run();
  persist_hook.store(nullptr);
  TakeMoment(PersistPoint::kCount);
  return moments;
}

void MixMoments(const StoreMoment& from, const StoreMoment& to,
                uint64_t words_end, uint64_t percent, std::mt19937_64* random,
                absl::Span<std::byte> memory) {
  std::copy(from.memory.begin(), from.memory.end(), memory.begin());
  for (uint64_t at = 0; at < memory.size();) {
    const uint64_t bytes = std::min<uint64_t>(
        at < words_end ? sizeof(uint64_t) : kPieceBytes, memory.size() - at);
    if (std::memcmp(&from.memory[at], &to.memory[at], bytes) != 0 &&
        (*random)() % 100 < percent) {
      std::memcpy(&memory[at], &to.memory[at], bytes);
    }
    at += bytes;
  }
}

bool AllMixturesRecover(const StoreMoment& from, const StoreMoment& to,
                        uint64_t words_end, std::mt19937_64* random,
                        absl::Span<std::byte> memory,
                        const std::function<bool()>& recovers) {
  for (const uint64_t percent :
       {0, 3, 20, 50, 50, 50, 50, 50, 50, 80, 97, 100}) {
    MixMoments(from, to, words_end, percent, random, memory);
    if (!recovers()) return false;
  }
  return true;
}

std::set<PersistPoint> NeededPoints(const std::vector<StoreMoment>& moments,
                                    uint64_t words_end, std::mt19937_64* random,
                                    absl::Span<std::byte> memory,
                                    const std::function<bool()>& recovers) {
  std::set<PersistPoint> needed;
  for (size_t i = 1; i + 1 < moments.size(); ++i) {
    if (moments[i].point == PersistPoint::kCount) continue;
    if (!AllMixturesRecover(moments[i - 1], moments[i + 1], words_end, random,
                            memory, recovers)) {
      needed.insert(moments[i].point);
    }
  }
  return needed;
}

}  // namespace optstate::storage
