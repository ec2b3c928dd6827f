// Parameters and gradients as memory of the caller.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/c/c_api_call.h"
#include "client/c_api.h"
#include "client/c_api_sleep.h"
#include "client/client.h"
#include "client/views/gradient_views.h"
#include "client/views/parameter_views.h"
#include "proto/types/status_macros.h"

namespace client = optstate::client;

using client::CheckArrays;
using client::Guarded;

struct optstate_views {
  std::unique_ptr<client::ParameterViews> views;
};

struct optstate_gradient_views {
  std::unique_ptr<client::GradientViews> views;
};

extern "C" {

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

int optstate_views_leave(optstate_views* views) {
  return Guarded([&] { return views->views->Leave(); });
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

}  // extern "C"
