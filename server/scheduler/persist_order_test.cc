// Looks at a job's memory at each point at which the scheduler relies on the
// order of stores: all that recovery needs by then is there, and what must come
// later is not.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/passes/gradient_stager.h"
#include "server/scheduler/passes/non_separable_updater.h"
#include "server/scheduler/passes/speculation.h"
#include "server/scheduler/passes/updater.h"
#include "server/scheduler/scheduler_test_job.h"
#include "server/scheduler/step_counts.h"
#include "storage/format/rank_mark.h"
#include "storage/persist_in_order.h"

namespace optstate::scheduler {
namespace {

using storage::PersistPoint;
using JobSetup = SchedulerTestJob::Setup;

constexpr uint64_t kStep = 5;

// Calls the check of each point that is reached while it lives, and fails when
// one was never reached, or a point that it does not know was. One thread
// reaches the points, so that the order of all stores is known.
class Checks {
 public:
  explicit Checks(std::map<PersistPoint, std::function<void()>> checks) {
    Current() = std::move(checks);
    Reached().clear();
    storage::persist_hook.store([](PersistPoint point) {
      Reached().insert(point);
      const auto check = Current().find(point);
      if (check == Current().end()) {
        ADD_FAILURE() << "unexpected point " << static_cast<int>(point);
      } else {
        check->second();
      }
    });
  }
  ~Checks() {
    storage::persist_hook.store(nullptr);
    for (const auto& [point, check] : Current()) {
      EXPECT_EQ(Reached().count(point), 1u)
          << "never reached: " << static_cast<int>(point);
    }
  }
  Checks(const Checks&) = delete;
  Checks& operator=(const Checks&) = delete;

 private:
  static std::set<PersistPoint>& Reached() {
    static auto* const reached = new std::set<PersistPoint>;
    return *reached;
  }
  static std::map<PersistPoint, std::function<void()>>& Current() {
    static auto* const current =
        new std::map<PersistPoint, std::function<void()>>;
    return *current;
  }
};

// The rooms of a job with one worker.
struct Rooms {
  explicit Rooms(JobSetup setup)
      : job([&setup] {
          setup.workers = 1;
          return setup;
        }()),
        executor(&job.pool(), job.memory().undo, nullptr),
        sums_of_squares(job.layout().run_count(), 0),
        stager(&job.plan(), &job.memory(), &executor,
               absl::MakeSpan(sums_of_squares)),
        counts(&job.plan(), &job.memory()),
        speculation(&job.plan(), &job.memory(), &job.pool()),
        updater(&job.plan(), &job.memory(), &executor, &counts, &speculation) {}

  std::vector<std::byte> MastersOf(uint64_t run) {
    std::vector<std::byte> out;
    const uint32_t p = job.plan().ParameterOfRun(run);
    job.plan().ForEachRunOf(
        p, [&](uint64_t index, uint64_t begin, uint64_t numel) {
          if (index != run) return;
          job.RecordOf(p, begin).ForEachMasterPart(
              p, begin, numel, [&](absl::Span<const std::byte> bytes) {
                out.insert(out.end(), bytes.begin(), bytes.end());
              });
        });
    return out;
  }
  std::vector<std::vector<std::byte>> Masters() {
    std::vector<std::vector<std::byte>> out;
    for (uint64_t run = 0; run < job.layout().run_count(); ++run) {
      out.push_back(MastersOf(run));
    }
    return out;
  }
  uint64_t stamp(uint64_t run) { return job.run_stamps()[run].load(); }

  SchedulerTestJob job;
  CpuUpdateExecutor executor;
  std::vector<double> sums_of_squares;
  GradientStager stager;
  StepCounts counts;
  Speculation speculation;
  Updater updater;
};

TEST(PersistOrderTest, Staging) {
  Rooms rooms({.accumulation = AccumulateDType::kFloat32});
  SchedulerTestJob& job = rooms.job;
  const uint64_t mark = storage::StagedMark(/*epoch=*/3, /*micro_step=*/0);
  uint64_t run = 0;
  const Checks checks(
      {{PersistPoint::kStagedMark, [&] {
          // Runs are staged in order.
          const uint32_t p = job.plan().ParameterOfRun(run);
          const Piece& piece = job.partitions()[0].pieces[p];
          job.plan().ForEachRunOf(
              p, [&](uint64_t index, uint64_t begin, uint64_t numel) {
                if (index != run) return;
                const DType dtype = job.layout().parameters()[p].gradient_dtype;
                std::vector<float> gradient(numel);
                kernels::CastToFloat(dtype,
                                     job.gradient_areas()[0] +
                                         piece.gradient_offset_bytes +
                                         begin * SizeInBytes(dtype),
                                     gradient.data(), numel);
                EXPECT_EQ(std::memcmp(job.store().sums(p, begin),
                                      gradient.data(), numel * sizeof(float)),
                          0);
              });
          EXPECT_NE(job.staged_marks()[run].load(), mark);
          ++run;
        }}});
  rooms.stager.Stage(job.StagingOf(0, mark));
  EXPECT_EQ(run, job.layout().run_count());
}

TEST(PersistOrderTest, Counting) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kNadam}) {
    Rooms rooms({.optimizer = kind});
    SchedulerTestJob& job = rooms.job;
    for (size_t p = 0; p < job.step_counts().size(); ++p) {
      job.step_counts()[p] = static_cast<int64_t>(100 + p);
      if (!job.store().scalars().empty()) {
        job.store().scalars()[p] = 0.5 + static_cast<double>(p);
      }
    }
    storage::ControlFile& control = job.control();
    uint64_t p = 0;
    const auto check_kept = [&] {
      const auto count = static_cast<int64_t>(100 + p);
      EXPECT_EQ(control.count_before[p % 2], count);
      EXPECT_EQ(job.step_counts()[p], count);
      if (!job.store().scalars().empty()) {
        const double scalar = 0.5 + static_cast<double>(p);
        EXPECT_EQ(control.scalar_before[p % 2], scalar);
        EXPECT_EQ(job.store().scalars()[p], scalar);
      }
    };
    const auto check_counted = [&](uint64_t end) {
      for (uint64_t i = 0; i < end; ++i) {
        EXPECT_EQ(job.step_counts()[i], static_cast<int64_t>(101 + i));
        if (!job.store().scalars().empty()) {
          EXPECT_NE(job.store().scalars()[i], 0.5 + static_cast<double>(i));
        }
      }
    };
    const Checks checks({{PersistPoint::kCountsBegun,
                          [&] {
                            check_kept();
                            check_counted(p);
                            EXPECT_EQ(control.counts_begun.load(), p);
                          }},
                         {PersistPoint::kStepCount,
                          [&] {
                            check_kept();
                            EXPECT_EQ(control.counts_begun.load(), ++p);
                          }},
                         {PersistPoint::kAllStepCounts,
                          [&] { check_counted(job.step_counts().size()); }}});
    rooms.counts.Count(job.UpdateOf(kStep));
    EXPECT_EQ(p, job.step_counts().size());
  }
}

// The file `speculation`: entries by run, then masters of 4 bytes an element.
class SpeculationFile {
 public:
  explicit SpeculationFile(const SchedulerTestJob& job) : job_(job) {}
  uint64_t entry(uint64_t run) const {
    uint64_t entry;
    std::memcpy(&entry, job_.memory().speculation.data() + run * sizeof(entry),
                sizeof(entry));
    return entry;
  }
  bool HasMasters(uint64_t run, const std::vector<std::byte>& masters) const {
    const uint32_t p = job_.plan().ParameterOfRun(run);
    uint64_t flat = 0;
    job_.plan().ForEachRunOf(
        p, [&](uint64_t index, uint64_t begin, uint64_t /*numel*/) {
          if (index == run) flat = job_.layout().flat_offset(p) + begin;
        });
    const uint64_t entries = (job_.layout().run_count() * 8 + 63) / 64 * 64;
    return std::memcmp(job_.memory().speculation.data() + entries + flat * 4,
                       masters.data(), masters.size()) == 0;
  }

 private:
  const SchedulerTestJob& job_;
};

TEST(PersistOrderTest, Speculating) {
  Rooms rooms({});
  SchedulerTestJob& job = rooms.job;
  const uint64_t runs = job.layout().run_count();
  const auto before = rooms.Masters();
  const SpeculationFile file(job);
  StepUpdate update = job.UpdateOf(kStep);
  update.speculative = true;
  uint64_t run = 0;
  {
    const Checks checks({{PersistPoint::kStepSpeculated,
                          [&] {
                            EXPECT_EQ(job.control().step_speculated.load(),
                                      kStep);
                            EXPECT_EQ(rooms.Masters(), before);
                          }},
                         {PersistPoint::kKeptEntry,
                          [&] {
                            EXPECT_TRUE(file.HasMasters(run, before[run]));
                            EXPECT_NE(file.entry(run), kStep);
                            EXPECT_EQ(rooms.MastersOf(run), before[run]);
                          }},
                         {PersistPoint::kKeptEntryStored, [&] {
                            EXPECT_EQ(file.entry(run), kStep);
                            EXPECT_NE(rooms.stamp(run), kStep);
                            EXPECT_EQ(rooms.MastersOf(run), before[run]);
                            ++run;
                          }}});
    rooms.speculation.Begin(kStep);
    ASSERT_TRUE(rooms.updater.MakePass(update).ok());
    EXPECT_EQ(run, runs);
  }
  EXPECT_NE(rooms.Masters(), before);

  run = 0;
  const Checks checks({{PersistPoint::kRolledBackStamp,
                        [&] {
                          EXPECT_EQ(rooms.MastersOf(run), before[run]);
                          EXPECT_EQ(rooms.stamp(run), kStep);
                          EXPECT_EQ(file.entry(run), kStep);
                        }},
                       {PersistPoint::kKeptEntryCleared,
                        [&] {
                          EXPECT_EQ(rooms.stamp(run), 0u);
                          EXPECT_EQ(file.entry(run), kStep);
                          ++run;
                        }},
                       {PersistPoint::kSpeculationOver, [&] {
                          for (uint64_t i = 0; i < runs; ++i) {
                            EXPECT_NE(file.entry(i), kStep);
                          }
                          EXPECT_EQ(job.control().step_speculated.load(),
                                    kStep);
                        }}});
  ASSERT_TRUE(rooms.speculation.RollBack(kStep).ok());
  EXPECT_EQ(run, runs);
  EXPECT_EQ(job.control().step_speculated.load(), 0u);
}

TEST(PersistOrderTest, PuttingInPlace) {
  Rooms rooms({.optimizer = OptimizerKind::kLamb});
  SchedulerTestJob& job = rooms.job;
  NonSeparableUpdater updater(&job.plan(), &job.memory(), &job.pool(),
                              &rooms.executor, &rooms.counts, nullptr);
  ASSERT_TRUE(updater.Init().ok());
  const auto kind = [&] {
    return static_cast<UndoKind>(job.undo(0).kind.load());
  };
  int replaced = 0;
  const Checks checks(
      {{PersistPoint::kReplacedStamps,
        [&] {
          EXPECT_EQ(kind(), UndoKind::kReplace);
          const uint64_t run = job.undo(0).run;
          EXPECT_NE(rooms.stamp(run), kStep);
          const uint32_t p = job.plan().ParameterOfRun(run);
          const uint64_t numel = job.plan().numel(p);
          const auto* const new_master =
              reinterpret_cast<const float*>(job.memory().redo.data());
          // Masters and the arrays behind them are there to the last element.
          const storage::RecordView record = job.RecordOf(p, 0);
          EXPECT_EQ(std::memcmp(record.master(p, 0), new_master, numel * 4), 0);
          const uint64_t aligned = (numel * 4 + 63) / 64 * 64;
          for (int k = 0; k < 2; ++k) {
            EXPECT_EQ(std::memcmp(record.state(k, p, 0),
                                  job.memory().redo.data() +
                                      static_cast<uint64_t>(k + 1) * aligned,
                                  numel * 4),
                      0);
          }
        }},
       {PersistPoint::kReplacedSlot, [&] {
          EXPECT_EQ(kind(), UndoKind::kReplace);
          const uint32_t p = job.plan().ParameterOfRun(job.undo(0).run);
          job.plan().ForEachRunOf(p, [&](uint64_t run, uint64_t, uint64_t) {
            EXPECT_EQ(rooms.stamp(run), kStep);
          });
          ++replaced;
        }}});
  ASSERT_TRUE(updater.MakePass(job.UpdateOf(kStep)).ok());
  EXPECT_EQ(replaced, 5);  // those with elements
  EXPECT_EQ(kind(), UndoKind::kNone);
}

}  // namespace
}  // namespace optstate::scheduler
