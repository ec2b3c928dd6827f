#include "server/transport/shm/shm_segments.h"

#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::transport {
namespace {

// The fields of a client header before its ring, copied at once.
struct ClientHeaderFields {
  uint64_t magic;
  uint32_t version;
  uint32_t group_count;
  uint64_t segment_bytes;
  uint64_t gradient_area_bytes;
  uint8_t layout_hash[32];
};
static_assert(sizeof(ClientHeaderFields) == 64);
static_assert(offsetof(ClientHeaderFields, layout_hash) ==
              offsetof(shm::ClientHeader, layout_hash));

absl::Status CheckField(absl::string_view name, uint64_t found,
                        uint64_t expected) {
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("client segment: ", name, " is ", found, ", expected ",
                   expected, "; client and daemon do not agree"));
}

absl::Status CheckHeader(const shm::PeerSegment& client,
                         const AttachPlan& plan) {
  ClientHeaderFields header;
  std::memcpy(&header, client.data(), sizeof(header));
  OPTSTATE_RETURN_IF_ERROR(
      CheckField("magic", header.magic, shm::kClientMagic));
  OPTSTATE_RETURN_IF_ERROR(
      CheckField("version", header.version, plan.client_segment_version));
  OPTSTATE_RETURN_IF_ERROR(
      CheckField("group_count", header.group_count, plan.group_count));
  OPTSTATE_RETURN_IF_ERROR(
      CheckField("segment_bytes", header.segment_bytes, client.size()));
  OPTSTATE_RETURN_IF_ERROR(CheckField("gradient_area_bytes",
                                      header.gradient_area_bytes,
                                      plan.gradient_area_bytes));
  const absl::string_view hash(reinterpret_cast<char*>(header.layout_hash),
                               sizeof(header.layout_hash));
  if (hash == plan.layout_hash) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "client segment: layout_hash is ", absl::BytesToHexString(hash),
      ", expected ", absl::BytesToHexString(plan.layout_hash)));
}

absl::StatusOr<shm::SealedSegment> CreateCompletion(const AttachPlan& plan) {
  OPTSTATE_ASSIGN_OR_RETURN(
      shm::SealedSegment segment,
      shm::SealedSegment::Create(
          absl::StrCat("optstate-completions-", plan.rank),
          shm::CompletionSegmentLayout::kSegmentBytes));
  auto* header = new (segment.data()) shm::CompletionHeader{};
  header->magic = shm::kCompletionMagic;
  header->version = shm::kCompletionSegmentVersion;
  header->segment_bytes = segment.size();
  header->parameter_area_bytes = plan.parameter_area_bytes;
  return segment;
}

}  // namespace

ShmSegments::ShmSegments(shm::PeerSegment client, shm::SealedSegment completion,
                         shm::ClientSegmentLayout layout)
    : client_(std::move(client)),
      completion_(std::move(completion)),
      layout_(layout) {}

absl::StatusOr<ShmSegments> ShmSegments::Open(UniqueFd client_fd,
                                              const AttachPlan& plan) {
  const shm::ClientSegmentLayout layout(
      plan.group_count, plan.gradient_area_bytes, plan.gradient_lead_bytes);
  absl::StatusOr<shm::PeerSegment> client = shm::PeerSegment::MapPartly(
      std::move(client_fd), layout.segment_bytes,
      plan.pages_follow ? layout.gradient_pages() : layout.segment_bytes);
  if (!client.ok()) return Annotate(client.status(), "client segment");
  OPTSTATE_RETURN_IF_ERROR(CheckHeader(*client, plan));
  OPTSTATE_ASSIGN_OR_RETURN(shm::SealedSegment completion,
                            CreateCompletion(plan));
  return ShmSegments(*std::move(client), std::move(completion), layout);
}

}  // namespace optstate::transport
