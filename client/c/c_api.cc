// Opening and closing a session, and what is known of it.
#include "client/c_api.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/c/c_api_call.h"
#include "client/c/c_api_optimizers.h"
#include "client/c/c_api_options.h"
#include "client/c/c_api_structs.h"
#include "client/client.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"

namespace client = optstate::client;

using client::CheckArrays;
using client::FindParameter;
using client::Guarded;

namespace {

constexpr size_t kInfoSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_session_info, committed_step);
constexpr size_t kOptimizerSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_optimizer_info, scalar);
constexpr size_t kPieceSizeMin = OPTSTATE_SIZE_THROUGH(optstate_piece, numel);
// A struct of this size or more asks for the gradients' memory.
constexpr size_t kPieceSizeWithGradient =
    OPTSTATE_SIZE_THROUGH(optstate_piece, gradient);

}  // namespace

extern "C" {

const char* optstate_version(void) { return optstate::kVersion.data(); }

const char* optstate_last_error(void) { return client::LastError().c_str(); }

int optstate_session_open(const optstate_session_options* options,
                          optstate_session** session) {
  return Guarded([&]() -> absl::Status {
    if (session == nullptr) {
      return absl::InvalidArgumentError("session is NULL");
    }
    *session = nullptr;
    OPTSTATE_ASSIGN_OR_RETURN(client::SessionOptions read,
                              client::ReadSessionOptions(options));
    OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<client::Session> opened,
                              client::Session::Open(std::move(read)));
    auto handle = std::make_unique<optstate_session>();
    client::SessionInfo info = opened->info();
    handle->endpoint = std::move(info.endpoint);
    handle->wire = std::move(info.wire);
    handle->session = std::move(opened);
    *session = handle.release();
    return absl::OkStatus();
  });
}

void optstate_session_close(optstate_session* session) {
  Guarded([&] {
    delete session;
    return absl::OkStatus();
  });
}

int optstate_optimizer(size_t index, optstate_optimizer_info* info) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(
        client::CheckStruct(info, kOptimizerSizeMin, "info"));
    OPTSTATE_ASSIGN_OR_RETURN(const optstate_optimizer_info from,
                              client::OptimizerInfoAt(index));
    client::WriteStruct(from, info->struct_size, info);
    return absl::OkStatus();
  });
}

int optstate_session_get_info(optstate_session* session,
                              optstate_session_info* info) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(client::CheckStruct(info, kInfoSizeMin, "info"));
    const client::SessionInfo from = s.info();
    optstate_session_info to = {};
    to.committed_step = from.committed_step;
    to.phase = static_cast<int32_t>(from.phase);
    to.created = from.created;
    to.piece_count = s.piece_count();
    to.endpoint = session->endpoint.c_str();
    to.wire = session->wire.c_str();
    to.commit_open = from.commit_open;
    to.loss_scale = from.loss_scaler.loss_scale;
    to.good_steps = from.loss_scaler.good_steps;
    to.hysteresis_left = from.loss_scaler.hysteresis_left;
    to.load_required_from = from.load_required_from;
    to.connections = from.connections;
    client::WriteStruct(to, info->struct_size, info);
    return absl::OkStatus();
  });
}

int optstate_session_pieces(optstate_session* session, optstate_piece* pieces,
                            size_t capacity) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    if (capacity == 0) return absl::OkStatus();
    OPTSTATE_RETURN_IF_ERROR(
        client::CheckStruct(pieces, kPieceSizeMin, "pieces"));
    const size_t stride = pieces->struct_size;
    auto* to = reinterpret_cast<std::byte*>(pieces);
    for (size_t i = 0; i < capacity && i < s.piece_count(); ++i) {
      const client::GradientPiece from = s.piece(i);
      optstate_piece piece = {};
      piece.parameter = from.parameter;
      piece.begin = from.begin;
      piece.numel = from.numel;
      if (stride >= kPieceSizeWithGradient) {
        OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<std::byte> gradient,
                                  s.gradient(i));
        piece.gradient = gradient.data();
      }
      client::WriteStruct(piece, stride, to + i * stride);
    }
    return absl::OkStatus();
  });
}

int optstate_session_parameter(optstate_session* session, uint32_t parameter,
                               const void** data, size_t* bytes) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(data, bytes, 1));
    OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<const std::byte> span,
                              FindParameter(s, parameter));
    OPTSTATE_RETURN_IF_ERROR(s.CheckHasParameters());
    OPTSTATE_RETURN_IF_ERROR(s.RollBackSpeculation());
    OPTSTATE_RETURN_IF_ERROR(s.CheckParameterArea());
    *data = span.data();
    *bytes = span.size();
    return absl::OkStatus();
  });
}

}  // extern "C"
