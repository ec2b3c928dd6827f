#ifndef OPTSTATE_CLIENT_FAKE_FAKE_DAEMON_JOB_H_
#define OPTSTATE_CLIENT_FAKE_FAKE_DAEMON_JOB_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/channel/channel.h"
#include "client/fake/fake_arithmetic.h"

namespace optstate::client {

// One job of a FakeDaemon, with the step rules of server/session/job.h.
//
// Threads: the caller holds the daemon's lock.
// Size: one method for each verb of Channel.
class FakeDaemonJob {
 public:
  explicit FakeDaemonJob(const ChannelSetup& setup);

  absl::Status CheckRegister(const ChannelSetup& setup) const;
  absl::Status Attach(const ChannelSetup& setup,
                      const std::byte* gradient_area);
  void Detach(uint32_t rank);
  Attached Describe() const;
  bool finished() const;
  bool attached(uint32_t rank) const { return ranks_[rank].attached; }
  absl::Span<const std::byte> parameter_area() const { return parameters_; }

  absl::Status Push(uint32_t rank, const PushRange& range);
  // Returns whether the step was decided; the answer is then in `answer`.
  absl::StatusOr<bool> Commit(uint32_t rank, const CommitOptions& options);
  std::optional<absl::StatusOr<Outcome>>& answer(uint32_t rank) {
    return ranks_[rank].answer;
  }
  absl::Status Abort(uint32_t rank, uint64_t step);

  absl::Status BeginLoad(uint32_t rank);
  absl::Status Load(uint32_t rank, StateArray array, uint32_t parameter,
                    uint64_t begin, DType dtype,
                    absl::Span<const std::byte> data);
  // Knows begin_at alone, and takes the last rank's.
  absl::Status FinishLoad(uint32_t rank, const LoadEnd& end);
  bool loading() const;
  absl::Status Fetch(StateArray array, uint32_t parameter, uint64_t begin,
                     absl::Span<std::byte> out) const;
  uint64_t committed_step() const { return committed_step_; }

 private:
  // One rank's staged gradients of one piece.
  struct Staged {
    bool any = false;
    uint32_t micro_step = 0;
    std::vector<float> sum;
  };
  // One vector per parameter; empty where there is no gradient.
  using Gradients = std::vector<std::optional<std::vector<float>>>;
  struct Rank {
    bool attached = false;
    RankPartition partition;
    const std::byte* gradient_area = nullptr;
    std::vector<Staged> staged;  // one per piece
    std::optional<CommitOptions> commit;
    std::optional<absl::StatusOr<Outcome>> answer;
    bool loaded = false;
    bool in_load = false;
  };

  absl::Status CheckStep(uint64_t step) const;
  absl::Status CheckContent(const CommitOptions& options) const;
  absl::Status CheckRepeat(const CommitOptions& options) const;
  bool AllCommitted() const;
  absl::StatusOr<Outcome> TakeStep();
  absl::Status GatherGradients(Gradients* gradients);
  double SumOfSquares(const Gradients& gradients) const;
  void DropStaged(uint32_t rank);
  void StorePieces();
  std::vector<float> ReadPiece(const Rank& rank, const Piece& piece) const;
  std::vector<float>* Array(StateArray array, uint32_t parameter);

  const ChannelSetup setup_;
  std::vector<FakeState> states_;
  std::vector<std::byte> parameters_;
  std::vector<Rank> ranks_;
  bool ready_ = false;
  uint32_t loads_finished_ = 0;
  bool had_session_ = false;
  uint64_t committed_step_ = 0;
  std::optional<Outcome> last_outcome_;
  std::optional<CommitOptions> last_commit_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_FAKE_FAKE_DAEMON_JOB_H_
