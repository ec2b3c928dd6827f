#include "server/transport/shm/shm_test_peer.h"

#include <poll.h>

#include <cstring>
#include <new>
#include <utility>

#include "absl/time/clock.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"

namespace optstate::transport {
namespace {

// The limit of each wait, which only keeps tests from hanging for ever.
absl::Time Patience() { return absl::Now() + absl::Minutes(2); }

}  // namespace

ShmTestPeer::ShmTestPeer(UniqueFd socket, Layout layout, uint32_t world_size,
                         uint32_t rank, uint32_t protocol_version)
    : socket_(std::move(socket)),
      layout_(std::move(layout)),
      world_size_(world_size),
      rank_(rank),
      partition_(
          MakeRankPartition(layout_, PartitionMode::kGreedy, world_size, rank)
              .value()),
      has_lead_(protocol_version >= shm::kGradientLeadProtocol),
      segment_layout_(layout_.groups().size(), partition_.gradient_area_bytes,
                      has_lead_ ? shm::GradientLeadBytes(rank) : 0) {}

v1::SessionRequest ShmTestPeer::RegisterRequest() const {
  v1::SessionRequest request;
  request.set_request_id(1);
  v1::RegisterRequest& body = *request.mutable_register_();
  *body.mutable_layout() = ToProto(layout_);
  body.set_rank(rank_);
  body.set_world_size(world_size_);
  body.set_local_world_size(world_size_);
  body.set_partition(v1::PARTITION_MODE_GREEDY);
  return request;
}

v1::SessionRequest ShmTestPeer::AttachRequest() const {
  v1::SessionRequest request;
  request.set_request_id(2);
  request.mutable_attach()->set_rank(rank_);
  request.mutable_attach()->set_layout_hash(layout_.hash());
  request.mutable_attach()->set_takes_notices(takes_notices);
  request.mutable_attach()->set_pages_follow(pages_follow);
  return request;
}

shm::SealedSegment ShmTestPeer::MakeSegmentWithoutGradients() const {
  auto segment = MakeSegment(nullptr, shm::SealedSegment::Pages::kNone);
  shm::PopulatePages(segment.data(), segment_layout_.gradient_pages())
      .IgnoreError();
  return segment;
}

shm::SealedSegment ShmTestPeer::MakeSegment(
    const std::function<void(shm::ClientHeader*)>& change,
    shm::SealedSegment::Pages pages) const {
  auto segment = shm::SealedSegment::Create(
                     "test-client", segment_layout_.segment_bytes, pages)
                     .value();
  auto* header = new (segment.data()) shm::ClientHeader{};
  header->magic = shm::kClientMagic;
  header->version = has_lead_ ? shm::kClientSegmentVersion
                              : shm::kClientSegmentVersionWithoutLead;
  header->group_count = static_cast<uint32_t>(layout_.groups().size());
  header->segment_bytes = segment_layout_.segment_bytes;
  header->gradient_area_bytes = partition_.gradient_area_bytes;
  std::memcpy(header->layout_hash, layout_.hash().data(), 32);
  if (change) change(header);
  return segment;
}

absl::Status ShmTestPeer::Send(const v1::SessionRequest& request,
                               absl::Span<const int> fds) {
  return shm::SendFrame(socket_.get(), request.SerializeAsString(), fds,
                        Patience());
}

absl::StatusOr<v1::SessionReply> ShmTestPeer::Receive() {
  OPTSTATE_ASSIGN_OR_RETURN(
      shm::Frame frame,
      shm::ReceiveFrame(socket_.get(), shm::kFrameBytesMax, Patience()));
  v1::SessionReply reply;
  if (!reply.ParseFromString(frame.payload)) {
    return absl::InternalError("the engine sent what is no SessionReply");
  }
  received_fds.clear();
  if (!reply.has_attach()) {
    received_fds = std::move(frame.fds);
  } else if (!frame.fds.empty()) {
    OPTSTATE_RETURN_IF_ERROR(MapReply(std::move(frame.fds)));
  }
  return reply;
}

absl::Status ShmTestPeer::MapReply(std::vector<UniqueFd> fds) {
  if (fds.size() != 2) return absl::InternalError("not two fds");
  OPTSTATE_ASSIGN_OR_RETURN(
      completions_,
      shm::PeerSegment::Map(std::move(fds[0]),
                            shm::CompletionSegmentLayout::kSegmentBytes));
  OPTSTATE_ASSIGN_OR_RETURN(
      parameters_, shm::PeerSegment::MapFile(
                       std::move(fds[1]), shm::ParameterSegmentBytes(
                                              layout_.parameter_area_bytes())));
  const auto* answers =
      reinterpret_cast<const shm::CompletionHeader*>(completions_.data());
  if (answers->magic != shm::kCompletionMagic) {
    return absl::InternalError("the completion segment has another magic");
  }
  producer_ = std::make_unique<shm::RingProducer<shm::Submission>>(
      &header()->ring, &answers->ring,
      reinterpret_cast<shm::Submission*>(segment_.data() +
                                         shm::ClientSegmentLayout::kRing));
  consumer_ = std::make_unique<shm::RingConsumer<shm::Completion>>(
      &header()->ring, &answers->ring,
      reinterpret_cast<const shm::Completion*>(
          completions_.data() + shm::CompletionSegmentLayout::kRing));
  return absl::OkStatus();
}

absl::Status ShmTestPeer::AwaitEnd() {
  absl::Status last;
  while (true) {
    const auto reply = Receive();
    if (absl::IsUnavailable(reply.status())) return last;
    if (!reply.ok()) return reply.status();
    last = FromProto(reply->status());
  }
}

absl::Status ShmTestPeer::Register() {
  OPTSTATE_RETURN_IF_ERROR(Send(RegisterRequest()));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply reply, Receive());
  return FromProto(reply.status());
}

absl::Status ShmTestPeer::SendAttach(shm::SealedSegment segment) {
  segment_ = std::move(segment);
  return Send(AttachRequest(), {segment_.fd()});
}

absl::Status ShmTestPeer::Attach(shm::SealedSegment segment) {
  OPTSTATE_RETURN_IF_ERROR(SendAttach(std::move(segment)));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply reply, Receive());
  return FromProto(reply.status());
}

absl::Status ShmTestPeer::Open() {
  OPTSTATE_RETURN_IF_ERROR(Register());
  return Attach(MakeSegment());
}

uint64_t ShmTestPeer::Submit(shm::Submission submission) {
  submission.request_id = next_request_id++;
  while (true) {
    const absl::Status pushed = producer_->Push(submission);
    if (pushed.ok()) return submission.request_id;
    // The ring is full: the engine has yet to take a submission.
  }
}

ShmTestPeer::Answer ShmTestPeer::Await() {
  Answer answer;
  bool closed = false;
  while (true) {
    const auto found = consumer_->Take(&answer.completion);
    if (!found.ok()) {
      answer.status = found.status();
      return answer;
    }
    if (*found == shm::Poll::kEntry) break;
    if (closed) {
      answer.status = absl::UnavailableError("the engine closed");
      return answer;
    }
    // The socket is polled before the next look at the ring, so that an answer
    // given before the end is found.
    pollfd socket = {socket_.get(), POLLRDHUP, 0};
    closed = ::poll(&socket, 1, 0) > 0;
    consumer_->Wait(absl::ZeroDuration(), absl::Milliseconds(100));
  }
  const char* text = reinterpret_cast<const char*>(
      completions_.data() + shm::CompletionSegmentLayout::kText +
      consumer_->head() % shm::kRingEntries * shm::kTextBytes);
  answer.status =
      absl::Status(static_cast<absl::StatusCode>(answer.completion.status),
                   absl::string_view(text, answer.completion.text_bytes));
  consumer_->Release();
  return answer;
}

shm::Submission ShmTestPeer::Push(uint64_t step) const {
  shm::Submission submission = {};
  submission.op = static_cast<uint16_t>(shm::Op::kPush);
  submission.step = step;
  submission.numel = layout_.parameters().size();
  return submission;
}

shm::Submission ShmTestPeer::Commit(uint64_t step) const {
  shm::Submission submission = {};
  submission.op = static_cast<uint16_t>(shm::Op::kCommit);
  submission.step = step;
  submission.grad_scale = 1;
  return submission;
}

shm::ClientHeader* ShmTestPeer::header() const {
  return reinterpret_cast<shm::ClientHeader*>(segment_.data());
}

std::byte* ShmTestPeer::gradient_area() const {
  return segment_.data() + segment_layout_.gradient_area;
}

std::byte* ShmTestPeer::load_window() const {
  return segment_.data() + segment_layout_.load_window;
}

shm::CommitSettings* ShmTestPeer::commit_settings() const {
  return reinterpret_cast<shm::CommitSettings*>(
      segment_.data() + shm::ClientSegmentLayout::kSettings);
}

shm::CommitGroup* ShmTestPeer::commit_groups() const {
  return reinterpret_cast<shm::CommitGroup*>(segment_.data() +
                                             shm::ClientSegmentLayout::kGroups);
}

const std::byte* ShmTestPeer::fetch_window() const {
  return completions_.data() + shm::CompletionSegmentLayout::kFetchWindow;
}

}  // namespace optstate::transport
