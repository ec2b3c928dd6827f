#include "server/session/transfer/staged_load.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "server/session/testing/damageable_store.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kMaster = v1::STATE_ARRAY_MASTER;
constexpr auto kState0 = v1::STATE_ARRAY_STATE_0;
constexpr uint64_t kBlock = ElementAccess::kBlockElements;

// Memory for a log, which has no byte to spare and moves each time it grows.
class LogMemory {
 public:
  absl::StatusOr<absl::Span<std::byte>> Grow(uint64_t bytes) {
    ++calls_;
    if (bytes > limit_) return absl::ResourceExhaustedError("no room");
    auto grown = std::make_unique<std::vector<std::byte>>(bytes);
    if (memory_ != nullptr) {
      grown->resize(std::max(bytes, memory_->size()));
      std::copy(memory_->begin(), memory_->end(), grown->begin());
      std::fill(memory_->begin(), memory_->end(), std::byte{0xee});
    }
    memory_ = std::move(grown);
    return absl::MakeSpan(*memory_);
  }
  absl::Span<const std::byte> bytes() const { return *memory_; }
  int calls() const { return calls_; }
  void set_limit(uint64_t bytes) { limit_ = bytes; }

 private:
  std::unique_ptr<std::vector<std::byte>> memory_;
  uint64_t limit_ = std::numeric_limits<uint64_t>::max();
  int calls_ = 0;
};

// Loads values into a state, as a rank does, without the checks of its calls.
class Load {
 public:
  explicit Load(DamageableStore* store) : elements_(store) {
    header_.incarnation = 5;
    staged_.Reset(header_);
  }

  // Loads values of a block.
  absl::Status Put(const ElementRange& range, const float* values) {
    alignas(8) std::byte payload[ElementAccess::kBlockBytesMax];
    const auto is_present = staged_.Compare(elements_, range, values, payload);
    if (!is_present.ok()) return is_present.status();
    return staged_.Stage(
        elements_, range, payload, *is_present,
        [this](uint64_t bytes) { return memory_.Grow(bytes); });
  }
  absl::Status Fill(const ElementRange& range, float value) {
    const std::vector<float> values(range.numel, value);
    return Put(range, values.data());
  }
  absl::Status PutCount(uint32_t parameter, int64_t count, int64_t present) {
    return staged_.StageNumber(
        elements_, {v1::STATE_ARRAY_STEP_COUNT, 0, parameter, 1},
        reinterpret_cast<const std::byte*>(&count),
        reinterpret_cast<const std::byte*>(&present),
        [this](uint64_t bytes) { return memory_.Grow(bytes); });
  }
  // Makes the load the state.
  void Apply() {
    for (const auto& [entry, payload] : staged_.records()) {
      const absl::Status written =
          elements_.Write({static_cast<v1::StateArray>(entry.array),
                           entry.parameter, entry.begin, entry.numel},
                          payload);
      EXPECT_TRUE(written.ok()) << written;
    }
  }
  // Returns the number of elements of each record.
  std::vector<uint64_t> RecordElements() const {
    std::vector<uint64_t> elements;
    for (const auto& [entry, payload] : staged_.records()) {
      elements.push_back(entry.numel);
    }
    return elements;
  }

  const ElementAccess elements_;
  storage::LoadLogHeader header_;
  LogMemory memory_;
  StagedLoad staged_;
};

// AdamW with "a" of 6,000 elements, in two records, and "b" of 700.
LayoutSpec TwoParameters() {
  LayoutSpec spec;
  spec.groups.resize(1);
  for (const char* name : {"a", "b"}) {
    ParameterSpec parameter;
    parameter.name = name;
    parameter.numel = name[0] == 'a' ? 6000 : 700;
    parameter.shape = {parameter.numel};
    spec.parameters.push_back(parameter);
  }
  return spec;
}

class StagedLoadTest : public ::testing::Test {
 protected:
  // Returns an element of the state.
  float At(v1::StateArray array, uint32_t parameter, uint64_t element) const {
    float value = -1;
    EXPECT_TRUE(
        load_.elements_.ReadFloats({array, parameter, element, 1}, &value)
            .ok());
    return value;
  }

  const Layout layout_ = *Layout::Make(TwoParameters());
  DamageableStore store_{&layout_};
  Load load_{&store_};
  const StagedLoad& staged_ = load_.staged_;
};

TEST_F(StagedLoadTest, ValuesOfTheStateAreLeftOut) {
  ASSERT_TRUE(load_.PutCount(1, 4, 4).ok());
  EXPECT_THAT(staged_.left_out(), IsEmpty()) << "numbers are not in records";
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 100}, 0).ok());
  ASSERT_TRUE(load_.Fill({kState0, 1, 0, 100}, 0).ok());
  EXPECT_TRUE(staged_.empty());
  EXPECT_EQ(staged_.bytes(), 0u);
  EXPECT_EQ(load_.memory_.calls(), 0);
  EXPECT_THAT(staged_.left_out(), ElementsAre(0, 1));
}

TEST_F(StagedLoadTest, OthersAreBesideTheState) {
  ASSERT_TRUE(load_.Fill({kMaster, 1, 10, 100}, 3).ok());
  EXPECT_FALSE(staged_.empty());
  EXPECT_EQ(staged_.bytes(), sizeof(storage::LoadLogHeader) +
                                 sizeof(storage::LoadLogEntry) +
                                 100 * sizeof(float));
  EXPECT_EQ(At(kMaster, 1, 10), 0);
  load_.Apply();
  EXPECT_EQ(At(kMaster, 1, 9), 0);
  EXPECT_EQ(At(kMaster, 1, 10), 3);
  EXPECT_EQ(At(kMaster, 1, 109), 3);
  EXPECT_EQ(At(kMaster, 1, 110), 0);
}

TEST_F(StagedLoadTest, EqualIsBitForBit) {
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 1}, -0.0f).ok());
  EXPECT_FALSE(staged_.empty());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 1}, nan).ok());
  load_.Apply();
  load_.staged_.Reset({});
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 1}, nan).ok());
  EXPECT_TRUE(staged_.empty());
}

TEST_F(StagedLoadTest, TheLastValueCountsAndTakesSpaceOnce) {
  ASSERT_TRUE(load_.Fill({kMaster, 1, 0, 200}, 1).ok());
  const uint64_t bytes = staged_.bytes();
  ASSERT_TRUE(load_.Fill({kMaster, 1, 50, 100}, 2).ok());
  ASSERT_TRUE(load_.Fill({kMaster, 1, 100, 20}, 0).ok()) << "as in the state";
  EXPECT_EQ(staged_.bytes(), bytes);
  load_.Apply();
  EXPECT_EQ(At(kMaster, 1, 49), 1);
  EXPECT_EQ(At(kMaster, 1, 50), 2);
  EXPECT_EQ(At(kMaster, 1, 99), 2);
  EXPECT_EQ(At(kMaster, 1, 100), 0);
  EXPECT_EQ(At(kMaster, 1, 120), 2);
  EXPECT_EQ(At(kMaster, 1, 150), 1);
}

TEST_F(StagedLoadTest, ARangeOverSeveralFillsWhatIsBetweenThem) {
  ASSERT_TRUE(load_.Fill({kMaster, 1, 20, 10}, 1).ok());
  ASSERT_TRUE(load_.Fill({kMaster, 1, 60, 10}, 1).ok());
  ASSERT_TRUE(load_.Fill({kMaster, 1, 25, 100}, 2).ok());
  EXPECT_THAT(load_.RecordElements(), ElementsAre(10, 30, 10, 55));
  load_.Apply();
  EXPECT_EQ(At(kMaster, 1, 24), 1);
  for (uint64_t i = 25; i < 125; ++i) EXPECT_EQ(At(kMaster, 1, i), 2) << i;
}

TEST_F(StagedLoadTest, NeighboursAreOneRecord) {
  for (uint64_t i = 0; i < 512; i += kBlock) {
    ASSERT_TRUE(load_.Fill({kMaster, 0, i, kBlock}, 1).ok());
  }
  EXPECT_THAT(load_.RecordElements(), ElementsAre(512));
  ASSERT_TRUE(load_.Fill({kState0, 0, 512, kBlock}, 1).ok());
  ASSERT_TRUE(load_.Fill({kMaster, 0, 512, kBlock}, 1).ok());
  EXPECT_THAT(load_.RecordElements(), ElementsAre(512, kBlock, kBlock))
      << "only the last record grows";
}

TEST_F(StagedLoadTest, NumbersAreRecordsToo) {
  ASSERT_TRUE(load_.PutCount(1, 9, 4).ok());
  EXPECT_EQ(staged_.first_parameter(), 1u);
  ASSERT_TRUE(load_.PutCount(0, 7, 0).ok());
  EXPECT_EQ(staged_.first_parameter(), 0u);
  ASSERT_TRUE(load_.PutCount(1, 4, 4).ok()) << "back to the state's";
  EXPECT_THAT(staged_.left_out(), IsEmpty());
  load_.Apply();
  EXPECT_THAT(store_.step_counts(), ElementsAre(7, 4));
}

TEST_F(StagedLoadTest, KnowsItsFirstParameter) {
  ASSERT_TRUE(load_.Fill({kMaster, 1, 0, 10}, 1).ok());
  EXPECT_EQ(staged_.first_parameter(), 1u);
  ASSERT_TRUE(load_.Fill({kState0, 0, 0, 10}, 1).ok());
  ASSERT_TRUE(load_.Fill({kState0, 1, 0, 10}, 1).ok());
  EXPECT_EQ(staged_.first_parameter(), 0u);
}

// The checksums are of what was written last.
TEST_F(StagedLoadTest, ASealedLogIsRead) {
  ASSERT_TRUE(load_.Fill({kMaster, 1, 0, 200}, 1).ok());
  ASSERT_TRUE(load_.Fill({kState0, 0, 0, 200}, 2).ok());
  ASSERT_TRUE(load_.Fill({kState0, 0, 200, 50}, 2).ok());
  ASSERT_TRUE(load_.Fill({kMaster, 1, 7, 1}, 5).ok());
  const storage::LoadLogSeal seal = load_.staged_.Seal();
  EXPECT_EQ(seal.bytes, staged_.bytes());
  const auto read = storage::ReadLoadLog(
      load_.memory_.bytes().first(seal.bytes), load_.header_, seal);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 2u);
  EXPECT_EQ(read->at(0).entry.numel, 200u);
  EXPECT_EQ(reinterpret_cast<const float*>(read->at(0).payload)[7], 5);
  EXPECT_EQ(read->at(1).entry.numel, 250u);
  // A seal does not end it: a record is overwritten, another one grows.
  ASSERT_TRUE(load_.Fill({kMaster, 1, 8, 1}, 6).ok());
  ASSERT_TRUE(load_.Fill({kState0, 0, 250, 50}, 2).ok());
  const storage::LoadLogSeal anew = load_.staged_.Seal();
  EXPECT_TRUE(storage::ReadLoadLog(load_.memory_.bytes().first(anew.bytes),
                                   load_.header_, anew)
                  .ok());
}

TEST_F(StagedLoadTest, ResetForgetsAll) {
  store_.Damage(0);
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 100}, 1).ok());
  ASSERT_TRUE(load_.Fill({kMaster, 1, 0, 100}, 0).ok());
  load_.staged_.Reset({});
  EXPECT_TRUE(staged_.empty());
  EXPECT_EQ(staged_.bytes(), 0u);
  EXPECT_THAT(staged_.damaged(), IsEmpty());
  EXPECT_THAT(staged_.left_out(), IsEmpty());
  EXPECT_THAT(staged_.records(), IsEmpty());
  ASSERT_TRUE(load_.Fill({kMaster, 0, 100, 50}, 1).ok());
  EXPECT_THAT(load_.RecordElements(), ElementsAre(50)) << "a load of its own";
}

TEST_F(StagedLoadTest, WithoutRoomItFailsAsGrowDoes) {
  load_.memory_.set_limit(100);
  const absl::Status full = load_.Fill({kMaster, 0, 0, 100}, 1);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_TRUE(staged_.empty());
  load_.memory_.set_limit(1000);
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 100}, 1).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(load_.Fill({kMaster, 0, 100, 200}, 1)));
  EXPECT_THAT(load_.RecordElements(), ElementsAre(100));
}

TEST_F(StagedLoadTest, ADamagedRecordHasNoValues) {
  store_.Damage(0);
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 100}, 0).ok());
  EXPECT_THAT(load_.RecordElements(), ElementsAre(100)) << "though they are 0";
  EXPECT_THAT(staged_.damaged(), ElementsAre(0));
  const uint64_t pins = store_.pins();
  ASSERT_TRUE(load_.Fill({kMaster, 0, 100, 100}, 0).ok());
  EXPECT_EQ(store_.pins(), pins) << "it is not read again";
  ASSERT_TRUE(load_.Fill({kMaster, 0, kTileElements, 100}, 0).ok());
  EXPECT_THAT(staged_.left_out(), ElementsAre(1));
}

TEST_F(StagedLoadTest, DamageBehindValuesThatWereLeftOutEndsTheLoad) {
  ASSERT_TRUE(load_.Fill({kMaster, 0, 0, 100}, 0).ok());
  store_.Damage(0);
  const absl::Status ended = load_.Fill({kMaster, 0, 100, 100}, 1);
  EXPECT_TRUE(absl::IsAborted(ended)) << ended;
  EXPECT_THAT(ended.message(), HasSubstr("load again"));
  EXPECT_THAT(ended.message(), HasSubstr("a bit is wrong"));
}

TEST_F(StagedLoadTest, OtherErrorsAreTheStores) {
  store_.Fail(1, absl::UnavailableError("no disk"));
  EXPECT_EQ(load_.Fill({kMaster, 1, 0, 100}, 1),
            absl::UnavailableError("no disk"));
  EXPECT_TRUE(staged_.empty());
  EXPECT_THAT(staged_.damaged(), IsEmpty());
}

// An entry is applied by one worker.
TEST(StagedLoadSizeTest, AnEntryHasAMebibyteAtMost) {
  LayoutSpec spec = TwoParameters();
  spec.parameters[0].numel = 300'000;
  spec.parameters[0].shape = {300'000};
  const Layout layout = *Layout::Make(std::move(spec));
  DamageableStore store(&layout);
  Load load(&store);
  const auto room = load.memory_.Grow(2 << 20);  // or each block moves the log
  ASSERT_TRUE(room.ok());
  for (uint64_t i = 0; i < 300'000; i += kBlock) {
    const ElementRange block = {kMaster, 0, i, std::min(kBlock, 300'000 - i)};
    const std::vector<float> values(block.numel, 1.0f);
    ASSERT_TRUE(load.staged_
                    .Stage(load.elements_, block,
                           reinterpret_cast<const std::byte*>(values.data()),
                           /*is_present=*/false, [&](uint64_t) { return room; })
                    .ok());
  }
  EXPECT_THAT(load.RecordElements(),
              ElementsAre((1 << 20) / sizeof(float),
                          300'000 - (1 << 20) / sizeof(float)));
}

class StagedLoadRandomTest : public ::testing::Test {
 protected:
  LayoutSpec NextSpec() {
    LayoutSpec spec = random_.Next(5);
    spec.state_format = static_cast<StateFormat>(random_.Uniform(1, 3));
    return spec;
  }
  // Calls visit(array, parameter, numel) for all arrays of elements.
  template <typename Visitor>
  static void ForEachArray(const ElementAccess& elements, const Layout& layout,
                           const Visitor& visit) {
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      for (const v1::StateArray array :
           {kMaster, kState0, v1::STATE_ARRAY_STATE_1,
            v1::STATE_ARRAY_STATE_2}) {
        const uint64_t numel =
            elements.ElementsOf(array, layout.parameters()[p]);
        if (!elements.Check({array, p, 0, numel}).ok()) continue;
        visit(array, p, numel);
      }
    }
  }
  // Returns random values of which the format loses nothing: 0, 1 or 2 in a
  // block that has a 2. Some have those of the state.
  std::vector<float> Values(uint64_t numel) {
    std::vector<float> values(numel, 0.0f);
    if (numel == 0 || random_.Uniform(0, 2) == 0) return values;
    for (float& value : values) {
      value = random_.Uniform(0, 1) == 0 ? 0.0f : 2.0f;
    }
    values[0] = 2;
    return values;
  }

  // Loads each array whole, with some blocks as they are in the state, into a
  // log of BytesMax.
  void LoadAll(const Layout& layout) {
    DamageableStore store(&layout);
    Load load(&store);
    load.memory_.set_limit(
        StagedLoad::BytesMax(load.elements_, layout, /*rank_count=*/1));
    ForEachArray(load.elements_, layout,
                 [&](v1::StateArray array, uint32_t p, uint64_t numel) {
                   for (ElementRange block = {array, p, 0, 0};
                        block.begin < numel; block.begin += block.numel) {
                     block.numel = std::min(
                         {numel - block.begin, kBlock,
                          load.elements_.RecordElementsFrom(p, block.begin)});
                     const std::vector<float> values = Values(block.numel);
                     const absl::Status put = load.Put(block, values.data());
                     ASSERT_TRUE(put.ok()) << put;
                   }
                 });
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      ASSERT_TRUE(load.PutCount(p, 1, 0).ok());
    }
  }

  RandomLayouts random_;
};

// Compares with a state to which the same was written at once.
TEST_F(StagedLoadRandomTest, AppliedItIsWhatWasLoadedLast) {
  for (int round = 0; round < 20; ++round) {
    const Layout layout = *Layout::Make(NextSpec());
    DamageableStore store(&layout);
    DamageableStore expected(&layout);
    const ElementAccess elements(&expected);
    Load load(&store);
    struct Array {
      v1::StateArray array;
      uint32_t parameter;
      uint64_t numel;
    };
    std::vector<Array> arrays;
    ForEachArray(elements, layout,
                 [&](v1::StateArray array, uint32_t p, uint64_t numel) {
                   if (numel > 0) arrays.push_back({array, p, numel});
                 });
    if (arrays.empty()) continue;
    for (int call = 0; call < 100; ++call) {
      const Array& array = arrays[random_.Uniform(0, arrays.size() - 1)];
      // Whole blocks, in one record: the shortest that all formats take.
      const uint64_t begin =
          random_.Uniform(0, (array.numel - 1) / kBlock) * kBlock;
      ElementRange range = {array.array, array.parameter, begin,
                            std::min(kBlock, array.numel - begin)};
      range.numel = std::min(range.numel, load.elements_.RecordElementsFrom(
                                              range.parameter, begin));
      const std::vector<float> values = Values(range.numel);
      const absl::Status put = load.Put(range, values.data());
      ASSERT_TRUE(put.ok()) << put;
      std::byte payload[ElementAccess::kBlockBytesMax];
      elements.MakePayload(range, values.data(), payload);
      ASSERT_TRUE(elements.Write(range, payload).ok());
    }
    load.Apply();
    for (const Array& array : arrays) {
      std::vector<float> loaded(array.numel), wanted(array.numel);
      for (uint64_t i = 0; i < array.numel; i += kBlock) {
        const ElementRange block = {array.array, array.parameter, i,
                                    std::min(kBlock, array.numel - i)};
        ASSERT_TRUE(load.elements_.ReadFloats(block, &loaded[i]).ok());
        ASSERT_TRUE(elements.ReadFloats(block, &wanted[i]).ok());
      }
      ASSERT_EQ(loaded, wanted);
    }
  }
}

TEST_F(StagedLoadRandomTest, AWholeLoadHasRoomInBytesMax) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_NO_FATAL_FAILURE(LoadAll(*Layout::Make(NextSpec())));
  }
}

// Almost all of it is headers.
TEST_F(StagedLoadRandomTest, SmallParametersHaveRoomInBytesMax) {
  LayoutSpec spec = TwoParameters();
  const ParameterSpec scalar = {.name = "s", .shape = {}, .numel = 1};
  spec.parameters.assign(500, scalar);
  for (size_t p = 0; p < spec.parameters.size(); ++p) {
    spec.parameters[p].name += std::to_string(p);
  }
  ASSERT_NO_FATAL_FAILURE(LoadAll(*Layout::Make(std::move(spec))));
}

}  // namespace
}  // namespace optstate::session
