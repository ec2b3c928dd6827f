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
#include "client/examples/line.h"
#include "proto/types/status_macros.h"

namespace {

namespace client = optstate::client;
namespace examples = optstate::examples;

constexpr uint64_t kSteps = 400;

// Writes the gradient of one batch straight into the session's memory. Returns
// the error of the regression.
absl::StatusOr<float> WriteGradients(client::Session& session,
                                     std::mt19937& generator) {
  const examples::BatchLoss batch = examples::ComputeLoss(session, generator);
  for (size_t i = 0; i < session.piece_count(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(const absl::Span<std::byte> to,
                              session.gradient(i));
    std::memcpy(to.data(), &batch.gradient[session.piece(i).parameter],
                sizeof(float));
  }
  return batch.loss;
}

absl::Status Train(const std::string& job, const std::string& endpoint,
                   bool is_durable) {
  client::SessionOptions options;
  options.job = job;
  options.endpoint = endpoint;
  options.layout = examples::LineLayout();
  if (is_durable) {
    options.storage.placement = client::Placement::kNvme;
    options.storage.durability = client::Durability::kStep;
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<client::Session> session,
                            client::Session::Open(std::move(options)));
  if (session->info().phase == client::JobPhase::kLoading) {
    OPTSTATE_RETURN_IF_ERROR(examples::LoadInitialValues(*session));
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
    OPTSTATE_RETURN_IF_ERROR(session->Push(commit.step, 0, examples::kW, 2));
    OPTSTATE_RETURN_IF_ERROR(session->Commit(commit).status());
    if (commit.step % 100 == 0) {
      std::cout << "step " << commit.step << "  loss " << loss << "  w "
                << examples::ReadParameter(*session, examples::kW) << "  b "
                << examples::ReadParameter(*session, examples::kB) << "\n";
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
