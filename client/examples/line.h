#ifndef OPTSTATE_CLIENT_EXAMPLES_LINE_H_
#define OPTSTATE_CLIENT_EXAMPLES_LINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "proto/types/layout.h"

// The model of the examples: y = w x + b, fitted to noisy points of
// y = 3 x - 2.

namespace optstate::examples {

// The parameters, in the order of the layout.
inline constexpr uint32_t kW = 0;
inline constexpr uint32_t kB = 1;

LayoutSpec LineLayout();

// Returns a parameter as the daemon has it after the last step.
float ReadParameter(const client::Session& session, uint32_t parameter);

// The memory of what a new job begins with: each parameter is 0.
absl::Span<const std::byte> InitialValue();

// A new job waits for its initial parameters.
absl::Status LoadInitialValues(client::Session& session);

// The mean squared error on a batch of points, and its gradient.
struct BatchLoss {
  float loss = 0;
  std::array<float, 2> gradient = {0, 0};  // by parameter
};
BatchLoss ComputeLoss(const client::Session& session, std::mt19937& generator);

}  // namespace optstate::examples

#endif  // OPTSTATE_CLIENT_EXAMPLES_LINE_H_
