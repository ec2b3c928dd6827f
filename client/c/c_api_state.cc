// Loading and fetching whole arrays of the state.
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/c_api_call.h"
#include "client/c/c_api_options.h"
#include "client/c_api_nodes.h"
#include "client/client.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"

namespace client = optstate::client;

using client::CheckArrays;
using client::FindParameter;
using client::Guarded;

namespace {

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

int Hint(optstate_session* session, client::ParameterHint hint,
         const uint32_t* parameters, size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, parameters, count));
    return s.HintParameters(hint, {parameters, count});
  });
}

}  // namespace

extern "C" {

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

int optstate_finish_load_at(optstate_session* session, uint64_t step,
                            uint32_t loads_finished) {
  return Guarded(session, [&](client::Session& s) {
    return s.FinishLoad(client::BeginAt{step, loads_finished});
  });
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

int optstate_prefetch(optstate_session* session, const uint32_t* parameters,
                      size_t count) {
  return Hint(session, client::ParameterHint::kPrefetch, parameters, count);
}

int optstate_release(optstate_session* session, const uint32_t* parameters,
                     size_t count) {
  return Hint(session, client::ParameterHint::kRelease, parameters, count);
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
      const optstate::DType dtype =
          targets[i].array == client::StateArray::kParameter
              ? s.layout().parameters()[parameters[i]].dtype
              : optstate::DType::kFloat32;
      const uint64_t bytes =
          ArrayBytes(s.layout(), targets[i].array, parameters[i], dtype);
      OPTSTATE_RETURN_IF_ERROR(CheckArrays(outs[i], outs[i], bytes));
      targets[i].out = {static_cast<std::byte*>(outs[i]), bytes};
    }
    OPTSTATE_ASSIGN_OR_RETURN(const uint64_t fetched, s.FetchMany(targets));
    if (step != nullptr) *step = fetched;
    return absl::OkStatus();
  });
}

}  // extern "C"
