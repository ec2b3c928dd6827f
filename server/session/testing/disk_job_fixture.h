#ifndef OPTSTATE_SERVER_SESSION_TESTING_DISK_JOB_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_DISK_JOB_FIXTURE_H_

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {

inline constexpr uint64_t kSeed = 7;
inline constexpr uint64_t kSubGroup = 8192;  // elements: two tiles

inline JobHarness::Setup DiskJobSetup(v1::Placement placement,
                                      v1::DurabilityKind durability) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {MakeParameter("a", 5 * kSubGroup),
                             MakeParameter("b", 3 * kSubGroup)};
  setup.subgroup_elements = kSubGroup;
  setup.storage.set_placement(placement);
  setup.storage.set_durability(durability);
  setup.io_engine = v1::IO_ENGINE_KIND_BLOCKING;  // its reads can be held
  return setup;
}

inline CommitSpec SpecOf(uint64_t step, absl::Span<const Hyperparams> groups) {
  CommitSpec spec;
  spec.step = step;
  spec.groups = groups;
  return spec;
}

inline void Train(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    job->Step(step, job->RandomTensors(kSeed + step), SpecOf(step, groups));
  }
}

// The result of a verification of a job.
struct Verified {
  absl::Status status;
  v1::VerifyJobProgress last;
  std::vector<v1::RecordDamage> damages;
};

inline Verified Verify(JobHarness* job) {
  Verified verified;
  verified.status =
      job->job().Verify([&verified](const v1::VerifyJobProgress& progress) {
        verified.last = progress;
        for (const v1::RecordDamage& damage : progress.damages()) {
          verified.damages.push_back(damage);
        }
        return true;
      });
  return verified;
}

// A test of a job of one rank whose records are on disk.
class DiskJobFixture : public testing::Test {
 protected:
  void Start(v1::Placement placement = v1::PLACEMENT_NVME,
             v1::DurabilityKind durability = v1::DURABILITY_KIND_STEP) {
    Start(DiskJobSetup(placement, durability));
  }
  // Opens the job and takes two steps.
  void Start(JobHarness::Setup setup) {
    job_ = std::make_unique<JobHarness>(std::move(setup));
    job_->Start(job_->RandomTensors(kSeed));
    Train(job_.get(), 1, 2);
  }
  std::string RecordsFile() const {
    return job_->disk() + "/jobs/test/records";
  }
  uint64_t SlotBytes() { return job_->job().Describe().disk().frame_bytes(); }
  // Damages a bit of both slots of a record.
  void Flip(uint64_t record, uint64_t at) {
    const int fd = ::open(RecordsFile().c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0) << RecordsFile();
    for (uint64_t slot = 0; slot < 2; ++slot) {
      const auto offset =
          static_cast<off_t>((2 * record + slot) * SlotBytes() + at);
      char byte = 0;
      ASSERT_EQ(::pread(fd, &byte, 1, offset), 1);
      byte = static_cast<char>(byte ^ 4);
      ASSERT_EQ(::pwrite(fd, &byte, 1, offset), 1);
    }
    ::close(fd);
  }

  std::unique_ptr<JobHarness> job_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_DISK_JOB_FIXTURE_H_
