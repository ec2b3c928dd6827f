#include "kernels/store_orders.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/undo.h"
#include "kernels/undo_fence.h"

namespace optstate::kernels {
namespace {

void Store(const StoredPiece& piece, std::vector<std::byte>* memory) {
  std::memcpy(memory->data() + piece.offset, &piece.value, piece.bytes);
}

// The stores between which there is no fence.
class Segment {
 public:
  void Add(const std::vector<StoredPiece>& pieces) {
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
  }

  void Apply(std::vector<std::byte>* memory) const {
    for (const StoredPiece& piece : pieces_) Store(piece, memory);
  }

  // Returns true when all is recovered. `memory` is what was there before; then
  // what is there after.
  bool Try(const StoreOrders& orders, std::vector<std::byte>* memory,
           StoreOrderResult* result) const {
    if (pieces_.empty()) return true;
    // The stores to a place, the first of which has what was there before.
    std::map<size_t, std::vector<StoredPiece>> by_place;
    for (const StoredPiece& piece : pieces_) {
      auto& stores = by_place[piece.offset];
      if (stores.empty()) {
        stores.push_back({piece.offset, piece.bytes, 0});
        std::memcpy(&stores[0].value, memory->data() + piece.offset,
                    piece.bytes);
      }
      stores.push_back(piece);
    }
    std::vector<std::byte> now = *memory;
    const auto is_recovered = [&](const std::string& what) {
      ++result->tried;
      if (orders.recovers(now)) return true;
      result->lost = absl::StrCat(what, " of ", pieces_.size(), " stores");
      return false;
    };
    if (!is_recovered("none")) return false;
    for (const auto& [offset, stores] : by_place) {
      Store(stores[1], &now);
      if (!is_recovered(absl::StrCat("only that at ", offset))) return false;
      Store(stores[0], &now);
    }
    for (size_t i = 0; i < orders.random_orders; ++i) {
      if (!TryRandom(by_place, *orders.random, is_recovered, &now)) {
        return false;
      }
      now = *memory;
    }
    Apply(memory);
    now = *memory;
    for (const auto& [offset, stores] : by_place) {
      Store(stores[stores.size() - 2], &now);
      if (!is_recovered(absl::StrCat("all but that at ", offset))) return false;
      Store(stores.back(), &now);
    }
    return is_recovered("all");
  }

 private:
  // Tries a random number of stores: those to each place keep their order, so
  // it is enough to draw the places.
  template <typename IsRecovered>
  bool TryRandom(const std::map<size_t, std::vector<StoredPiece>>& by_place,
                 std::mt19937& random, const IsRecovered& is_recovered,
                 std::vector<std::byte>* now) const {
    std::vector<size_t> places;
    places.reserve(pieces_.size());
    for (const StoredPiece& piece : pieces_) places.push_back(piece.offset);
    std::shuffle(places.begin(), places.end(), random);
    places.resize(random() % places.size() + 1);
    std::map<size_t, size_t> done;
    for (const size_t place : places) {
      Store(by_place.at(place)[++done[place]], now);
    }
    return is_recovered(absl::StrCat("by chance ", places.size()));
  }

  std::vector<StoredPiece> pieces_;
};

std::string NameOf(UndoFence fence) {
  switch (fence) {
    case UndoFence::kBeforeProgress:
      return "before progress";
    case UndoFence::kBehindProgress:
      return "behind progress";
    case UndoFence::kBeforeSaved:
      return "before saved";
    case UndoFence::kBehindSaved:
      return "behind saved";
    case UndoFence::kBeforeRun:
      return "before run";
    case UndoFence::kBeforeKind:
      return "before kind";
    case UndoFence::kBehindKind:
      return "behind kind";
    case UndoFence::kBeforeStamp:
      return "before stamp";
    case UndoFence::kBehindStamp:
      return "behind stamp";
  }
  return "?";
}

std::string NameOf(uint64_t progress) {
  const UndoInFlight in_flight = InFlightOf(progress);
  if (in_flight.length == 0) return "of the end";
  switch (in_flight.phase) {
    case UndoPhase::kOldValues:
      return "of old values";
    case UndoPhase::kState0:
      return "of state 0";
    case UndoPhase::kState1:
      return "of state 1";
    case UndoPhase::kMaster:
      return "of masters";
  }
  return "?";
}

}  // namespace

FenceNames NamesOf(const StoreTrace& trace, size_t progress_word) {
  FenceNames names;
  for (size_t i = 0; i < trace.fences.size(); ++i) {
    names.emplace_back();
    if (trace.segments[i].empty() || trace.segments[i + 1].empty()) continue;
    const UndoFence which = trace.fences[i].which;
    names.back() = NameOf(which);
    // Before the fence of progress, progress is not stored yet, but at the next
    // fence it is.
    const bool is_before = which == UndoFence::kBeforeProgress;
    if (!is_before && which != UndoFence::kBehindProgress) continue;
    const size_t there = std::min(i + is_before, trace.fences.size() - 1);
    absl::StrAppend(&names.back(), " ",
                    NameOf(trace.fences[there].words[progress_word]));
  }
  return names;
}

StoreOrderResult TryStoreOrders(const StoreTrace& trace,
                                const StoreOrders& orders) {
  StoreOrderResult result;
  std::vector<std::byte> memory = trace.initial;
  size_t next = 0;
  while (next < trace.segments.size() && result.lost.empty()) {
    const size_t first = next;
    Segment segment;
    segment.Add(trace.segments[next++]);
    while (next < trace.segments.size() && orders.is_removed != nullptr &&
           orders.is_removed(next - 1)) {
      segment.Add(trace.segments[next++]);
    }
    if (orders.is_removed != nullptr && next == first + 1) {
      segment.Apply(&memory);
    } else if (!segment.Try(orders, &memory, &result)) {
      result.lost = absl::StrCat("segment ", first, ": ", result.lost);
    }
  }
  return result;
}

std::set<std::string> NeededFences(const StoreTrace& trace,
                                   const FenceNames& names,
                                   const StoreOrders& orders, size_t* tried) {
  StoreOrders with = orders;
  with.is_removed = nullptr;
  const StoreOrderResult all = TryStoreOrders(trace, with);
  EXPECT_EQ(all.lost, "");
  *tried += all.tried;
  std::set<std::string> needed;
  for (const std::string& name :
       std::set<std::string>(names.begin(), names.end())) {
    if (name.empty()) continue;
    StoreOrders without = orders;
    without.is_removed = [&](size_t fence) { return names[fence] == name; };
    const StoreOrderResult result = TryStoreOrders(trace, without);
    if (!result.lost.empty()) needed.insert(name);
    *tried += result.tried;
  }
  return needed;
}

}  // namespace optstate::kernels
