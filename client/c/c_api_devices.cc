// Parameters that a rank copies from a device, and gradients that it has there.
#include "client/c_api_devices.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/c_api_call.h"
#include "client/c/c_api_structs.h"
#include "client/client.h"
#include "client/views/device_gradients.h"
#include "client/views/device_parameters.h"
#include "proto/types/status_macros.h"

namespace client = optstate::client;

using client::CheckArrays;
using client::CheckStruct;
using client::Guarded;
using client::WriteStruct;

struct optstate_device_parameters {
  std::unique_ptr<client::DeviceParameters> parameters;
};

struct optstate_device_gradients {
  std::unique_ptr<client::DeviceGradients> gradients;
};

extern "C" {

int optstate_device_parameters_map(optstate_session* session,
                                   const char* device,
                                   optstate_device_parameters** out) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(device, out, 1));
    OPTSTATE_ASSIGN_OR_RETURN(
        std::unique_ptr<client::DeviceParameters> parameters,
        s.MapDeviceParameters(device));
    *out = new optstate_device_parameters{std::move(parameters)};
    return absl::OkStatus();
  });
}

int optstate_device_parameters_memory(
    const optstate_device_parameters* parameters, int* file, uint64_t* bytes) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, file, 1));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, bytes, 1));
    *file = parameters->parameters->memory_file();
    *bytes = parameters->parameters->memory_bytes();
    return absl::OkStatus();
  });
}

int optstate_device_parameters_is_over(
    const optstate_device_parameters* parameters, int32_t* is_over) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, is_over, 1));
    *is_over = parameters->parameters->is_over() ? 1 : 0;
    return absl::OkStatus();
  });
}

int optstate_device_parameters_find(
    optstate_session* session, const optstate_device_parameters* parameters,
    uint32_t parameter, optstate_device_range* ranges, size_t capacity,
    size_t* count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, count, 1));
    if (capacity > 0) {
      OPTSTATE_RETURN_IF_ERROR(CheckStruct(
          ranges, OPTSTATE_SIZE_THROUGH(optstate_device_range, offset_bytes),
          "ranges"));
    }
    std::vector<client::DeviceParameters::Range> found;
    OPTSTATE_RETURN_IF_ERROR(
        s.FindOnDevice(*parameters->parameters, parameter, &found));
    *count = found.size();
    const size_t struct_size = capacity > 0 ? ranges->struct_size : 0;
    auto* const to = reinterpret_cast<std::byte*>(ranges);
    for (size_t i = 0; i < std::min(capacity, found.size()); ++i) {
      optstate_device_range range = {};
      range.begin = found[i].begin;
      range.end = found[i].end;
      range.offset_bytes = found[i].offset_bytes;
      WriteStruct(range, struct_size, to + i * struct_size);
    }
    return absl::OkStatus();
  });
}

int optstate_device_parameters_find_whole(
    optstate_session* session, const optstate_device_parameters* parameters,
    const uint32_t* wanted, size_t count, uint64_t* offsets) {
  static_assert(OPTSTATE_NOWHERE == client::DeviceParameters::kNowhere);
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, parameters, 1));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(wanted, offsets, count));
    return s.FindWholeOnDevice(*parameters->parameters, {wanted, count},
                               {offsets, count});
  });
}

void optstate_device_parameters_free(optstate_device_parameters* parameters) {
  delete parameters;
}

int optstate_device_gradients_share(optstate_session* session,
                                    const char* device, int memory_file,
                                    uint64_t memory_bytes,
                                    optstate_device_gradients** out) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(device, out, 1));
    OPTSTATE_ASSIGN_OR_RETURN(
        std::unique_ptr<client::DeviceGradients> gradients,
        s.ShareGradients(device, memory_file, memory_bytes));
    *out = new optstate_device_gradients{std::move(gradients)};
    return absl::OkStatus();
  });
}

int optstate_device_gradients_mark(optstate_device_gradients* gradients,
                                   uint64_t step, const uint32_t* parameters,
                                   const uint64_t* offsets, size_t count) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(gradients, gradients, 1));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, offsets, count));
    return gradients->gradients->Mark(step, {parameters, count},
                                      {offsets, count});
  });
}

int optstate_device_gradients_clear(optstate_device_gradients* gradients,
                                    const uint32_t* parameters, size_t count) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(gradients, gradients, 1));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, parameters, count));
    return gradients->gradients->Clear({parameters, count});
  });
}

int optstate_device_gradients_is_shared(
    optstate_session* session, const optstate_device_gradients* gradients,
    int32_t* is_shared) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(gradients, is_shared, 1));
    *is_shared = s.IsShared(*gradients->gradients) ? 1 : 0;
    return absl::OkStatus();
  });
}

int optstate_device_gradients_give_up(optstate_session* session) {
  return Guarded(session,
                 [&](client::Session& s) { return s.GiveUpGradients(); });
}

void optstate_device_gradients_free(optstate_device_gradients* gradients) {
  delete gradients;
}

}  // extern "C"
