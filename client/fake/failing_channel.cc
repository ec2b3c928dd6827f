#include "client/fake/failing_channel.h"

#include <utility>

#include "absl/status/status.h"
#include "client/channel/transport_error.h"

namespace optstate::client {
namespace {

class FailingChannel final : public Channel {
 public:
  FailingChannel(std::unique_ptr<Channel> channel, ChannelFaults* faults)
      : channel_(std::move(channel)), faults_(*faults) {}

  absl::string_view wire() const override { return channel_->wire(); }
  absl::StatusOr<Attached> Connect(bool must_exist,
                                   absl::Time deadline) override {
    return channel_->Connect(must_exist, deadline);
  }
  bool connected() const override { return channel_->connected(); }
  absl::Status Disconnect() override { return channel_->Disconnect(); }
  absl::Status Farewell(absl::Time deadline) override {
    return channel_->Farewell(deadline);
  }
  void Abandon() override { channel_->Abandon(); }

  absl::Span<std::byte> gradient_area() override {
    return channel_->gradient_area();
  }
  absl::Span<const std::byte> parameter_area() const override {
    return channel_->parameter_area();
  }

  absl::Status Push(const PushRange& range, absl::Time deadline) override {
    if (faults_.refused_pushes > 0) {
      --faults_.refused_pushes;
      NoteFailedPush(range.step, absl::InvalidArgumentError("a made up fault"));
      return absl::OkStatus();
    }
    absl::Status status = channel_->Push(range, deadline);
    if (channel_->failed_push()) {
      NoteFailedPush(channel_->failed_push()->step,
                     channel_->failed_push()->status);
      channel_->ClearFailedPush();
    }
    return status;
  }
  absl::Status Flush(absl::Time deadline) override {
    return channel_->Flush(deadline);
  }
  absl::Status StartCommit(const CommitOptions& options,
                           absl::Time deadline) override {
    return channel_->StartCommit(options, deadline);
  }
  absl::StatusOr<Outcome> WaitCommit(absl::Time deadline,
                                     Meanwhile meanwhile) override {
    return channel_->WaitCommit(deadline, meanwhile);
  }
  absl::Status Abort(uint64_t step, absl::Time deadline) override {
    if (faults_.lost_aborts > 0) {
      --faults_.lost_aborts;
      return NoAnswerError();
    }
    return channel_->Abort(step, deadline);
  }
  absl::Status StartDecision(const StepVerdict& verdict,
                             absl::Time deadline) override {
    return channel_->StartDecision(verdict, deadline);
  }
  bool has_outstanding_commit() const override {
    return channel_->has_outstanding_commit();
  }
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest& request,
                                       absl::Time deadline) override {
    return channel_->Ask(request, deadline);
  }

  uint64_t transfer_bytes_max() const override {
    return channel_->transfer_bytes_max();
  }
  absl::Status BeginLoad(absl::Time deadline) override {
    return channel_->BeginLoad(deadline);
  }
  absl::Status Load(StateArray array, uint32_t parameter, uint64_t begin,
                    DType dtype, absl::Span<const std::byte> data,
                    absl::Time deadline) override {
    return channel_->Load(array, parameter, begin, dtype, data, deadline);
  }
  absl::Status FinishLoad(const LoadEnd& end, absl::Time deadline) override {
    return channel_->FinishLoad(end, deadline);
  }
  absl::StatusOr<uint64_t> Fetch(absl::Span<const FetchRange> ranges,
                                 absl::Time deadline) override {
    return channel_->Fetch(ranges, deadline);
  }
  absl::Status HintParameters(ParameterHint hint, uint32_t first,
                              uint32_t count, absl::Time deadline) override {
    return channel_->HintParameters(hint, first, count, deadline);
  }

 private:
  const std::unique_ptr<Channel> channel_;
  ChannelFaults& faults_;
};

}  // namespace

std::unique_ptr<Channel> MakeFailingChannel(std::unique_ptr<Channel> channel,
                                            ChannelFaults* faults) {
  return std::make_unique<FailingChannel>(std::move(channel), faults);
}

}  // namespace optstate::client
