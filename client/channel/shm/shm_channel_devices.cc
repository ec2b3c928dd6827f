// The part of ShmChannel that asks for memory of devices, and offers some.

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/shm/shm_channel.h"
#include "client/channel/transport_error.h"
#include "proto/types/conversions.h"

namespace optstate::client {

absl::StatusOr<DeviceParameters::Shared> ShmChannel::ShareParameters(
    absl::string_view device, absl::Time deadline) {
  if (!connected()) return NotConnectedError();
  if (!shares_parameters_) {
    return absl::UnimplementedError(
        "the daemon is of an earlier build, which shares no memory of devices");
  }
  v1::SessionRequest request;
  request.mutable_share_parameters()->set_device(std::string(device));
  std::vector<UniqueFd> fds;
  absl::StatusOr<v1::SessionReply> reply = Call(request, {}, &fds, deadline);
  if (!reply.ok()) {
    // An engine that ends may have said so in place of an answer.
    return Lose(absl::IsUnavailable(reply.status())
                    ? TransportError(reply.status())
                    : reply.status());
  }
  const v1::ShareParametersReply& shared = reply->share_parameters();
  const absl::Status refused = FromProto(shared.refused());
  if (!refused.ok()) return refused;
  if (!reply->has_share_parameters() || fds.size() != 2) {
    return Lose(absl::InternalError(
        absl::StrCat("the daemon answered share_parameters with ", fds.size(),
                     " files, expected a table and a memory")));
  }
  return DeviceParameters::Shared{.table = std::move(fds[0]),
                                  .memory = std::move(fds[1]),
                                  .device_index = shared.device_index(),
                                  .memory_bytes = shared.memory_bytes()};
}

absl::Status ShmChannel::ShareGradients(absl::string_view device,
                                        const GradientsOffer& offer,
                                        absl::Time deadline) {
  if (!connected()) return NotConnectedError();
  if (!shares_gradients_) {
    return absl::UnimplementedError(
        "the daemon is of an earlier build, which takes no gradients from "
        "memory of devices");
  }
  v1::SessionRequest request;
  request.mutable_share_gradients()->set_device(std::string(device));
  request.mutable_share_gradients()->set_memory_bytes(offer.memory_bytes);
  std::vector<int> fds;
  if (offer.memory_bytes > 0) fds = {offer.table, offer.memory};
  absl::StatusOr<v1::SessionReply> reply =
      Call(request, fds, /*reply_fds=*/nullptr, deadline);
  if (!reply.ok()) {
    // An engine that ends may have said so in place of an answer.
    return Lose(absl::IsUnavailable(reply.status())
                    ? TransportError(reply.status())
                    : reply.status());
  }
  if (!reply->has_share_gradients()) {
    return Lose(absl::InternalError(
        "the daemon answered share_gradients with something else"));
  }
  return FromProto(reply->share_gradients().refused());
}

}  // namespace optstate::client
