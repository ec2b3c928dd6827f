#ifndef OPTSTATE_SERVER_TRANSPORT_FAKE_JOB_H_
#define OPTSTATE_SERVER_TRANSPORT_FAKE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/session/job.h"
#include "storage/state_file.h"

namespace optstate::transport {

// A Job for tests of transports: records its arguments, so that a test can
// inspect them, and enforces the step order that a transport depends on;
// computes nothing.
//
// The end of a micro-step is answered when all ranks have ended it. The update
// of a step adds 1 to each byte of the parameter area. A commit is
// answered when all ranks have committed, from the thread of the last one.
//
// Threads: thread-safe.
// Size: one method for each call of Job, and what tests ask.
class FakeJob : public session::Job {
 public:
  FakeJob();
  ~FakeJob() override;

  struct Rank {
    bool attached = false;
    session::AttachSpec attach;
    // The job's own copy of the segment fd in `attach`; null when there was
    // none.
    std::shared_ptr<UniqueFd> gradient_segment;
    // The gradient area's content at the last push of the open step.
    std::vector<std::byte> staged;
    uint64_t pushes = 0;  // in all steps
    uint64_t attaches = 0;
    std::vector<Hyperparams> groups;  // of the last commit
    session::CommitSpec commit;       // likewise; its span is not valid
    std::optional<uint64_t> commit_request;
    bool worked_ahead = false;
    std::optional<uint64_t> ending_request;
    uint64_t shared_gradient_bytes = 0;  // on kDevice
  };

  // Returns a copy of the rank's record, for the test.
  Rank rank(uint32_t rank) const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t committed_step() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the rank is attached or detached.
  void AwaitAttached(uint32_t rank, bool attached) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the rank waits for the end of a micro-step.
  void AwaitEnding(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the rank waits for the answer to a commit.
  void AwaitCommit(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the transport lets the job work ahead after the rank's pushes.
  void AwaitWorkAhead(uint32_t rank) ABSL_LOCKS_EXCLUDED(mutex_);
  struct Hint {
    session::ParameterHint hint;
    uint32_t first = 0;
    uint32_t count = 0;
  };
  std::vector<Hint> hints() const ABSL_LOCKS_EXCLUDED(mutex_);
  LoadEnd last_load_end() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes pushes wait inside the job from now on, until they are released.
  void HoldPushes(bool hold) ABSL_LOCKS_EXCLUDED(mutex_);
  void AwaitHeldPush() ABSL_LOCKS_EXCLUDED(mutex_);

  std::string StagingPath(uint32_t rank,
                          uint64_t client_instance) const override;
  absl::StatusOr<storage::StateFile> MakeStaging(uint32_t rank,
                                                 uint64_t client_instance,
                                                 uint64_t gradient_area_bytes,
                                                 bool* present) override;
  absl::StatusOr<session::RegisterResult> Register(
      const session::RegisterSpec& spec) override;
  absl::StatusOr<const Layout*> layout() const override;
  absl::StatusOr<const RankPartition*> partition(uint32_t rank) const override;
  absl::StatusOr<UniqueFd> OpenParameters() const override;
  absl::StatusOr<UniqueFd> OpenRunStamps() const override { return UniqueFd(); }
  // Has kDevice alone, whose memory is a segment of kDeviceBytes bytes 7.
  static constexpr char kDevice[] = "device-5";
  static constexpr uint32_t kDeviceIndex = 5;
  static constexpr uint64_t kDeviceBytes = 8192;
  absl::StatusOr<session::DeviceParameters> ShareParameters(
      absl::string_view device) override;
  // Takes memory that is a sealed segment of so many bytes.
  absl::Status ShareGradients(uint32_t rank, absl::string_view device,
                              session::DeviceGradients gradients) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<session::AttachResult> Attach(
      const session::AttachSpec& spec) override;
  void Detach(uint32_t rank) override;
  void Leave(uint32_t /*rank*/) override {}
  void NoteFarewell(uint32_t /*rank*/, uint64_t /*instance*/) override {}
  void Stop() override {}
  absl::Status Verify(
      absl::FunctionRef<bool(const v1::VerifyJobProgress&)>) override {
    return absl::UnimplementedError("Verify");
  }
  absl::Status Trace(const v1::TraceJobRequest&, absl::Time,
                     absl::FunctionRef<bool(const v1::TraceChunk&)>) override {
    return absl::UnimplementedError("Trace");
  }
  absl::StatusOr<v1::SetJobReply> Set(const v1::SetJobRequest&) override {
    return absl::UnimplementedError("Set");
  }
  std::vector<session::FormerRank> Awaited() const override { return {}; }
  void GiveUp(const session::FormerRank& /*rank*/) override {}
  absl::Status Push(uint32_t rank, uint64_t step, uint32_t micro_step,
                    uint32_t first_parameter,
                    uint32_t parameter_count) override;
  bool WorkAhead(uint32_t rank) override ABSL_LOCKS_EXCLUDED(mutex_);
  void EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                    uint32_t micro_step) override;
  void Commit(uint32_t rank, uint64_t request_id,
              const session::CommitSpec& spec) override;
  absl::Status Abort(uint32_t rank, uint64_t step) override;
  absl::StatusOr<session::JobPosition> Position() override {
    return absl::UnimplementedError("Position");
  }
  void Decide(uint32_t /*rank*/, uint64_t /*request_id*/,
              const StepVerdict& /*verdict*/) override {}
  absl::StatusOr<session::StepOutcome> DecideUnattached(
      const StepVerdict& /*verdict*/) override {
    return absl::UnimplementedError("DecideUnattached");
  }
  absl::Status BeginLoad(uint32_t rank) override;
  absl::Status Load(uint32_t rank, v1::StateArray array, uint32_t parameter,
                    uint64_t begin, uint64_t numel, DType dtype,
                    absl::Span<const std::byte> data) override;
  void FinishLoad(uint32_t rank, uint64_t request_id,
                  const LoadEnd& end) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<uint64_t> Fetch(v1::StateArray array, uint32_t parameter,
                                 uint64_t begin, uint64_t numel,
                                 absl::Span<std::byte> out) override;
  absl::Status HintParameters(session::ParameterHint hint, uint32_t first,
                              uint32_t count) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status ReadParameters(uint64_t offset_bytes,
                              absl::Span<std::byte> out) override;
  void BeginDrain() override {}
  void Resume() override;
  absl::Status AwaitDrained(absl::Time deadline) override;
  absl::Status AwaitResumed(absl::Time deadline) override;
  void SetLimits(const v1::Limits& limits) override;
  void SetQuotas(
      const google::protobuf::RepeatedPtrField<v1::Quota>&) override {}
  absl::Status Pause(absl::Time deadline, absl::Duration lease) override;
  bool paused() const override;
  bool finished() const override;
  v1::Job Describe() const override { return {}; }
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request) const override;

 private:
  void ApplyStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::string directory_;  // of staging files
  mutable absl::Mutex mutex_;
  std::unique_ptr<Layout> layout_;
  std::vector<RankPartition> partitions_;
  std::optional<storage::StateFile> parameters_;
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mutex_);
  uint64_t committed_step_ ABSL_GUARDED_BY(mutex_) = 0;
  LoadEnd last_load_end_ ABSL_GUARDED_BY(mutex_);
  // Loaded data, by array, parameter and first element.
  std::map<std::pair<int, uint64_t>, std::vector<std::byte>> loads_
      ABSL_GUARDED_BY(mutex_);
  std::vector<Hint> hints_ ABSL_GUARDED_BY(mutex_);
  bool hold_pushes_ ABSL_GUARDED_BY(mutex_) = false;
  int held_pushes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_FAKE_JOB_H_
