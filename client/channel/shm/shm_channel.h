#ifndef OPTSTATE_CLIENT_CHANNEL_SHM_SHM_CHANNEL_H_
#define OPTSTATE_CLIENT_CHANNEL_SHM_SHM_CHANNEL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "client/channel/channel.h"
#include "client/channel/shm/background_populate.h"
#include "client/channel/shm/stable_mapping.h"
#include "client/endpoint/endpoint.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/shm/ring.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// The wire of ranks on the daemon's own node: frames on a unix socket to
// register and attach, then rings in sealed segments; gradients and parameters
// are never sent, only named. See proto/shm/segment_layout.h.
//
// A wait for an answer spins for a moment, then sleeps on the engine's doorbell
// in slices and checks the socket in between: this is how the death of the
// engine is noticed.
// Size: one method for each verb of Channel, and the steps of one
// connection's life, which share its rings.
class ShmChannel final : public Channel {
 public:
  // `populate` takes the place of the kernel in tests.
  ShmChannel(Endpoint endpoint, ChannelSetup setup,
             PopulateFunction populate = shm::PopulatePages);
  ~ShmChannel() override;

  absl::string_view wire() const override { return "shm"; }
  absl::StatusOr<Attached> Connect(bool must_exist,
                                   absl::Time deadline) override;
  bool connected() const override { return socket_.ok(); }
  absl::Status Disconnect() override;
  absl::Status Farewell(absl::Time deadline) override;
  void Abandon() override;

  absl::Span<std::byte> gradient_area() override;
  absl::Status AwaitGradientArea(uint64_t bytes) override;
  absl::Span<const std::byte> parameter_area() const override;
  int parameter_file() const override { return parameters_.file(); }
  absl::Status CheckParameterArea() const override {
    return parameters_.CheckWhole();
  }

  absl::Status Push(const PushRange& range, absl::Time deadline) override;
  absl::Status Flush(absl::Time deadline) override;
  absl::Status StartCommit(const CommitOptions& options,
                           absl::Time deadline) override;
  absl::StatusOr<Outcome> WaitCommit(absl::Time deadline,
                                     Meanwhile meanwhile) override;
  const std::atomic<uint64_t>* run_stamps() const override;
  absl::Status Abort(uint64_t step, absl::Time deadline) override;
  absl::StatusOr<DeviceParameters::Shared> ShareParameters(
      absl::string_view device, absl::Time deadline) override;
  absl::Status ShareGradients(absl::string_view device,
                              const GradientsOffer& offer,
                              absl::Time deadline) override;
  absl::Status StartDecision(const StepVerdict& verdict,
                             absl::Time deadline) override;
  bool has_outstanding_commit() const override { return commit_ != nullptr; }
  absl::StatusOr<v1::SessionReply> Ask(const v1::SessionRequest& request,
                                       absl::Time deadline) override;

  uint64_t transfer_bytes_max() const override { return shm::kWindowBytes; }
  absl::Status BeginLoad(absl::Time deadline) override;
  absl::Status Load(StateArray array, uint32_t parameter, uint64_t begin,
                    DType dtype, absl::Span<const std::byte> data,
                    absl::Time deadline) override;
  absl::Status FinishLoad(const LoadEnd& end, absl::Time deadline) override;
  absl::StatusOr<uint64_t> Fetch(absl::Span<const FetchRange> ranges,
                                 absl::Time deadline) override;
  absl::Status HintParameters(ParameterHint hint, uint32_t first,
                              uint32_t count, absl::Time deadline) override;

 private:
  // A submission that is outstanding, or whose answer was not collected yet.
  struct Pending {
    uint64_t request_id = 0;  // 0: free
    shm::Op op = shm::Op::kPush;
    uint64_t step = 0;
    bool answered = false;
    absl::Status status;
    shm::Completion completion;
    uint64_t durable_step = 0;  // of an answered commit
  };

  absl::Status CreateSegment(bool pages_may_follow);
  absl::Status ReserveForOlderEngine();
  absl::Span<std::byte> gradient_pages() const;
  void StartPopulating();
  void ResetSegment();
  absl::StatusOr<v1::SessionReply> Call(const v1::SessionRequest& request,
                                        absl::Span<const int> fds,
                                        std::vector<UniqueFd>* reply_fds,
                                        absl::Time deadline);
  absl::StatusOr<v1::AttachReply> Attach(absl::Time deadline);
  absl::Status MapSegments(std::vector<UniqueFd> fds);
  absl::Status CheckCompletionHeader() const;

  absl::StatusOr<Pending*> Submit(shm::Op op, shm::Submission submission,
                                  absl::Time deadline);
  absl::Status Await(Pending* pending, absl::Time deadline);
  absl::StatusOr<uint64_t> FetchOne(const FetchRange& range,
                                    absl::Time deadline);
  absl::Status SubmitAndAwait(shm::Op op, const shm::Submission& submission,
                              absl::Time deadline);
  // The longest time for which the death of the engine may go unnoticed while
  // its answer is awaited.
  static absl::Duration LongestSleep() { return absl::Milliseconds(50); }
  // Waits until `done` returns true and checks `interrupted`; after CANCELLED
  // nothing is lost. `meanwhile`: as in WaitCommit.
  absl::Status WaitUntil(absl::FunctionRef<bool()> done, absl::Time deadline,
                         const InterruptCheck& interrupted = nullptr,
                         Meanwhile meanwhile = LongestSleep);
  absl::StatusOr<bool> TakeCompletions();
  absl::Status Record(const shm::Completion& completion);
  uint64_t DurableStepOf(const shm::Completion& completion) const;
  std::string TextOf(const shm::Completion& completion) const;
  bool PeerSpeaks() const;
  absl::Status HearPeer() const;
  absl::Status Lose(const absl::Status& status);
  void Drop();

  shm::ClientHeader* header() const { return InSegment<shm::ClientHeader>(0); }
  template <typename T>
  T* InSegment(uint64_t offset) const {
    return reinterpret_cast<T*>(segment_.data() + offset);
  }
  template <typename T>
  const T* InCompletions(uint64_t offset) const {
    return reinterpret_cast<const T*>(completions_.data() + offset);
  }

  const Endpoint endpoint_;
  const ChannelSetup setup_;
  const shm::ClientSegmentLayout segment_layout_;
  const absl::Duration spin_;

  UniqueFd socket_;
  const PopulateFunction populate_pages_;
  shm::SealedSegment segment_;  // lasts through reconnections
  // All of its pages belong to the segment; populate_ only maps them.
  bool is_reserved_ = false;
  BackgroundPopulate populate_;  // of gradient_pages()
  bool populating_ = false;
  shm::PeerSegment completions_;
  StableMapping parameters_;
  StableMapping run_stamps_;
  bool has_run_stamps_ = false;     // of the present connection
  bool shares_parameters_ = false;  // likewise: see v1::AttachReply
  bool shares_gradients_ = false;   // likewise
  std::optional<shm::RingProducer<shm::Submission>> producer_;
  std::optional<shm::RingConsumer<shm::Completion>> consumer_;

  uint64_t last_request_id_ = 0;
  uint32_t pending_pushes_ = 0;
  // The most requests that may be outstanding. This is fewer than a ring has
  // entries, because the engine frees an entry a moment after its answer.
  static constexpr uint64_t kPendingMax = shm::kRingEntries / 2;
  std::array<Pending, kPendingMax> pending_;  // request r is at r % kPendingMax
  Pending* commit_ = nullptr;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_SHM_SHM_CHANNEL_H_
