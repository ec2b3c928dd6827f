#include "client/fake/fake_channel.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/channel/transport_error.h"
#include "client/endpoint/interrupt.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

class FakeChannel final : public Channel {
 public:
  FakeChannel(FakeDaemon* daemon, ChannelSetup setup)
      : daemon_(daemon),
        setup_(std::move(setup)),
        gradients_(setup_.partition.gradient_area_bytes),
        parameters_(setup_.layout.parameter_area_bytes()) {}
  ~FakeChannel() override { daemon_->Close(connection_); }

  absl::string_view wire() const override { return "fake"; }

  absl::StatusOr<Attached> Connect(bool must_exist, absl::Time) override {
    daemon_->Close(connection_);
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(setup_.interrupted));
    Attached attached;
    OPTSTATE_ASSIGN_OR_RETURN(
        connection_,
        daemon_->Open(setup_, must_exist, gradients_.data(), &attached));
    ReadParameters();
    return attached;
  }
  bool connected() const override { return daemon_->connected(connection_); }
  absl::Status Disconnect() override {
    if (!connected()) return NotConnectedError();
    daemon_->Close(connection_);
    return absl::OkStatus();
  }
  absl::Status Farewell(absl::Time) override { return daemon_->Farewell(); }
  void Abandon() override { connection_ = 0; }

  absl::Span<std::byte> gradient_area() override {
    return absl::MakeSpan(gradients_);
  }
  absl::Span<const std::byte> parameter_area() const override {
    return parameters_;
  }

  absl::Status Push(const PushRange& range, absl::Time) override {
    absl::Status status = daemon_->Push(connection_, range);
    if (IsTransportError(status)) return status;
    if (!status.ok()) NoteFailedPush(range.step, status);
    return absl::OkStatus();
  }
  absl::Status Flush(absl::Time) override {
    return connected() ? absl::OkStatus() : NotConnectedError();
  }
  absl::Status StartCommit(const CommitOptions& options, absl::Time) override {
    return daemon_->StartCommit(connection_, options);
  }
  absl::StatusOr<Outcome> WaitCommit(absl::Time deadline,
                                     Meanwhile /*meanwhile*/) override {
    absl::StatusOr<Outcome> outcome =
        daemon_->WaitCommit(connection_, deadline, setup_.interrupted);
    ReadParameters();
    return outcome;
  }
  absl::Status Abort(uint64_t step, absl::Time) override {
    return daemon_->Abort(connection_, step);
  }
  absl::Status StartDecision(const StepVerdict&, absl::Time) override {
    return absl::UnimplementedError("the fake daemon knows no two phases");
  }
  bool has_outstanding_commit() const override { return false; }
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest&,
                                       absl::Time) override {
    return absl::UnimplementedError("the fake daemon knows no two phases");
  }

  // The limit is small, so that tests see transfers split.
  uint64_t transfer_bytes_max() const override { return 64; }
  absl::Status BeginLoad(absl::Time) override {
    return daemon_->BeginLoad(connection_);
  }
  absl::Status Load(StateArray array, uint32_t parameter, uint64_t begin,
                    DType dtype, absl::Span<const std::byte> data,
                    absl::Time) override {
    return daemon_->Load(connection_, array, parameter, begin, dtype, data);
  }
  absl::Status FinishLoad(const LoadEnd& end, absl::Time deadline) override {
    absl::Status status = daemon_->FinishLoad(connection_, end, deadline);
    ReadParameters();
    return status;
  }
  absl::StatusOr<uint64_t> Fetch(absl::Span<const FetchRange> ranges,
                                 absl::Time) override {
    uint64_t step = 0;
    for (const FetchRange& range : ranges) {
      OPTSTATE_ASSIGN_OR_RETURN(
          step, daemon_->Fetch(connection_, range.array, range.parameter,
                               range.begin, range.out));
    }
    return step;
  }
  absl::Status HintParameters(ParameterHint /*hint*/, uint32_t /*first*/,
                              uint32_t /*count*/, absl::Time) override {
    return connected() ? absl::OkStatus() : NotConnectedError();
  }

 private:
  void ReadParameters() {
    const absl::Span<const std::byte> area =
        daemon_->parameter_area(connection_);
    std::copy(area.begin(), area.end(), parameters_.begin());
  }

  FakeDaemon* const daemon_;
  const ChannelSetup setup_;
  std::vector<std::byte> gradients_;
  std::vector<std::byte> parameters_;
  FakeDaemon::Connection connection_ = 0;
};

}  // namespace

std::unique_ptr<Channel> MakeFakeChannel(FakeDaemon* daemon,
                                         ChannelSetup setup) {
  return std::make_unique<FakeChannel>(daemon, std::move(setup));
}

}  // namespace optstate::client
