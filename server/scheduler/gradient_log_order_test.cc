// Tests the gradient log after the death of a process at any store: the next
// engine finds in it what records lack, and nothing else.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/passes/log_replay.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/tile_view.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/persist_in_order.h"
#include "storage/testing/store_moments.h"
#include "storage/tiers/host_store.h"

namespace optstate::scheduler {
namespace {

using storage::PersistPoint;
using storage::StoreMoment;

// Each parameter is one run: two of them are their own masters.
constexpr uint64_t kRuns = 3;
constexpr std::array<int64_t, kRuns> kNumels = {21, 30, 5};
constexpr std::array<DType, kRuns> kDTypes = {DType::kFloat32, DType::kBFloat16,
                                              DType::kFloat32};
constexpr uint64_t kLoads = 3;     // the first values count as one
constexpr uint64_t kStepsMax = 6;  // between two of them

// A point of the test itself: others keep the stores before and behind it in
// order.
void Mark() { storage::PersistInOrder(PersistPoint::kCount); }

Layout MakeLayout() {
  LayoutSpec spec;
  spec.groups.resize(1);
  for (size_t run = 0; run < kRuns; ++run) {
    ParameterSpec parameter;
    parameter.name = std::string(1, static_cast<char>('a' + run));
    parameter.shape = {kNumels[run]};
    parameter.numel = kNumels[run];
    parameter.dtype = parameter.gradient_dtype = kDTypes[run];
    spec.parameters.push_back(std::move(parameter));
  }
  return *Layout::Make(std::move(spec));
}

// A job in small: the files of it that count here are one block of memory.
class SmallJob {
 public:
  explicit SmallJob(uint64_t seed)
      : seed_(seed),
        layout_(MakeLayout()),
        plan_(*StepPlan::Make(&layout_, {}, kTileElements)),
        pool_(/*participants=*/1, /*spin=*/false) {
    for (uint64_t run = 0; run < kRuns; ++run) {
      ++room_.tiles;
      room_.step_bytes += GradientLog::EntryBytes(BytesOf(run).gradient);
      room_.parameter_bytes += GradientLog::EntryBytes(BytesOf(run).parameter);
    }
    Place();
    FindWanted();
  }

  absl::Span<std::byte> all() {
    return {reinterpret_cast<std::byte*>(lines_.data()),
            lines_.size() * sizeof(Line)};
  }
  // The bytes before this are words, which are stored whole.
  uint64_t words_end() const { return state_at_; }

  // Says whether the stores behind a moment are a kernel's, whose undo has the
  // fences that they need (worker_undo_test).
  static bool IsInKernel(const StoreMoment& moment) {
    uint64_t value;
    std::memcpy(&value, &moment.memory[kInKernelAt], sizeof(value));
    return value != 0;
  }

  // Says whether an engine that opens the job finds each record of the step of
  // its run's stamp, puts in place what is to be loaded, and takes what is left
  // of the step in progress.
  bool Recovers() {
    if (may_lag() != 0 && log().is_empty()) return false;
    if (!EntriesAreWhole() || !ReplayAll()) return false;
    FinishLoad();
    for (uint64_t run = 0; run < kRuns; ++run) {
      if (stamp(run) == step()) continue;
      if (stamp(run) + 1 != step()) return false;
      TakeByCpu(run);
    }
    const std::vector<std::byte>& wanted = wanted_[loads()][step()];
    return std::equal(wanted.begin(), wanted.end(), all().begin() + state_at_);
  }

  // Plays engines that have all records stay on a device, until the log has
  // been used in all ways.
  void Live() {
    Share();
    for (uint64_t step = 1; step <= 6; ++step) TakeStep(step);
    Load();
    for (uint64_t step = 1; step <= 3; ++step) TakeStep(step);
    DieInStep(4);
    Share();
    TakeStep(5);
    TakeStep(6);
    DieBehindLoad();
    Share();
    TakeStep(1);
    for (uint64_t run = 0; run < kRuns; ++run) Settle(run);
    Share();
    TakeStep(2);
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  void Place() {
    uint64_t bytes = 64;  // the words below
    const auto add = [&bytes](uint64_t more) {
      const uint64_t at = bytes;
      bytes += (more + 63) / 64 * 64;
      return at;
    };
    stamps_at_ = add(kRuns * sizeof(uint64_t));
    undo_at_ = add(sizeof(WorkerUndo));
    log_at_ = add(GradientLog::BytesNeeded(room_));
    state_at_ = add(layout_.parameter_area_bytes());
    const uint64_t master_at = add(layout_.flat_elements() * sizeof(float));
    std::array<uint64_t, 2> states_at;
    for (uint64_t& at : states_at) {
      at = add(layout_.flat_elements() * sizeof(float));
    }
    lines_.resize(bytes / sizeof(Line));
    storage::StateArrays arrays;
    arrays.parameters = &all()[state_at_];
    arrays.master = &all()[master_at];
    for (size_t k = 0; k < states_at.size(); ++k) {
      arrays.state[k] = &all()[states_at[k]];
    }
    store_.emplace(&layout_, kTileElements, arrays);
    memory_.store = &*store_;
    memory_.recovery.run_stamps =
        reinterpret_cast<std::atomic<uint64_t>*>(&Word(stamps_at_));
    memory_.undo = absl::MakeSpan(&undo(), 1);
  }
  // Takes all steps by the CPU, and leaves the first values.
  void FindWanted() {
    for (uint64_t load = kLoads; load-- > 0;) {
      loads() = load;
      std::mt19937_64 random(seed_ + load);
      for (uint64_t run = 0; run < kRuns; ++run) Fill(run, &random);
      for (step() = 0;; ++step()) {
        wanted_[load][step()].assign(all().begin() + state_at_, all().end());
        if (step() == kStepsMax) break;
        for (uint64_t run = 0; run < kRuns; ++run) {
          stamp(run) = step();
          Apply(run, step() + 1);
        }
      }
    }
    const std::vector<std::byte>& first = wanted_[0][0];
    std::copy(first.begin(), first.end(), all().begin() + state_at_);
    std::fill_n(all().begin(), state_at_, std::byte{0});
  }

  uint64_t& Word(uint64_t at) {
    return *reinterpret_cast<uint64_t*>(&all()[at]);
  }
  // The control file says that records may lag.
  uint64_t& may_lag() { return Word(0); }
  // The load that has all of its data, and how many are in place.
  uint64_t& sealed() { return Word(8); }
  uint64_t& loads() { return Word(16); }
  uint64_t& step() { return Word(24); }
  static constexpr uint64_t kInKernelAt = 32;
  uint64_t& in_kernel() { return Word(kInKernelAt); }
  uint64_t& stamp(uint64_t run) {
    return Word(stamps_at_ + run * sizeof(uint64_t));
  }
  WorkerUndo& undo() {
    return *reinterpret_cast<WorkerUndo*>(&all()[undo_at_]);
  }
  GradientLog log() {
    return GradientLog(all().subspan(log_at_, GradientLog::BytesNeeded(room_)));
  }

  const StepPlan::Kernel& KernelOf(uint64_t run) const {
    return plan_->kernel(static_cast<uint32_t>(run));
  }
  static bool IsOwnMaster(uint64_t run) {
    return kDTypes[run] == DType::kFloat32;
  }
  static GradientLog::TileBytes BytesOf(uint64_t run) {
    const uint64_t bytes =
        static_cast<uint64_t>(kNumels[run]) * SizeInBytes(kDTypes[run]);
    return {.gradient = bytes, .parameter = IsOwnMaster(run) ? bytes : 0};
  }
  kernels::TileView ViewOf(uint64_t run) const {
    const auto p = static_cast<uint32_t>(run);
    return TileViewOf(layout_,
                      store_->record(store_->sub_groups().IndexOf(p, 0)), p, 0,
                      static_cast<uint64_t>(kNumels[run]));
  }
  void Fill(uint64_t run, std::mt19937_64* random) const {
    std::normal_distribution<float> normal;
    const kernels::TileView view = ViewOf(run);
    for (void* const array :
         {static_cast<void*>(view.master), static_cast<void*>(view.state[0]),
          static_cast<void*>(view.state[1])}) {
      auto* const floats = static_cast<float*>(array);
      for (uint64_t i = 0; i < view.numel; ++i) {
        floats[i] = normal(*random);
        if (array == view.state[1]) floats[i] *= floats[i];
      }
    }
    kernels::CastFromFloat(kDTypes[run], static_cast<const float*>(view.master),
                           view.parameter, view.numel);
  }
  std::vector<std::byte> Gradient(uint64_t run, uint64_t step) {
    std::mt19937_64 random(seed_ + 1000 * (loads() + 1) + 10 * run + step);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(kNumels[run]));
    for (float& value : values) value = normal(random);
    std::vector<std::byte> gradient(BytesOf(run).gradient);
    kernels::CastFromFloat(kDTypes[run], values.data(), gradient.data(),
                           values.size());
    return gradient;
  }
  kernels::UpdateFactors FactorsOf(uint64_t run, uint64_t step) const {
    kernels::UpdateInput input;
    input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
    input.step_count = static_cast<int64_t>(step);
    input.step = step;
    return KernelOf(run).functions->prepare(input);
  }
  void Apply(uint64_t run, uint64_t step) {
    const std::vector<std::byte> gradient = Gradient(run, step);
    const void* const address = gradient.data();
    kernels::TileView view = ViewOf(run);
    view.gradients = absl::MakeConstSpan(&address, 1);
    KernelOf(run).functions->apply(FactorsOf(run, step), view);
  }
  void TakeByCpu(uint64_t run) {
    Apply(run, step());
    stamp(run) = step();
  }
  // Writes bytes of a run as they are to be then.
  void Write(void* to, uint64_t bytes, uint64_t load, uint64_t step) {
    const auto at = static_cast<size_t>(static_cast<std::byte*>(to) -
                                        (all().data() + state_at_));
    std::memcpy(to, &wanted_[load][step][at], bytes);
  }

  // Says whether entries that are later than their records are those steps'.
  bool EntriesAreWhole() {
    const GradientLog log = this->log();
    std::array<GradientLog::TileBytes, kRuns> bytes;
    for (uint64_t run = 0; run < kRuns; ++run) bytes[run] = BytesOf(run);
    if (!log.Check(kRuns, bytes).ok()) return false;
    for (uint64_t tile = 0; tile < log.tiles(); ++tile) {
      if (!log.is_resident(tile)) continue;
      const uint64_t run = log.run(tile);
      for (uint64_t k = 0; k < GradientLog::kSteps; ++k) {
        const GradientLog::Entry& entry = log.EntryFor(tile, k);
        const uint64_t step = entry.step.load();
        if (step <= log.applied(tile).load()) continue;
        const kernels::UpdateFactors factors = FactorsOf(run, step);
        const std::vector<std::byte> gradient = Gradient(run, step);
        if (std::memcmp(&entry.factors, &factors, sizeof(factors)) != 0 ||
            std::memcmp(entry.gradient(), gradient.data(), gradient.size()) !=
                0) {
          return false;
        }
      }
    }
    return true;
  }
  bool ReplayAll() {
    GradientLog log = this->log();
    return ReplayLog(*plan_, memory_, &log, &pool_).ok();
  }
  // Stamps begin anew with a load.
  void PutLoaded(uint64_t run) {
    const kernels::TileView view = ViewOf(run);
    Write(view.parameter, BytesOf(run).gradient, sealed(), 0);
    for (void* const array :
         {static_cast<void*>(view.master), static_cast<void*>(view.state[0]),
          static_cast<void*>(view.state[1])}) {
      Write(array, view.numel * sizeof(float), sealed(), 0);
    }
    stamp(run) = 0;
  }
  void RecordLoad() {
    Mark();
    step() = 0;
    Mark();
    loads() = sealed();
    Mark();
  }
  void FinishLoad() {
    if (sealed() == loads()) return;
    for (uint64_t run = 0; run < kRuns; ++run) PutLoaded(run);
    RecordLoad();
  }

  // Begins to have the records stay on a device. Run and tile have the same
  // number.
  void Share() {
    if (!log().is_empty()) log().Begin({});
    log().Begin(room_);
    may_lag() = 1;
    for (uint64_t run = 0; run < kRuns; ++run) {
      ASSERT_TRUE(log().AddTile(run, BytesOf(run)));
    }
  }
  void CatchUp(uint64_t run) {
    in_kernel() = 1;
    Mark();
    ASSERT_EQ(Replay(log(), run, stamp(run), *KernelOf(run).functions,
                     ViewOf(run), &undo()),
              stamp(run));
    in_kernel() = 0;
    Mark();
  }
  void Settle(uint64_t run) {
    CatchUp(run);
    log().MarkSettled(run);
  }
  void BeginStep(uint64_t next) {
    Mark();
    step() = next;
    Mark();
  }
  // Logs the step in progress, as ResidentRecords::Prepare().
  void Prepare(uint64_t run) {
    if (!log().is_resident(run)) {
      log().MarkResident(run, stamp(run), ViewOf(run).parameter, BytesOf(run));
    } else if ((step() + run) % GradientLog::kSteps == 0) {
      CatchUp(run);
    }
    log().Write(run, step(), FactorsOf(run, step()), [&](std::byte* to) {
      std::memcpy(to, Gradient(run, step()).data(), BytesOf(run).gradient);
    });
  }
  void TakeStep(uint64_t next) {
    BeginStep(next);
    for (uint64_t run = 0; run < kRuns; ++run) {
      Prepare(run);
      Write(ViewOf(run).parameter, BytesOf(run).gradient, loads(), next);
      // A parameter that is its own master comes from the log if need be. The
      // engine stores the stamp of another one behind it, to release it.
      if (!IsOwnMaster(run)) Mark();
      stamp(run) = next;
    }
  }
  void Load() {
    sealed() = loads() + 1;
    Mark();
    for (uint64_t run = 0; run < kRuns; ++run) {
      Settle(run);
      PutLoaded(run);
    }
    RecordLoad();
  }
  // The engine dies while it writes the first parameter, and the next one takes
  // the step. Records are up to date before, so that only the log's own stores
  // are watched.
  void DieInStep(uint64_t next) {
    for (uint64_t run = 0; run < kRuns; ++run) CatchUp(run);
    BeginStep(next);
    Prepare(0);
    Write(ViewOf(0).parameter, BytesOf(0).gradient / 2, loads(), next);
    Mark();
    ASSERT_TRUE(ReplayAll());
    may_lag() = 0;
    in_kernel() = 1;
    Mark();
    for (uint64_t run = 0; run < kRuns; ++run) TakeByCpu(run);
    in_kernel() = 0;
    Mark();
  }
  // It dies once a load is sealed, which the next one puts in place.
  void DieBehindLoad() {
    for (uint64_t run = 0; run < kRuns; ++run) CatchUp(run);
    sealed() = loads() + 1;
    Mark();
    ASSERT_TRUE(ReplayAll());
    may_lag() = 0;
    FinishLoad();
  }

  const uint64_t seed_;
  const Layout layout_;
  const std::unique_ptr<StepPlan> plan_;
  WorkerPool pool_;
  GradientLog::Room room_;
  uint64_t stamps_at_, undo_at_, log_at_, state_at_;
  std::vector<Line> lines_;
  std::optional<storage::HostStore> store_;
  StepMemory memory_;
  // By load and step: the bytes from state_at_ on.
  std::array<std::array<std::vector<std::byte>, kStepsMax + 1>, kLoads> wanted_;
};

const std::set<PersistPoint> kPoints = {
    PersistPoint::kLogBegunStored, PersistPoint::kLogTile,
    PersistPoint::kLogResident,    PersistPoint::kLogEntry,
    PersistPoint::kLogEntryStored, PersistPoint::kLogSettledStored,
    PersistPoint::kLogCleared,     PersistPoint::kLogClearedStored};

class GradientLogOrderTest : public ::testing::Test {
 protected:
  GradientLogOrderTest()
      : random_(kernels::TestSeed()), job_(random_()), moments_(Watch()) {}

  std::vector<StoreMoment> Watch() {
    return storage::WatchStores(job_.all(), [this] { job_.Live(); });
  }
  bool Recovers() { return job_.Recovers(); }

  std::mt19937_64 random_;
  SmallJob job_;
  const std::vector<StoreMoment> moments_;
};

TEST_F(GradientLogOrderTest, AnyStoreMayBeTheLast) {
  std::set<PersistPoint> reached;
  for (size_t i = 0; i + 1 < moments_.size(); ++i) {
    const PersistPoint point = moments_[i].point;
    if (point != PersistPoint::kCount) reached.insert(point);
    if (SmallJob::IsInKernel(moments_[i])) continue;
    EXPECT_TRUE(storage::AllMixturesRecover(
        moments_[i], moments_[i + 1], job_.words_end(), &random_, job_.all(),
        [this] { return Recovers(); }))
        << "behind moment " << i << ", point " << static_cast<int>(point);
  }
  EXPECT_EQ(reached, kPoints);
}

// Without any one of the points, some order of stores is not recovered: so the
// test above would notice that it is missing.
TEST_F(GradientLogOrderTest, EachPointIsNeeded) {
  std::set<PersistPoint> needed;
  // A few orders alone might not show it.
  for (int round = 0; round < 20 && needed != kPoints; ++round) {
    needed.merge(storage::NeededPoints(moments_, job_.words_end(), &random_,
                                       job_.all(),
                                       [this] { return Recovers(); }));
  }
  EXPECT_EQ(needed, kPoints);
}

}  // namespace
}  // namespace optstate::scheduler
