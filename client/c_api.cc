#include "client/c_api.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/c_api_optimizers.h"
#include "client/c_api_options.h"
#include "client/c_api_structs.h"
#include "client/client.h"
#include "proto/types/status_macros.h"
#include "proto/types/version.h"

namespace client = optstate::client;

struct optstate_session {
  std::unique_ptr<client::Session> session;
  // The strings to which optstate_session_info points.
  std::string endpoint;
  std::string wire;
};

struct optstate_views {
  std::unique_ptr<client::ParameterViews> views;
};

struct optstate_gradient_views {
  std::unique_ptr<client::GradientViews> views;
};

namespace {

constexpr size_t kInfoSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_session_info, committed_step);
constexpr size_t kOptimizerSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_optimizer_info, scalar);
constexpr size_t kOutcomeSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_outcome, step);
constexpr size_t kPieceSizeMin = OPTSTATE_SIZE_THROUGH(optstate_piece, numel);
// A struct of this size or more asks for the gradients' memory.
constexpr size_t kPieceSizeWithGradient =
    OPTSTATE_SIZE_THROUGH(optstate_piece, gradient);

std::string& LastError() {
  thread_local std::string text;
  return text;
}

int Report(const absl::Status& status) {
  if (!status.ok()) LastError() = std::string(status.message());
  return static_cast<int>(status.code());
}

// Runs one call of the API and lets no exception leave it.
int Guarded(absl::FunctionRef<absl::Status()> call) {
  try {
    return Report(call());
  } catch (const std::bad_alloc&) {
    return Report(absl::ResourceExhaustedError("out of memory"));
  } catch (const std::exception& error) {
    return Report(absl::InternalError(error.what()));
  } catch (...) {
    return Report(absl::InternalError("unknown exception"));
  }
}

int Guarded(optstate_session* session,
            absl::FunctionRef<absl::Status(client::Session&)> call) {
  return Guarded([&]() -> absl::Status {
    if (session == nullptr) {
      return absl::InvalidArgumentError("session is NULL");
    }
    return call(*session->session);
  });
}

absl::Status CheckArrays(const void* a, const void* b, size_t count) {
  if (count == 0 || (a != nullptr && b != nullptr)) return absl::OkStatus();
  return absl::InvalidArgumentError("an array is NULL");
}

absl::StatusOr<absl::Span<const std::byte>> FindParameter(
    const client::Session& session, uint32_t parameter) {
  const size_t count = session.layout().parameters().size();
  if (parameter < count) return session.parameter(parameter);
  return absl::InvalidArgumentError(
      absl::StrCat("parameter ", parameter, " of ", count));
}

// `outcome` may be null.
absl::Status CheckOutcome(const optstate_outcome* outcome) {
  if (outcome == nullptr) return absl::OkStatus();
  return client::CheckStruct(outcome, kOutcomeSizeMin, "outcome");
}

void WriteOutcome(const client::Outcome& from, optstate_outcome* outcome) {
  if (outcome == nullptr) return;
  optstate_outcome to = {};
  to.step = from.step;
  to.applied = from.applied;
  to.found_inf = from.found_inf;
  to.gradient_norm = from.gradient_norm;
  to.clip_coefficient = from.clip_coefficient;
  to.update_ns = from.update_ns;
  to.loss_scale = from.loss_scale;
  to.durable_step = from.durable_step;
  client::WriteStruct(to, outcome->struct_size, outcome);
}

// The size in bytes of data that the caller only points to: numel elements, or
// one count.
uint64_t ArrayBytes(const optstate::Layout& layout, client::StateArray array,
                    uint32_t parameter, optstate::DType dtype) {
  if (IsPerParameter(array)) return sizeof(int64_t);
  return client::ElementCount(layout, array, layout.parameters()[parameter]) *
         optstate::SizeInBytes(dtype);
}

absl::Status LoadArray(client::Session& session, int32_t array,
                       uint32_t parameter, int32_t dtype, const void* data) {
  OPTSTATE_ASSIGN_OR_RETURN(const client::StateArray which,
                            client::ReadStateArray(array));
  optstate::DType type = optstate::DType::kFloat32;
  if (!IsPerParameter(which)) {
    OPTSTATE_ASSIGN_OR_RETURN(type, client::ReadDType(dtype, "dtype"));
  }
  OPTSTATE_RETURN_IF_ERROR(FindParameter(session, parameter).status());
  const uint64_t bytes = ArrayBytes(session.layout(), which, parameter, type);
  OPTSTATE_RETURN_IF_ERROR(CheckArrays(data, data, bytes));
  return session.Load(which, parameter, type,
                      {static_cast<const std::byte*>(data), bytes});
}

}  // namespace

extern "C" {

const char* optstate_version(void) { return optstate::kVersion.data(); }

const char* optstate_last_error(void) { return LastError().c_str(); }

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
    *data = span.data();
    *bytes = span.size();
    return absl::OkStatus();
  });
}

int optstate_views_map(optstate_session* session, optstate_views** out) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<client::ParameterViews> views,
                              s.MapViews());
    *out = new optstate_views{std::move(views)};
    return absl::OkStatus();
  });
}

int optstate_views_parameter(optstate_views* views, uint32_t parameter,
                             void** data, size_t* bytes) {
  return Guarded([&] {
    const absl::Span<std::byte> span = views->views->parameter(parameter);
    *data = span.data();
    *bytes = span.size();
    return absl::OkStatus();
  });
}

int optstate_views_find_written(optstate_session* session,
                                optstate_views* views, uint32_t* parameters,
                                size_t capacity, size_t* count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    std::vector<uint32_t> found;
    OPTSTATE_RETURN_IF_ERROR(s.FindWritten(views->views.get(), &found));
    if (found.size() > capacity) {
      return absl::InvalidArgumentError(
          absl::StrCat("room for ", capacity, " parameters, ", found.size(),
                       " were written"));
    }
    std::copy(found.begin(), found.end(), parameters);
    *count = found.size();
    return absl::OkStatus();
  });
}

int optstate_views_release(optstate_views* views) {
  return Guarded([&] { return views->views->Release(); });
}

int optstate_views_keep(optstate_views* views) {
  return Guarded([&] { return views->views->Keep(); });
}

void optstate_views_free(optstate_views* views) { delete views; }

int optstate_gradient_views_map(optstate_session* session,
                                optstate_gradient_views** out,
                                int64_t* distance) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(out, distance, 1));
    OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<client::GradientViews> views,
                              s.MapGradientViews());
    *distance = views->distance();
    *out = new optstate_gradient_views{std::move(views)};
    return absl::OkStatus();
  });
}

int optstate_gradient_views_put(optstate_gradient_views* views, void* to,
                                const void* gradient, size_t bytes) {
  return Guarded([&] {
    return views->views->Put(to,
                             {static_cast<const std::byte*>(gradient), bytes});
  });
}

int optstate_gradient_views_keep(optstate_gradient_views* views,
                                 const void* const* data, const size_t* bytes,
                                 size_t count) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(data, bytes, count));
    std::vector<absl::Span<const std::byte>> parts(count);
    for (size_t i = 0; i < count; ++i) {
      parts[i] = {static_cast<const std::byte*>(data[i]), bytes[i]};
    }
    return views->views->Keep(parts);
  });
}

void optstate_gradient_views_free(optstate_gradient_views* views) {
  delete views;
}

int optstate_push(optstate_session* session, uint64_t step, uint32_t micro_step,
                  uint32_t first, uint32_t count) {
  return Guarded(session, [&](client::Session& s) {
    return s.Push(step, micro_step, first, count);
  });
}

int optstate_push_gradients(optstate_session* session, uint64_t step,
                            uint32_t micro_step, const uint32_t* parameters,
                            const void* const* gradients, size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, gradients, count));
    return s.PushGradients(step, micro_step,
                           absl::MakeConstSpan(parameters, count),
                           absl::MakeConstSpan(gradients, count));
  });
}

int optstate_flush(optstate_session* session) {
  return Guarded(session, [](client::Session& s) { return s.Flush(); });
}

int optstate_end_micro_step(optstate_session* session, uint64_t step,
                            uint32_t micro_step) {
  return Guarded(session, [=](client::Session& s) {
    return s.EndMicroStep(step, micro_step);
  });
}

int optstate_commit(optstate_session* session,
                    const optstate_commit_options* options,
                    optstate_outcome* outcome) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckOutcome(outcome));
    OPTSTATE_ASSIGN_OR_RETURN(const client::CommitOptions read,
                              client::ReadCommitOptions(options));
    OPTSTATE_ASSIGN_OR_RETURN(const client::ParameterTargets targets,
                              client::ReadCommitTargets(options));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome from,
                              s.Commit(read, targets));
    WriteOutcome(from, outcome);
    return absl::OkStatus();
  });
}

int optstate_commit_wait(optstate_session* session, optstate_outcome* outcome) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckOutcome(outcome));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome from, s.CommitWait());
    WriteOutcome(from, outcome);
    return absl::OkStatus();
  });
}

int optstate_writes_parameters(optstate_session* session, int32_t* writes) {
  return Guarded(session, [&](client::Session& s) {
    *writes = s.WritesParameters() ? 1 : 0;
    return absl::OkStatus();
  });
}

int optstate_abort(optstate_session* session, uint64_t step) {
  return Guarded(session, [&](client::Session& s) { return s.Abort(step); });
}

int optstate_read_parameters(optstate_session* session,
                             const uint32_t* parameters,
                             void* const* destinations, size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, destinations, count));
    return s.ReadParameters({.parameters = {parameters, count},
                             .destinations = {destinations, count}});
  });
}

int optstate_find_changed(optstate_session* session, const uint32_t* parameters,
                          void* const* copies, size_t count, uint32_t* changed,
                          size_t* changed_count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, copies, count));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(changed, changed_count, 1));
    std::vector<uint32_t> found;
    OPTSTATE_RETURN_IF_ERROR(s.FindChanged(
        {.parameters = {parameters, count}, .destinations = {copies, count}},
        &found));
    std::copy(found.begin(), found.end(), changed);
    *changed_count = found.size();
    return absl::OkStatus();
  });
}

int optstate_note_copies(optstate_session* session, const uint32_t* parameters,
                         size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, parameters, count));
    return s.NoteCopies({parameters, count});
  });
}

int optstate_begin_load(optstate_session* session) {
  return Guarded(session, [](client::Session& s) { return s.BeginLoad(); });
}

int optstate_begin_same_load(optstate_session* session) {
  return Guarded(session, [](client::Session& s) {
    return s.BeginLoad(client::LoadContent::kSame);
  });
}

int optstate_load(optstate_session* session, int32_t array, uint32_t parameter,
                  int32_t dtype, const void* data) {
  return Guarded(session, [&](client::Session& s) {
    return LoadArray(s, array, parameter, dtype, data);
  });
}

int optstate_load_many(optstate_session* session, const int32_t* arrays,
                       const uint32_t* parameters, const int32_t* dtypes,
                       const void* const* data, size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(arrays, parameters, count));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(dtypes, data, count));
    for (size_t i = 0; i < count; ++i) {
      OPTSTATE_RETURN_IF_ERROR(
          LoadArray(s, arrays[i], parameters[i], dtypes[i], data[i]));
    }
    return absl::OkStatus();
  });
}

int optstate_finish_load(optstate_session* session) {
  return Guarded(session, [](client::Session& s) { return s.FinishLoad(); });
}

int optstate_fetch(optstate_session* session, int32_t array, uint32_t parameter,
                   void* out, size_t out_bytes, uint64_t* step) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(const client::StateArray which,
                              client::ReadStateArray(array));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(out, out, out_bytes));
    OPTSTATE_ASSIGN_OR_RETURN(
        const uint64_t fetched,
        s.Fetch(which, parameter, {static_cast<std::byte*>(out), out_bytes}));
    if (step != nullptr) *step = fetched;
    return absl::OkStatus();
  });
}

int optstate_fetch_many(optstate_session* session, const int32_t* arrays,
                        const uint32_t* parameters, void* const* outs,
                        size_t count, uint64_t* step) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(arrays, parameters, count));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(outs, outs, count));
    std::vector<client::FetchTarget> targets(count);
    for (size_t i = 0; i < count; ++i) {
      OPTSTATE_ASSIGN_OR_RETURN(targets[i].array,
                                client::ReadStateArray(arrays[i]));
      OPTSTATE_RETURN_IF_ERROR(FindParameter(s, parameters[i]).status());
      targets[i].parameter = parameters[i];
      const uint64_t bytes =
          ArrayBytes(s.layout(), targets[i].array, parameters[i],
                     optstate::DType::kFloat32);
      OPTSTATE_RETURN_IF_ERROR(CheckArrays(outs[i], outs[i], bytes));
      targets[i].out = {static_cast<std::byte*>(outs[i]), bytes};
    }
    OPTSTATE_ASSIGN_OR_RETURN(const uint64_t fetched, s.FetchMany(targets));
    if (step != nullptr) *step = fetched;
    return absl::OkStatus();
  });
}

}  // extern "C"
