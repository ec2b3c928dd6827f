// The rings of a session over shared memory, with a peer that writes into its
// segment whatever it likes: entries, indices, settings of commits, gradients.
// Input: a byte of flags (1: pages of gradients follow the attach), then acts
// of the peer, each a byte that says which and its bytes. The engine serves the
// ring after each.

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/shm/ring.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/unique_fd.h"
#include "server/transport/gradient_pages.h"
#include "server/transport/peer.h"
#include "server/transport/session_handler.h"
#include "server/transport/session_table.h"
#include "server/transport/shm/completion_writer.h"
#include "server/transport/shm/ring_server.h"
#include "server/transport/shm/shm_segments.h"
#include "server/transport/shm/shm_test_peer.h"
#include "server/transport/test_layout.h"
#include "tests/fuzz/bounded_job.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

using transport::AttachPlan;

constexpr uint8_t kPagesFollow = 1;
constexpr int kActsMax = 128;

enum class Act : uint8_t {
  kSubmit,       // an entry, with the next request_id
  kSubmitRaw,    // an entry as it is
  kSetTail,      // the number of entries that it claims to have written
  kSetHead,      // the number of answers that it claims to have read
  kSetGroup,     // hyperparameters of a group
  kSetSettings,  // settings of commits
  kReadAnswers,  // as an honest peer does
};
constexpr uint8_t kActs = 7;

template <typename T>
T Checked(absl::StatusOr<T> value) {
  Require(value.ok(), "the session of the target can be made");
  return *std::move(value);
}

// The segments of both sides, which are made once: they have megabytes.
struct Segments {
  Segments(const transport::ShmTestPeer& rank, const AttachPlan& plan)
      : client(rank.MakeSegment()),
        engine(Checked(transport::ShmSegments::Open(
            UniqueFd(::dup(client.fd())), plan))) {}

  shm::ClientHeader* header() const {
    return reinterpret_cast<shm::ClientHeader*>(client.data());
  }
  shm::Submission* submissions() const {
    return reinterpret_cast<shm::Submission*>(client.data() +
                                              shm::ClientSegmentLayout::kRing);
  }
  // Makes the rings new.
  void Reset() const {
    std::memset(static_cast<void*>(&header()->ring), 0, sizeof(shm::RingSide));
    std::memset(static_cast<void*>(engine.engine_ring()), 0,
                sizeof(shm::RingSide));
  }

  shm::SealedSegment client;
  transport::ShmSegments engine;
};

transport::Peer RankPeer() {
  transport::Peer peer;
  peer.hello.set_job("fuzz");
  peer.hello.set_protocol_version_max(shm::kProtocolVersion);
  return peer;
}

class Session {
 public:
  explicit Session(bool pages_follow)
      : rank_(UniqueFd(), transport::TestLayout(), 1, 0),
        link_(-1, 0),
        handler_({.job = &job_,
                  .table = &table_,
                  .wire = "shm",
                  .transfer_bytes_max = shm::kWindowBytes,
                  .interrupt = [] {}},
                 RankPeer(), &link_) {
    Checked(handler_.Register(rank_.RegisterRequest().register_()));
    v1::AttachRequest attach = rank_.AttachRequest().attach();
    attach.set_pages_follow(pages_follow);
    AttachPlan plan = Checked(handler_.PlanAttach(attach));
    static const auto* const segments = new Segments(rank_, plan);
    segments_ = segments;
    segments_->Reset();
    if (pages_follow) {
      pages_.emplace(UniqueFd(::dup(segments_->client.fd())),
                     segments_->engine.client_bytes(),
                     segments_->engine.gradient_offset_bytes(),
                     std::move(plan.gradient_ends));
    }
    writer_ = std::make_unique<transport::CompletionWriter>(
        &segments_->engine, &handler_, [](absl::string_view) {});
    ring_ = std::make_unique<transport::RingServer>(
        &segments_->engine, &handler_, writer_.get(), plan.group_count,
        pages_.has_value() ? &*pages_ : nullptr);
    Require(handler_.Claim(plan).ok(), "the rank is free");
    Checked(handler_.Attach(plan, segments_->engine.gradient_area(),
                            writer_.get()));
  }
  ~Session() { handler_.Detach("the input has ended"); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Has the peer do the next thing of the input.
  void Do(FuzzInput* input) {
    shm::RingSide& ring = segments_->header()->ring;
    switch (static_cast<Act>(input->Take<uint8_t>() % kActs)) {
      case Act::kSubmit:
        return Submit(input->Take<shm::Submission>(), true);
      case Act::kSubmitRaw:
        return Submit(input->Take<shm::Submission>(), false);
      case Act::kSetTail:
        ring.produced_tail.store(input->Take<uint64_t>());
        return;
      case Act::kSetHead:
        ring.consumed_head.store(input->Take<uint64_t>());
        return;
      case Act::kSetGroup: {
        const auto group = input->Take<shm::CommitGroup>();
        std::memcpy(
            segments_->client.data() + shm::ClientSegmentLayout::kGroups,
            &group, sizeof(group));
        return;
      }
      case Act::kSetSettings: {
        const auto settings = input->Take<shm::CommitSettings>();
        std::memcpy(
            segments_->client.data() + shm::ClientSegmentLayout::kSettings,
            &settings, sizeof(settings));
        return;
      }
      case Act::kReadAnswers:
        ring.consumed_head.store(
            segments_->engine.engine_ring()->produced_tail.load());
        return;
    }
  }

  // Serves what there is; an error ends the session.
  absl::Status Serve() {
    for (uint64_t i = 0; i < shm::kRingEntries; ++i) {
      const auto served = ring_->ServeOne();
      if (!served.ok()) return served.status();
      if (*served == shm::Poll::kEmpty && !ring_->WorkAhead()) break;
    }
    const shm::RingSide* const mine = segments_->engine.engine_ring();
    Require(mine->produced_tail.load() <= mine->consumed_head.load() + 1,
            "an entry has one answer");
    return absl::OkStatus();
  }

 private:
  void Submit(shm::Submission submission, bool in_order) {
    shm::RingSide& ring = segments_->header()->ring;
    const uint64_t tail = ring.produced_tail.load();
    if (in_order) submission.request_id = ++last_request_;
    segments_->submissions()[tail % shm::kRingEntries] = submission;
    ring.produced_tail.store(tail + 1);
  }

  BoundedJob job_;
  transport::SessionTable table_;
  const transport::ShmTestPeer rank_;
  const transport::PeerLink link_;
  transport::SessionHandler handler_;
  const Segments* segments_ = nullptr;
  std::optional<transport::GradientPages> pages_;
  std::unique_ptr<transport::CompletionWriter> writer_;
  std::unique_ptr<transport::RingServer> ring_;
  uint64_t last_request_ = 0;
};

std::string Submit(shm::Op op, uint64_t step, uint64_t numel) {
  shm::Submission submission = {};
  submission.op = static_cast<uint16_t>(op);
  submission.step = step;
  submission.numel = numel;
  submission.array = v1::STATE_ARRAY_MASTER;
  submission.dtype = v1::DTYPE_FLOAT32;
  submission.grad_scale = 1;
  return FuzzBytes(Act::kSubmit) + FuzzBytes(submission);
}

}  // namespace

std::vector<std::string> Seeds() {
  shm::CommitGroup group = {};
  group.value[0] = 0.001;
  const std::string groups = FuzzBytes(Act::kSetGroup) + FuzzBytes(group);
  const std::string read = FuzzBytes(Act::kReadAnswers);
  const std::string step = Submit(shm::Op::kPush, 1, 3) + groups +
                           Submit(shm::Op::kCommit, 1, 0) + read +
                           Submit(shm::Op::kAbort, 2, 0);
  const std::string load =
      Submit(shm::Op::kBeginLoad, 0, 0) + Submit(shm::Op::kLoad, 0, 100) +
      Submit(shm::Op::kFinishLoad, 0, 0) + read +
      Submit(shm::Op::kFetch, 0, 100) + Submit(shm::Op::kDecide, 1, 0) +
      Submit(shm::Op::kParameterHint, 0, 2) + Submit(shm::Op::kPush, 1, 0);
  return {std::string(1, '\0') + step, FuzzBytes(kPagesFollow) + step,
          std::string(1, '\0') + load,
          std::string(1, '\0') + FuzzBytes(Act::kSetTail) +
              FuzzBytes(uint64_t{shm::kRingEntries}) +
              FuzzBytes(Act::kSetHead) + FuzzBytes(uint64_t{1})};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  FuzzInput input(data, size);
  Session session((input.Take<uint8_t>() & kPagesFollow) != 0);
  for (int i = 0; i < kActsMax && !input.empty(); ++i) {
    session.Do(&input);
    if (!session.Serve().ok()) break;
  }
  return 0;
}
