// Fits y = w x + b to noisy points, with w, b and all optimizer state in the
// daemon. Run it twice with one job name: the second run goes on where the
// first one ended, with nothing loaded from disk. With --durable the state is
// on a disk of the daemon's, and each step survives a reboot.
//
//   bazel run //client/examples:train_linear -- [--durable] my-job [ENDPOINT]

#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "proto/types/status_macros.h"

namespace {

namespace client = optstate::client;

constexpr uint32_t kW = 0;
constexpr uint32_t kB = 1;
constexpr uint64_t kSteps = 400;
constexpr int kBatch = 32;

optstate::LayoutSpec MakeLayout() {
  optstate::LayoutSpec layout;
  layout.optimizer = optstate::OptimizerKind::kAdamW;
  layout.groups = {{.options = 0}};
  for (const char* name : {"w", "b"}) {
    layout.parameters.push_back({.name = name,
                                 .shape = {1},
                                 .numel = 1,
                                 .dtype = optstate::DType::kFloat32,
                                 .gradient_dtype = optstate::DType::kFloat32,
                                 .group = 0});
  }
  return layout;
}

float Read(const client::Session& session, uint32_t parameter) {
  float value;
  std::memcpy(&value, session.parameter(parameter).data(), sizeof(value));
  return value;
}

// A new job waits for its initial parameters.
absl::Status LoadZeros(client::Session& session) {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  const float zero = 0;
  const absl::Span<const std::byte> data(
      reinterpret_cast<const std::byte*>(&zero), sizeof(zero));
  for (const uint32_t parameter : {kW, kB}) {
    OPTSTATE_RETURN_IF_ERROR(session.Load(client::StateArray::kMaster,
                                          parameter, optstate::DType::kFloat32,
                                          data));
  }
  return session.FinishLoad();
}

// Writes the gradient of the mean squared error on one batch straight into the
// session's memory. Returns the error of the regression.
absl::StatusOr<float> WriteGradients(client::Session& session,
                                     std::mt19937& generator) {
  std::uniform_real_distribution<float> input(-1, 1);
  std::normal_distribution<float> noise(0, 0.1f);
  const float w = Read(session, kW);
  const float b = Read(session, kB);
  float loss = 0;
  float gradient[2] = {0, 0};
  for (int i = 0; i < kBatch; ++i) {
    const float x = input(generator);
    const float error = w * x + b - (3 * x - 2 + noise(generator));
    loss += error * error / kBatch;
    gradient[kW] += 2 * error * x / kBatch;
    gradient[kB] += 2 * error / kBatch;
  }
  for (size_t i = 0; i < session.piece_count(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<std::byte> to,
                              session.gradient(i));
    std::memcpy(to.data(), &gradient[session.piece(i).parameter],
                sizeof(float));
  }
  return loss;
}

absl::Status Train(const std::string& job, const std::string& endpoint,
                   bool is_durable) {
  client::SessionOptions options;
  options.job = job;
  options.endpoint = endpoint;
  options.layout = MakeLayout();
  if (is_durable) {
    options.storage.placement = client::Placement::kNvme;
    options.storage.durability = client::Durability::kStep;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<client::Session> session,
                            client::Session::Open(std::move(options)));
  if (session->info().phase == client::JobPhase::kLoading) {
    OPTSTATE_RETURN_IF_ERROR(LoadZeros(*session));
  }
  const uint64_t first = session->committed_step() + 1;
  std::cout << "job " << job << " at " << session->info().endpoint
            << " starts at step " << first << "\n";
  std::mt19937 generator(static_cast<uint32_t>(first));
  client::CommitOptions commit;
  commit.groups = {optstate::AdamHyperparams{.lr = 0.05, .weight_decay = 0}};
  commit.max_norm = 1;
  for (commit.step = first; commit.step < first + kSteps; ++commit.step) {
    OPTSTATE_ASSIGN_OR_RETURN(const float loss,
                              WriteGradients(*session, generator));
    OPTSTATE_RETURN_IF_ERROR(session->Push(commit.step, 0, kW, 2));
    OPTSTATE_RETURN_IF_ERROR(session->Commit(commit).status());
    if (commit.step % 100 == 0) {
      std::cout << "step " << commit.step << "  loss " << loss << "  w "
                << Read(*session, kW) << "  b " << Read(*session, kB) << "\n";
    }
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool is_durable = !arguments.empty() && arguments[0] == "--durable";
  if (is_durable) arguments.erase(arguments.begin());
  if (arguments.empty() || arguments.size() > 2) {
    std::cerr << "usage: train_linear [--durable] JOB [ENDPOINT]\n";
    return 2;
  }
  const std::string endpoint = arguments.size() == 2 ? arguments[1] : "";
  const absl::Status status = Train(arguments[0], endpoint, is_durable);
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
