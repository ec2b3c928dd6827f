#include "client/examples/line.h"

#include <cstring>

#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "proto/types/status_macros.h"

namespace optstate::examples {
namespace {

constexpr int kBatch = 32;

}  // namespace

LayoutSpec LineLayout() {
  LayoutSpec layout;
  layout.optimizer = OptimizerKind::kAdamW;
  layout.groups = {{.options = 0}};
  for (const char* name : {"w", "b"}) {
    layout.parameters.push_back({.name = name,
                                 .shape = {1},
                                 .numel = 1,
                                 .dtype = DType::kFloat32,
                                 .gradient_dtype = DType::kFloat32,
                                 .group = 0});
  }
  return layout;
}

float ReadParameter(const client::Session& session, uint32_t parameter) {
  float value;
  std::memcpy(&value, session.parameter(parameter).data(), sizeof(value));
  return value;
}

absl::Span<const std::byte> InitialValue() {
  static constexpr float kZero = 0;
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&kZero),
                             sizeof(kZero));
}

absl::Status LoadInitialValues(client::Session& session) {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  for (const uint32_t parameter : {kW, kB}) {
    OPTSTATE_RETURN_IF_ERROR(session.Load(client::StateArray::kMaster,
                                          parameter, DType::kFloat32,
                                          InitialValue()));
  }
  return session.FinishLoad();
}

BatchLoss ComputeLoss(const client::Session& session, std::mt19937& generator) {
  std::uniform_real_distribution<float> input(-1, 1);
  std::normal_distribution<float> noise(0, 0.1f);
  const float w = ReadParameter(session, kW);
  const float b = ReadParameter(session, kB);
  BatchLoss batch;
  for (int i = 0; i < kBatch; ++i) {
    const float x = input(generator);
    const float error = w * x + b - (3 * x - 2 + noise(generator));
    batch.loss += error * error / kBatch;
    batch.gradient[kW] += 2 * error * x / kBatch;
    batch.gradient[kB] += 2 * error / kBatch;
  }
  return batch;
}

}  // namespace optstate::examples
