#include "storage/record_keeper.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/testing/kept_job.h"

namespace optstate::storage {
namespace {

constexpr uint64_t kEpoch = 7;

Layout LayoutOf(RandomLayouts* layouts, const JobKind& kind,
                uint32_t parameters_max) {
  LayoutSpec spec = layouts->Next(parameters_max);
  spec.optimizer = kind.optimizer;
  spec.state_format = kind.state_format;
  spec.master_format = kind.master_format;
  const size_t options = InfoOf(kind.optimizer).options.size();
  for (GroupSpec& group : spec.groups) {
    group.options = static_cast<uint32_t>(
        layouts->Uniform(0, (uint64_t{1} << options) - 1));
  }
  for (ParameterSpec& parameter : spec.parameters) {
    if (kind.master_format == MasterFormat::kSplit &&
        parameter.dtype == DType::kFloat16) {
      parameter.dtype = DType::kBFloat16;
    }
  }
  const auto layout = Layout::Make(std::move(spec));
  if (!layout.ok()) ADD_FAILURE() << layout.status();
  return *layout;
}

class RecordKeeperTest : public ::testing::Test {
 protected:
  RecordKeeperTest() : random_(layouts_.Uniform(0, UINT64_MAX)) {}

  RandomLayouts layouts_;
  std::mt19937_64 random_;
};

// Against a model: what each run was when the epoch began, and whether it has
// been overwritten since.
TEST_F(RecordKeeperTest, AnyOrderOfCallsKeepsWhatTheEpochBeganWith) {
  for (const JobKind& kind : AllJobKinds()) {
    KeptJob job(LayoutOf(&layouts_, kind, 6),
                layouts_.Uniform(1, 4 * kTileElements));
    if (job.runs().empty()) continue;
    job.OverwriteAll(&random_);
    auto keeper = job.MakeKeeper();
    for (uint64_t round = 0; round < 4; ++round) {
      // Numbers of epochs come back, as after a load of an older checkpoint.
      const uint64_t epoch = 1 + round % 3;
      keeper->Begin(epoch);
      std::vector<std::vector<std::byte>> before;
      before.reserve(job.runs().size());
      for (const RunRange& run : job.runs())
        before.push_back(job.ValuesOf(run));
      const std::vector<std::byte> state(job.memory().state().begin(),
                                         job.memory().state().end());
      std::set<size_t> kept, released;
      for (int i = 0; i < 40; ++i) {
        const size_t index = layouts_.Uniform(0, job.runs().size() - 1);
        const RunRange& run = job.runs()[index];
        const RecordView record = job.RecordOf(run);
        switch (layouts_.Uniform(0, 9)) {
          case 0:  // the engine dies, and another goes on
            keeper = job.MakeKeeper();
            break;
          case 1:
            if (round % 2 == 0) break;  // these rounds end in a roll back
            keeper->Release(run.run, epoch);
            kept.erase(index);
            released.insert(index);
            break;
          case 2:
          case 3:
          case 4:
            if (released.count(index) != 0) break;
            EXPECT_EQ(KeptJob::Read(*keeper, record, epoch, run),
                      before[index]);
            break;
          default: {
            const bool is_first =
                kept.count(index) == 0 && released.count(index) == 0;
            EXPECT_EQ(keeper->BeforeWrite(record, epoch, run.parameter,
                                          run.begin, run.numel),
                      is_first ? 1u : 0u);
            if (is_first) kept.insert(index);
            job.Overwrite(run, &random_);
          }
        }
        EXPECT_EQ(keeper->IsKept(run.run, epoch), kept.count(index) != 0);
      }
      if (round % 2 != 0) continue;
      job.RollBack(keeper.get(), epoch,
                   [&](const RunRange& run) { job.FollowMasters(run); });
      EXPECT_TRUE(
          std::equal(state.begin(), state.end(), job.memory().state().begin()))
          << InfoOf(kind.optimizer).name;
      for (const RunRange& run : job.runs()) {
        EXPECT_FALSE(keeper->IsKept(run.run, epoch));
      }
    }
  }
}

// A range of several runs is kept as its runs are, for a whole sub-group.
TEST_F(RecordKeeperTest, ARangeIsItsRuns) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {
      {.name = "a", .shape = {3 * kTileElements}, .numel = 3 * kTileElements}};
  KeptJob job(*Layout::Make(spec), 4 * kTileElements);
  const auto keeper = job.MakeKeeper();
  keeper->Begin(kEpoch);
  const RecordView record = job.RecordOf(job.runs()[0]);
  EXPECT_EQ(
      keeper->BeforeWrite(record, kEpoch, 0, kTileElements, kTileElements), 1u);
  EXPECT_EQ(keeper->BeforeWrite(record, kEpoch, 0, 0, 3 * kTileElements), 2u);
  EXPECT_EQ(keeper->BeforeWrite(record, kEpoch, 0, 0, 3 * kTileElements), 0u);
}

// The bytes are those of the file "speculation" in FORMAT.md.
TEST_F(RecordKeeperTest, TheBytesAreWhereTheFormatSays) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.state_format = StateFormat::kDynamic8;
  spec.master_format = MasterFormat::kSplit;
  spec.parameters = {
      {.name = "a", .shape = {5000}, .numel = 5000, .dtype = DType::kBFloat16}};
  KeptJob job(*Layout::Make(spec), 0);
  job.OverwriteAll(&random_);
  const uint64_t flat = job.layout().flat_elements();
  const absl::Span<const std::byte> kept = job.memory().kept();
  ASSERT_EQ(kept.size(), 64 + flat * 4 + 2 * (flat + flat / 256 * 4));
  const auto keeper = job.MakeKeeper();
  const RunRange run = job.runs()[1];
  const RecordView record = job.RecordOf(run);
  keeper->BeforeWrite(record, kEpoch, 0, run.begin, run.numel);
  uint64_t entries[2];
  std::memcpy(entries, kept.data(), sizeof(entries));
  EXPECT_EQ(entries[0], 0u);
  EXPECT_EQ(entries[1], kEpoch);
  const auto is_at = [&](uint64_t at, const std::byte* bytes, uint64_t count) {
    return std::equal(bytes, bytes + count, kept.data() + at);
  };
  uint64_t at = 64 + run.begin * 4;
  EXPECT_TRUE(is_at(at, record.master(0, run.begin), run.numel * 2));
  at += run.numel * 2;
  EXPECT_TRUE(is_at(at, record.parameter(0, run.begin), run.numel * 2));
  at = 64 + flat * 4;
  EXPECT_TRUE(is_at(at + run.begin, record.state(0, 0, run.begin), run.numel));
  at += flat;
  EXPECT_TRUE(
      is_at(at + run.begin / 256 * 4,
            reinterpret_cast<const std::byte*>(record.scale(0, 0, run.begin)),
            (run.numel + 255) / 256 * 4));
  at += flat / 256 * 4;
  EXPECT_TRUE(is_at(at + run.begin, record.state(1, 0, run.begin), run.numel));
}

// A reader walks all runs as they were, while steps overwrite them.
TEST_F(RecordKeeperTest, AReaderSeesTheEpochWhileStepsGoOn) {
  for (const StateFormat format :
       {StateFormat::kFloat32, StateFormat::kDynamic8}) {
    KeptJob job(
        LayoutOf(&layouts_,
                 {OptimizerKind::kAdamW, format, MasterFormat::kSplit}, 8),
        2 * kTileElements);
    job.OverwriteAll(&random_);
    const auto keeper = job.MakeKeeper();
    for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
      keeper->Begin(epoch);
      std::vector<std::vector<std::byte>> before, read(job.runs().size());
      before.reserve(job.runs().size());
      for (const RunRange& run : job.runs())
        before.push_back(job.ValuesOf(run));
      std::vector<std::thread> threads;
      constexpr size_t kWriters = 3;
      for (size_t writer = 0; writer < kWriters; ++writer) {
        threads.emplace_back([&, writer, seed = random_()] {
          std::mt19937_64 random(seed);
          for (int step = 0; step < 3; ++step) {
            for (size_t i = writer; i < job.runs().size(); i += kWriters) {
              const RunRange& run = job.runs()[i];
              keeper->BeforeWrite(job.RecordOf(run), epoch, run.parameter,
                                  run.begin, run.numel);
              job.Overwrite(run, &random);
            }
          }
        });
      }
      uint64_t releases = 0;
      for (size_t i = 0; i < job.runs().size(); ++i) {
        const RunRange& run = job.runs()[i];
        read[i] = KeptJob::Read(*keeper, job.RecordOf(run), epoch, run);
        keeper->Release(run.run, epoch);
        ++releases;
      }
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(releases, job.runs().size());
      EXPECT_EQ(read, before);
    }
  }
}

// Writes that meet at one run keep it once: what is kept is never what another
// thread has written.
TEST_F(RecordKeeperTest, ThreadsThatMeetKeepARunOnce) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {{.name = "a", .shape = {4000}, .numel = 4000}};
  KeptJob job(*Layout::Make(spec), 0);
  job.OverwriteAll(&random_);
  const auto keeper = job.MakeKeeper();
  const RunRange run = job.runs()[0];
  for (uint64_t epoch = 1; epoch <= 200; ++epoch) {
    keeper->Begin(epoch);
    std::atomic<uint64_t> kept = 0;
    std::array<std::thread, 3> threads;
    for (std::thread& thread : threads) {
      thread = std::thread([&] {
        kept += keeper->BeforeWrite(job.RecordOf(run), epoch, 0, 0, run.numel);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(kept, 1u);
    EXPECT_EQ(KeptJob::Read(*keeper, job.RecordOf(run), epoch, run),
              job.ValuesOf(run));
    job.Overwrite(run, &random_);
  }
}

// Entries hold anything where values were kept before the layout has grown.
TEST_F(RecordKeeperTest, EntriesMayHoldAnythingBeforeTheyAreForgotten) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {{.name = "a", .shape = {9000}, .numel = 9000}};
  KeptJob job(*Layout::Make(spec), 0);
  job.OverwriteAll(&random_);
  const auto keeper = job.MakeKeeper();
  for (const RunRange& run : job.runs()) {
    keeper->BeforeWrite(job.RecordOf(run), kEpoch, 0, run.begin, run.numel);
  }
  keeper->Release(job.runs()[0].run, kEpoch);
  keeper->ForgetAll();
  for (const RunRange& run : job.runs()) {
    EXPECT_FALSE(keeper->IsKept(run.run, kEpoch));
    EXPECT_EQ(
        keeper->BeforeWrite(job.RecordOf(run), kEpoch, 0, run.begin, run.numel),
        1u);
  }
}

}  // namespace
}  // namespace optstate::storage
