#include "client/collective/tcp/tcp_collective.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/collective/collective_base.h"
#include "client/collective/sum.h"
#include "client/collective/tcp/mesh.h"
#include "client/collective/tcp/rendezvous.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Elements go over the wire as they lie in memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "frames carry elements in little endian");

constexpr size_t kNameBytesMax = 60;
// Parts begin where any element may.
constexpr uint64_t kAlignBytes = 8;
constexpr uint64_t kSliceBytesMax = uint64_t{1} << 30;

class TcpCollective final : public CollectiveBase {
 public:
  TcpCollective(const TcpOptions& options, std::unique_ptr<Mesh> mesh)
      : CollectiveBase(options.rank, options.world_size),
        timeout_(options.timeout),
        slice_bytes_(options.slice_bytes),
        mesh_(std::move(mesh)),
        payloads_(options.world_size) {}

  absl::string_view name() const override { return "tcp"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }

 protected:
  absl::Status RunAllReduce(ElementType type,
                            absl::Span<const SumBuffers> buffers) override;
  absl::Status RunReduceScatter(ElementType type,
                                absl::Span<const std::byte> in,
                                absl::Span<std::byte> out) override;
  absl::Status RunReduce(ElementType type, uint32_t root,
                         absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) override;
  absl::Status RunAllGather(absl::Span<const std::byte> in,
                            absl::Span<std::byte> out) override;
  absl::Status RunBroadcast(uint32_t root,
                            absl::Span<std::byte> buffer) override;
  absl::Status RunBarrier() override;
  void Wake() override { mesh_->Wake(); }
  void Leave(const absl::Status& why) override { mesh_->Leave(why); }

 private:
  // Begins an operation, which `frame_` describes then.
  void Begin(Operation operation, ElementType type, uint32_t root,
             uint64_t bytes);
  // Makes one exchange of payloads_.
  absl::Status Exchange();
  void ClearPayloads();
  absl::Status AllReduceSlice(ElementType type, const SumBuffers& buffers);
  // Returns where rank r's part of `bytes` begins; of rank world_size(): its
  // end. All parts but those at the end begin at multiples of kAlignBytes.
  uint64_t PartBegin(uint64_t bytes, uint32_t r) const {
    const uint64_t units = (bytes + kAlignBytes - 1) / kAlignBytes;
    return std::min(bytes, units * r / world_size() * kAlignBytes);
  }
  // Has each other rank's payload received into a place of scratch_, of `bytes`
  // each.
  void ReceiveIntoScratch(uint64_t bytes);
  // Adds up `mine` and what the other ranks have sent to scratch_.
  void SumScratch(ElementType type, const std::byte* mine,
                  absl::Span<std::byte> out);

  const absl::Duration timeout_;
  const uint64_t slice_bytes_;
  const std::unique_ptr<Mesh> mesh_;
  Frame frame_;
  absl::Time deadline_;
  std::vector<PeerPayloads> payloads_;  // by rank
  std::vector<std::byte> scratch_;
  std::vector<const std::byte*> arrays_;  // by rank, what is added up
};

void TcpCollective::Begin(Operation operation, ElementType type, uint32_t root,
                          uint64_t bytes) {
  deadline_ = absl::Now() + timeout_;
  frame_ = {.operation = operation,
            .type = type,
            .from = rank(),
            .root = root,
            .sequence = frame_.sequence + 1,
            .exchange = 0,
            .count = bytes / SizeInBytes(type),
            .payload_bytes = 0};
}

void TcpCollective::ClearPayloads() {
  std::fill(payloads_.begin(), payloads_.end(), PeerPayloads());
}

absl::Status TcpCollective::Exchange() {
  OPTSTATE_RETURN_IF_ERROR(mesh_->Exchange(frame_, payloads_, deadline_));
  ++frame_.exchange;
  return absl::OkStatus();
}

void TcpCollective::ReceiveIntoScratch(uint64_t bytes) {
  const uint64_t stride = (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  if (scratch_.size() < stride * world_size()) {
    scratch_.resize(stride * world_size());
  }
  arrays_.resize(world_size());
  for (uint32_t r = 0; r < world_size(); ++r) {
    std::byte* const place = scratch_.data() + r * stride;
    arrays_[r] = place;
    payloads_[r].receive = absl::MakeSpan(place, bytes);
  }
}

void TcpCollective::SumScratch(ElementType type, const std::byte* mine,
                               absl::Span<std::byte> out) {
  arrays_[rank()] = mine;
  SumInOrder(type, arrays_, out.size() / SizeInBytes(type), out.data());
}

absl::Status TcpCollective::AllReduceSlice(ElementType type,
                                           const SumBuffers& buffers) {
  const uint64_t bytes = buffers.in.size();
  const uint64_t my_begin = PartBegin(bytes, rank());
  const uint64_t my_bytes = PartBegin(bytes, rank() + 1) - my_begin;
  ReceiveIntoScratch(my_bytes);
  for (uint32_t r = 0; r < world_size(); ++r) {
    const uint64_t begin = PartBegin(bytes, r);
    payloads_[r].send =
        buffers.in.subspan(begin, PartBegin(bytes, r + 1) - begin);
  }
  OPTSTATE_RETURN_IF_ERROR(Exchange());
  const absl::Span<std::byte> mine = buffers.out.subspan(my_begin, my_bytes);
  SumScratch(type, buffers.in.data() + my_begin, mine);
  for (uint32_t r = 0; r < world_size(); ++r) {
    const uint64_t begin = PartBegin(bytes, r);
    payloads_[r] = {
        .send = mine,
        .receive = buffers.out.subspan(begin, PartBegin(bytes, r + 1) - begin)};
  }
  return Exchange();
}

absl::Status TcpCollective::RunAllReduce(ElementType type,
                                         absl::Span<const SumBuffers> buffers) {
  // The call has one deadline, however many sums it makes.
  const absl::Time deadline = absl::Now() + timeout_;
  for (const SumBuffers& each : buffers) {
    Begin(Operation::kAllReduce, type, 0, each.in.size());
    deadline_ = deadline;
    const uint64_t slice = slice_bytes_ * world_size();
    uint64_t begin = 0;
    do {
      const uint64_t size = std::min<uint64_t>(slice, each.in.size() - begin);
      OPTSTATE_RETURN_IF_ERROR(
          AllReduceSlice(type, {.in = each.in.subspan(begin, size),
                                .out = each.out.subspan(begin, size)}));
      begin += size;
    } while (begin < each.in.size());
  }
  return absl::OkStatus();
}

absl::Status TcpCollective::RunReduceScatter(ElementType type,
                                             absl::Span<const std::byte> in,
                                             absl::Span<std::byte> out) {
  Begin(Operation::kReduceScatter, type, 0, in.size());
  const uint64_t part = out.size();
  uint64_t begin = 0;
  do {
    const uint64_t size = std::min<uint64_t>(slice_bytes_, part - begin);
    ReceiveIntoScratch(size);
    for (uint32_t r = 0; r < world_size(); ++r) {
      payloads_[r].send = in.subspan(r * part + begin, size);
    }
    OPTSTATE_RETURN_IF_ERROR(Exchange());
    SumScratch(type, in.data() + rank() * part + begin,
               out.subspan(begin, size));
    begin += size;
  } while (begin < part);
  return absl::OkStatus();
}

absl::Status TcpCollective::RunReduce(ElementType type, uint32_t root,
                                      absl::Span<const std::byte> in,
                                      absl::Span<std::byte> out) {
  Begin(Operation::kReduce, type, root, in.size());
  uint64_t begin = 0;
  do {
    const uint64_t size = std::min<uint64_t>(slice_bytes_, in.size() - begin);
    ClearPayloads();
    if (rank() == root) {
      ReceiveIntoScratch(size);
    } else {
      payloads_[root].send = in.subspan(begin, size);
    }
    OPTSTATE_RETURN_IF_ERROR(Exchange());
    if (rank() == root) {
      SumScratch(type, in.data() + begin, out.subspan(begin, size));
    }
    begin += size;
  } while (begin < in.size());
  return absl::OkStatus();
}

absl::Status TcpCollective::RunAllGather(absl::Span<const std::byte> in,
                                         absl::Span<std::byte> out) {
  Begin(Operation::kAllGather, ElementType::kUint8, 0, in.size());
  for (uint32_t r = 0; r < world_size(); ++r) {
    payloads_[r] = {.send = in,
                    .receive = out.subspan(r * in.size(), in.size())};
  }
  OPTSTATE_RETURN_IF_ERROR(Exchange());
  std::byte* const mine = out.data() + rank() * in.size();
  if (!in.empty() && mine != in.data()) {
    std::memcpy(mine, in.data(), in.size());
  }
  return absl::OkStatus();
}

absl::Status TcpCollective::RunBroadcast(uint32_t root,
                                         absl::Span<std::byte> buffer) {
  Begin(Operation::kBroadcast, ElementType::kUint8, root, buffer.size());
  ClearPayloads();
  if (rank() == root) {
    for (PeerPayloads& each : payloads_) each.send = buffer;
  } else {
    payloads_[root].receive = buffer;
  }
  return Exchange();
}

absl::Status TcpCollective::RunBarrier() {
  Begin(Operation::kBarrier, ElementType::kUint8, 0, 0);
  ClearPayloads();
  return Exchange();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeTcpCollective(
    const TcpOptions& options, Store* store) {
  if (options.name.size() > kNameBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name of the run has ", options.name.size(),
                     " bytes, the limit is ", kNameBytesMax));
  }
  if (options.slice_bytes == 0 || options.slice_bytes > kSliceBytesMax ||
      options.slice_bytes % kAlignBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slice_bytes is a multiple of ", kAlignBytes, " from ", kAlignBytes,
        " to ", kSliceBytesMax, ", not ", options.slice_bytes));
  }
  const RendezvousOptions rendezvous = {.rank = options.rank,
                                        .world_size = options.world_size,
                                        .name = options.name,
                                        .host = options.host,
                                        .bind_host = options.bind_host};
  absl::StatusOr<std::vector<UniqueFd>> sockets =
      ConnectRanks(rendezvous, store, absl::Now() + options.connect_timeout);
  if (!sockets.ok()) {
    return Annotate(sockets.status(),
                    absl::StrCat("collective \"", options.name, "\""));
  }
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Mesh> mesh,
                            Mesh::Make(options.rank, *std::move(sockets)));
  return std::unique_ptr<Collective>(
      std::make_unique<TcpCollective>(options, std::move(mesh)));
}

}  // namespace optstate::client
