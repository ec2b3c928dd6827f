#include "tests/conformance/state_store_suite.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "proto/types/array_format.h"
#include "proto/types/sub_groups.h"
#include "storage/record_lag.h"
#include "storage/record_view.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate {
namespace {

using Access = storage::StateStore::Access;

constexpr uint64_t kSubGroupElements = kTileElements;

std::vector<absl::Span<std::byte>> PiecesOf(
    const Layout& layout, const storage::StateStore::Pin& pin) {
  return nvme::KeptPieces(layout, pin.record());
}

// Returns a random layout that has elements.
Layout NextLayout(RandomLayouts* layouts) {
  while (true) {
    Layout layout = *Layout::Make(layouts->Next(12));
    if (layout.flat_elements() > 0) return layout;
  }
}

void Fill(absl::Span<std::byte> bytes, std::mt19937_64* random) {
  for (std::byte& byte : bytes) byte = std::byte((*random)() & 0xff);
}

}  // namespace

StateMemory::StateMemory(const Layout& layout)
    : parameters_(layout.parameter_area_bytes()),
      master_(layout.flat_elements() * sizeof(float)),
      step_counts_(layout.parameters().size()),
      scalars_(layout.parameters().size()) {
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(static_cast<int>(k))) continue;
    state_[k].resize(layout.flat_elements() * sizeof(float));
    if (ArrayFormat(layout, static_cast<int>(k)) != StateFormat::kDynamic8) {
      continue;
    }
    scale_[k].resize(layout.flat_elements() / kQuantizedBlockElements);
  }
}

storage::StateArrays StateMemory::arrays() {
  storage::StateArrays arrays;
  arrays.parameters = parameters_.data();
  arrays.master = master_.data();
  arrays.step_counts = step_counts_.data();
  arrays.scalars = scalars_.data();
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    if (!state_[k].empty()) arrays.state[k] = state_[k].data();
    if (!scale_[k].empty()) arrays.scale[k] = scale_[k].data();
  }
  return arrays;
}

std::string StateStoreWorldName(
    const testing::TestParamInfo<StateStoreWorldParam>& info) {
  return info.param.name;
}

StateStoreSuite::StateStoreSuite()
    : layout_(NextLayout(&layouts_)),
      random_(layouts_.Uniform(0, UINT64_MAX)),
      model_memory_(layout_),
      model_(std::make_unique<storage::HostStore>(&layout_, kSubGroupElements,
                                                  model_memory_.arrays())),
      world_(GetParam().make({.layout = &layout_,
                              .sub_group_elements = kSubGroupElements,
                              .seed = random_()})) {}

void StateStoreSuite::Write(const storage::StateStore::Pin& pin,
                            std::mt19937_64* random) {
  const auto index = static_cast<size_t>(&pin.record().sub_group() -
                                         store().sub_groups().all().data());
  const auto to = PiecesOf(layout_, pin);
  const auto model = nvme::KeptPieces(layout_, model_->record(index));
  ASSERT_EQ(to.size(), model.size());
  for (size_t i = 0; i < to.size(); ++i) {
    ASSERT_EQ(to[i].size(), model[i].size());
    Fill(model[i], random);
    std::copy(model[i].begin(), model[i].end(), to[i].begin());
  }
}

void StateStoreSuite::WriteAll() {
  for (size_t i = 0; i < records(); ++i) {
    const auto pin = store().PinSubGroup(i, Access::kWrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    Write(*pin, &random_);
  }
}

bool StateStoreSuite::IsAsModel(const storage::StateStore::Pin& pin) {
  const auto index = static_cast<size_t>(&pin.record().sub_group() -
                                         store().sub_groups().all().data());
  return PiecesOf(layout_, pin) ==
         nvme::KeptPieces(layout_, model_->record(index));
}

void StateStoreSuite::CompareAll() {
  for (size_t i = 0; i < records(); ++i) {
    const auto pin = store().PinSubGroup(i, Access::kRead);
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_TRUE(IsAsModel(*pin)) << "record " << i;
  }
}

TEST_P(StateStoreSuite, ANewJobIsZeros) { CompareAll(); }

TEST_P(StateStoreSuite, RecordsAreOfTheSubGroups) {
  ASSERT_EQ(store().sub_groups().size(), records());
  EXPECT_EQ(store().layout().hash(), layout_.hash());
  for (size_t i = 0; i < records(); ++i) {
    const auto pin = store().PinSubGroup(i, Access::kRead);
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_EQ(&pin->record().sub_group(), &store().sub_groups()[i]);
  }
  EXPECT_EQ(store().status(), absl::OkStatus());
}

TEST_P(StateStoreSuite, WhatIsWrittenStays) {
  WriteAll();
  for (int round = 0; round < 3 && !HasFatalFailure(); ++round) {
    for (size_t i = 0; i < 4 * records(); ++i) {
      const size_t record = random_() % records();
      const Access access = random_() % 2 == 0 ? Access::kRead : Access::kWrite;
      const auto pin = store().PinSubGroup(record, access);
      ASSERT_TRUE(pin.ok()) << pin.status();
      ASSERT_TRUE(IsAsModel(*pin)) << "record " << record;
      if (access == Access::kWrite) Write(*pin, &random_);
    }
    CompareAll();
    Reopen();
  }
  CompareAll();
}

TEST_P(StateStoreSuite, APassVisitsWhatIsWantedOnce) {
  WriteAll();
  for (int round = 0; round < 4; ++round) {
    std::vector<uint8_t> wanted(records());
    for (uint8_t& one : wanted) one = random_() % 3 != 0;
    const auto positions = store().BeginPass(wanted);
    ASSERT_TRUE(positions.ok()) << positions.status();
    // A pass may be left before its end, as one that an error ends is.
    const size_t end =
        round == 1 && *positions > 0 ? random_() % *positions : *positions;
    std::vector<int> visits(records());
    for (size_t i = 0; i < end; ++i) {
      const auto pin = store().PinOfPass(i);
      ASSERT_TRUE(pin.ok()) << pin.status();
      const auto index = static_cast<size_t>(&pin->record().sub_group() -
                                             store().sub_groups().all().data());
      ++visits[index];
      EXPECT_TRUE(IsAsModel(*pin)) << "record " << index;
      if (wanted[index] != 0) Write(*pin, &random_);
    }
    for (size_t i = 0; i < records(); ++i) {
      EXPECT_LE(visits[i], 1) << i;
      if (end == *positions && wanted[i] != 0) {
        EXPECT_EQ(visits[i], 1) << i;
      }
    }
  }
  CompareAll();
  Reopen();
  CompareAll();
}

// Copies of some records, which are newer: random bytes that a record lacks.
class Copies final : public storage::RecordLag {
 public:
  enum class Of : uint8_t { kNone, kAsNew, kNewer };

  Copies(storage::StateStore* store,
         absl::FunctionRef<void(const storage::RecordView&)> write)
      : store_(*store), write_(write), of_(store->sub_groups().size()) {}

  Of& of(size_t record) { return of_[record]; }
  bool Concerns(const SubGroup& sub_group, bool is_written) override {
    const Of of = of_[IndexOf(sub_group)];
    return of == Of::kNewer || (is_written && of == Of::kAsNew);
  }
  void MakeCurrent(const storage::RecordView& record,
                   bool is_written) override {
    Of& of = of_[IndexOf(record.sub_group())];
    if (of == Of::kNewer) write_(record);
    if (of != Of::kNone) of = is_written ? Of::kNone : Of::kAsNew;
  }

 private:
  size_t IndexOf(const SubGroup& sub_group) const {
    return static_cast<size_t>(&sub_group - store_.sub_groups().all().data());
  }

  storage::StateStore& store_;
  const absl::FunctionRef<void(const storage::RecordView&)> write_;
  std::vector<Of> of_;  // by record
};

// Also one that is pinned to be read, and then is not in a frame any more.
TEST_P(StateStoreSuite, ARecordThatLagsIsBroughtUpToDateFirst) {
  WriteAll();
  const auto write = [&](const storage::RecordView& record) {
    Write(storage::StateStore::Pin(record), &random_);
  };
  Copies copies(&store(), write);
  store().SetLag(&copies);
  using Of = Copies::Of;
  for (size_t i = 0; i < 8 * records(); ++i) {
    const size_t record = random_() % records();
    const Of of = static_cast<Of>(random_() % 3);
    copies.of(record) = of;
    const bool is_read = random_() % 2 == 0;
    const auto pin =
        store().PinSubGroup(record, is_read ? Access::kRead : Access::kWrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    ASSERT_TRUE(IsAsModel(*pin)) << "record " << record;
    const Of left = of == Of::kNone || !is_read ? Of::kNone : Of::kAsNew;
    EXPECT_EQ(copies.of(record), left);
    if (!is_read) Write(*pin, &random_);
  }
  for (size_t i = 0; i < records(); ++i) copies.of(i) = Of::kNewer;
  // A pass is of those who know of the copies.
  const std::vector<uint8_t> all(records(), 1);
  const auto positions = store().BeginPass(all);
  ASSERT_TRUE(positions.ok()) << positions.status();
  for (size_t i = 0; i < *positions; ++i) {
    const auto pin = store().PinOfPass(i);
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_TRUE(IsAsModel(*pin));
  }
  CompareAll();
  for (size_t i = 0; i < records(); ++i) EXPECT_EQ(copies.of(i), Of::kAsNew);
  store().SetLag(nullptr);
  Reopen();
  CompareAll();
}

// More threads than any store has frames to spare.
TEST_P(StateStoreSuite, ThreadsShareAPass) {
  WriteAll();
  for (int round = 0; round < 3; ++round) {
    const std::vector<uint8_t> wanted(records(), 1);
    const auto positions = store().BeginPass(wanted);
    ASSERT_TRUE(positions.ok()) << positions.status();
    std::atomic<size_t> next{0};
    std::atomic<size_t> wrong{0};
    std::vector<std::thread> threads;
    threads.reserve(6);
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&, seed = random_()] {
        std::mt19937_64 random(seed);
        for (size_t i = next++; i < *positions; i = next++) {
          const auto pin = store().PinOfPass(i);
          if (!pin.ok() || !IsAsModel(*pin)) {
            ++wrong;
            continue;
          }
          Write(*pin, &random);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0u);
  }
  CompareAll();
}

// Threads may have one record pinned at once, and write different bytes of it.
TEST_P(StateStoreSuite, ThreadsShareARecord) {
  WriteAll();
  constexpr size_t kThreads = 4;
  for (size_t record = 0; record < records(); ++record) {
    const auto model = nvme::KeptPieces(layout_, model_->record(record));
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int round = 0; round < 3; ++round) {
          const auto pin = store().PinSubGroup(record, Access::kWrite);
          ASSERT_TRUE(pin.ok()) << pin.status();
          const auto to = PiecesOf(layout_, *pin);
          for (size_t i = 0; i < to.size(); ++i) {
            for (size_t at = t; at < to[i].size(); at += kThreads) {
              const auto byte = static_cast<std::byte>(round + record + t);
              to[i][at] = byte;
              model[i][at] = byte;
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  CompareAll();
}

// A record that is overwritten has what it had, or zeros; then what it is
// given.
TEST_P(StateStoreSuite, ARecordIsOverwritten) {
  WriteAll();
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < records(); ++i) {
      const size_t record = random_() % records();
      const auto pin = store().PinSubGroup(record, Access::kOverwrite);
      ASSERT_TRUE(pin.ok()) << pin.status();
      const auto former = nvme::KeptPieces(layout_, model_->record(record));
      const auto now = PiecesOf(layout_, *pin);
      bool is_former = now == former;
      bool is_zero = true;
      // Parameters are no part of what is swapped.
      for (int part = 0; part < storage::kRecordPartCount; ++part) {
        for (const std::byte byte : pin->record().part(part)) {
          is_zero &= byte == std::byte{0};
        }
      }
      EXPECT_TRUE(is_former || is_zero) << "record " << record;
      Write(*pin, &random_);
    }
    CompareAll();
  }
  Reopen();
  CompareAll();
}

// Fills the parameters of a record, in the store and in the model.
void StateStoreSuite::FillParameters(size_t record) {
  const auto pin = store().PinSubGroup(record, Access::kWrite);
  ASSERT_TRUE(pin.ok()) << pin.status();
  const SubGroup& range = pin->record().sub_group();
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    const uint64_t flat = layout_.flat_offset(p);
    const auto numel = static_cast<uint64_t>(layout_.parameters()[p].numel);
    const uint64_t begin = std::max(flat, range.begin);
    const uint64_t end = std::min(flat + numel, range.end);
    if (begin >= end) continue;
    const uint64_t bytes =
        (end - begin) * SizeInBytes(layout_.parameters()[p].dtype);
    std::byte* const model = model_->record(record).parameter(p, begin - flat);
    Fill({model, bytes}, &random_);
    std::copy_n(model, bytes, pin->record().parameter(p, begin - flat));
  }
}

TEST_P(StateStoreSuite, ParametersAreReadAlone) {
  const auto count = static_cast<uint32_t>(layout_.parameters().size());
  for (int round = 0; round < 4; ++round) {
    for (size_t i = 0; i < records(); ++i) {
      if (round == 0 || random_() % 3 == 0) FillParameters(i);
    }
    if (round == 2) Reopen();
    for (int reads = 0; reads < 30; ++reads) {
      const auto p = static_cast<uint32_t>(random_() % count);
      if (random_() % 2 == 0) store().PrefetchParameters(p, count - p);
      const ParameterSpec& spec = layout_.parameters()[p];
      const auto numel = static_cast<uint64_t>(spec.numel);
      const uint64_t begin = random_() % (numel + 1);
      const uint64_t read = random_() % (numel - begin + 1);
      const uint64_t bytes = SizeInBytes(spec.dtype);
      std::vector<std::byte> found(read * bytes);
      const absl::Status status =
          store().ReadParameter(p, begin, read, found.data());
      ASSERT_TRUE(status.ok()) << status;
      const std::byte* const model = model_memory_.arrays().parameters +
                                     layout_.parameter_offset_bytes(p) +
                                     begin * bytes;
      EXPECT_TRUE(std::equal(found.begin(), found.end(), model))
          << "parameter " << p << " from " << begin << ", round " << round;
      if (random_() % 2 == 0) store().ReleaseParameters(0, p + 1);
    }
  }
}

TEST_P(StateStoreSuite, NumbersAndParametersAreInMemoryAlways) {
  const bool has_counts = store().step_counts().data() != nullptr;
  if (has_counts) store().step_counts()[0] = 7;
  const absl::Span<std::byte> area = store().parameter_area();
  Fill(area, &random_);
  const std::vector<std::byte> expected(area.begin(), area.end());
  for (size_t i = 0; i < records(); ++i) {
    const auto pin = store().PinSubGroup(i, Access::kWrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    for (int part = 0; part < storage::kRecordPartCount; ++part) {
      Fill(pin->record().part(part), &random_);
    }
  }
  EXPECT_TRUE(store().parameter_area() == absl::MakeConstSpan(expected));
  if (has_counts) {
    EXPECT_EQ(store().step_counts()[0], 7);
  }
}

}  // namespace optstate
