#ifndef OPTSTATE_SERVER_SESSION_TESTING_REARRANGE_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_REARRANGE_FIXTURE_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {

using Weights = std::vector<uint32_t>;

inline constexpr uint64_t kSeed = 17;
inline constexpr uint64_t kSubGroup = 8192;
inline constexpr uint32_t kDisks = 3;

// A kind of job whose records are on disk.
struct Kind {
  const char* name;
  v1::Placement placement;
  v1::DurabilityKind durability;
  DType dtype = DType::kFloat32;
  bool parameters_on_disk = false;

  bool is_durable() const { return durability != v1::DURABILITY_KIND_NONE; }
};

// The added group has parameters of both dtypes, so that parameters that lie in
// the records of the former ones have another distance.
inline LayoutSpec LayoutOf(const Kind& kind, bool extended) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {MakeParameter("a", 5 * kSubGroup, 0, kind.dtype),
                     MakeParameter("b", 3 * kSubGroup - 100, 0, kind.dtype)};
  if (!extended) return spec;
  spec.groups.resize(2);
  spec.parameters.push_back(MakeParameter("c", 2 * kSubGroup + 7, 1));
  spec.parameters.push_back(MakeParameter("d", 300, 1, DType::kBFloat16));
  return spec;
}

inline JobHarness::Setup SetupOf(const Kind& kind) {
  JobHarness::Setup setup;
  setup.layout = LayoutOf(kind, /*extended=*/false);
  setup.subgroup_elements = kSubGroup;
  setup.disks = kDisks;
  setup.nvme.mutable_directory_weights()->Resize(kDisks, 1);
  setup.storage.set_placement(kind.placement);
  setup.storage.set_durability(kind.durability);
  setup.storage.set_parameters_on_disk(kind.parameters_on_disk);
  if (kind.durability == v1::DURABILITY_KIND_EVERY) {
    setup.storage.set_every_steps(4);
  }
  if (kind.placement == v1::PLACEMENT_NVME) {
    // Five of eight frames, so that records are read from the disk. Those of
    // float32 parameters are smaller where no power cut needs the parameters.
    const bool is_smaller = kind.dtype == DType::kFloat32 &&
                            !kind.is_durable() && !kind.parameters_on_disk;
    setup.storage.set_host_budget_bytes(is_smaller ? 320 << 10 : 512 << 10);
  }
  return setup;
}

inline JobHarness::Setup InMemory(const Kind& kind) {
  Kind in_memory = kind;
  in_memory.placement = v1::PLACEMENT_HOST;
  in_memory.durability = v1::DURABILITY_KIND_NONE;
  in_memory.parameters_on_disk = false;
  return SetupOf(in_memory);
}

inline void Train(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      job->layout().groups().size(),
      DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    job->Step(step, job->RandomTensors(kSeed + step), spec);
  }
}

inline absl::StatusOr<v1::SetJobReply> SetWeights(JobHarness* job,
                                                  const Weights& weights) {
  v1::SetJobRequest request;
  request.mutable_directory_weights()->Assign(weights.begin(), weights.end());
  return job->job().Set(request);
}

inline std::string FolderOf(const JobHarness& job, uint32_t disk) {
  return job.Disks()[disk] + "/jobs/test";
}

// Says how many directories have a folder of the job; each has the files of one
// arrangement alone.
inline uint32_t CountFolders(const JobHarness& job) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < job.Disks().size(); ++i) {
    const std::string folder = FolderOf(job, i);
    if (!std::filesystem::exists(folder)) continue;
    ++count;
    EXPECT_NE(std::filesystem::exists(folder + "/records"),
              std::filesystem::exists(folder + "/records.1"));
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      EXPECT_FALSE(entry.path().filename().string().starts_with("commits."));
    }
  }
  for (const auto& entry :
       std::filesystem::directory_iterator(job.directory() + "/state")) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("frame_table."))
        << entry;
  }
  return count;
}

// A test of such a job beside one of the same layout in memory.
class RearrangeFixture : public testing::TestWithParam<Kind> {
 protected:
  void StartBoth() {
    for (JobHarness* job : {&in_memory_, &on_disk_}) {
      job->Start(job->RandomTensors(kSeed));
      Train(job, 1, 2);
    }
  }
  void TrainBoth() {
    ++step_;
    for (JobHarness* job : {&in_memory_, &on_disk_}) Train(job, step_, step_);
  }
  void ExpectSameBits() {
    ASSERT_TRUE(on_disk_.StateBytes() == in_memory_.StateBytes());
  }
  // Ends the engine, and the memory too if nothing is lost with it.
  void Reopen(bool loses_memory) {
    on_disk_.Close();
    if (loses_memory) on_disk_.DropMemory();
    ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
    on_disk_.AttachAll();
  }
  absl::Status Extend(JobHarness* job) {
    job->DetachAll();
    job->SetLayout(LayoutOf(GetParam(), /*extended=*/true));
    return job->Register(0, /*extend=*/true).status();
  }
  // Loads what was added.
  void LoadAdded(JobHarness* job) {
    job->AttachAll();
    ASSERT_TRUE(job->job().BeginLoad(0).ok());
    const Tensors masters = job->RandomTensors(99);
    for (const uint32_t p : {2, 3}) {
      ASSERT_EQ(job->LoadMaster(0, p, masters[p]), absl::OkStatus());
    }
    ASSERT_EQ(job->FinishAll().status, absl::OkStatus());
  }

  JobHarness in_memory_{InMemory(GetParam())};
  JobHarness on_disk_{SetupOf(GetParam())};
  uint64_t step_ = 2;
};

inline constexpr Kind kKinds[] = {
    {"Swapped", v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE},
    {"SwappedStep", v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP},
    {"SwappedEvery", v1::PLACEMENT_NVME, v1::DURABILITY_KIND_EVERY},
    {"InMemoryStep", v1::PLACEMENT_HOST, v1::DURABILITY_KIND_STEP,
     DType::kBFloat16},
    {"ParametersOnDisk", v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP,
     DType::kBFloat16, true},
};
inline std::string NameOf(const testing::TestParamInfo<Kind>& info) {
  return info.param.name;
}

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_REARRANGE_FIXTURE_H_
