// Fits y = w x + b on several nodes, each with a daemon of its own, that share
// out the parameters: one node keeps the state of w, and another that of b
// (ZeRO-1). Ranks find each other through a folder that all of them see, a
// fresh one for each run:
//
//   OPTSTATE_NODE=a train_shared_out my-job unix:A 0 2 FOLDER &
//   OPTSTATE_NODE=b train_shared_out my-job unix:B 1 2 FOLDER
//
// Kill one at any time, and start all again with another folder: they go on
// from the step that all nodes have. $OPTSTATE_NODE is for several daemons on
// one machine; machines of their own need none.

#include <array>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/collective/nodes/places.h"
#include "client/collective/sharded/shared_out.h"
#include "client/collective/store/file_store.h"
#include "client/collective/tcp/tcp_collective.h"
#include "proto/types/status_macros.h"

namespace {

namespace client = optstate::client;

constexpr int kBatch = 32;

// w and b.
using Pair = std::array<float, 2>;

struct Arguments {
  uint64_t steps = 400;
  std::string job;
  std::string endpoint;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string folder;
};

bool Parse(std::vector<std::string> words, Arguments* arguments) {
  if (words.size() > 1 && words[0] == "--steps") {
    if (!absl::SimpleAtoi(words[1], &arguments->steps)) return false;
    words.erase(words.begin(), words.begin() + 2);
  }
  if (words.size() != 5) return false;
  arguments->job = words[0];
  arguments->endpoint = words[1];
  arguments->folder = words[4];
  return absl::SimpleAtoi(words[2], &arguments->rank) &&
         absl::SimpleAtoi(words[3], &arguments->world_size);
}

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

std::array<absl::Span<std::byte>, 2> BytesOf(Pair& pair) {
  return {
      absl::MakeSpan(reinterpret_cast<std::byte*>(&pair[0]), sizeof(float)),
      absl::MakeSpan(reinterpret_cast<std::byte*>(&pair[1]), sizeof(float))};
}

// A new job waits for its initial parameters; each rank loads its own.
absl::Status LoadZeros(client::Session& session, client::SharedOut& shared) {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  Pair zeros = {0, 0};
  const std::array<absl::Span<std::byte>, 2> bytes = BytesOf(zeros);
  for (uint32_t parameter = 0; parameter < bytes.size(); ++parameter) {
    OPTSTATE_RETURN_IF_ERROR(shared.Load(session, client::StateArray::kMaster,
                                         parameter, optstate::DType::kFloat32,
                                         bytes[parameter]));
  }
  return session.FinishLoad();
}

// Computes the gradients of this rank's own batch.
Pair ComputeGradients(const Pair& parameters, std::mt19937& generator) {
  std::uniform_real_distribution<float> input(-1, 1);
  std::normal_distribution<float> noise(0, 0.1f);
  Pair gradient = {0, 0};
  for (int i = 0; i < kBatch; ++i) {
    const float x = input(generator);
    const float error =
        parameters[0] * x + parameters[1] - (3 * x - 2 + noise(generator));
    gradient[0] += 2 * error * x / kBatch;
    gradient[1] += 2 * error / kBatch;
  }
  return gradient;
}

absl::Status TrainWith(const Arguments& arguments, client::SharedOut& shared,
                       client::Session& session) {
  Pair parameters = {};
  const std::array<absl::Span<std::byte>, 2> to = BytesOf(parameters);
  OPTSTATE_RETURN_IF_ERROR(shared.Spread(session, to));
  const uint64_t first = session.committed_step() + 1;
  std::mt19937 generator(static_cast<uint32_t>(first * 1000 + arguments.rank));
  client::CommitOptions commit;
  commit.groups = {optstate::AdamHyperparams{.lr = 0.05, .weight_decay = 0}};
  commit.max_norm = 1;
  for (commit.step = first; commit.step < first + arguments.steps;
       ++commit.step) {
    Pair gradient = ComputeGradients(parameters, generator);
    const std::array<absl::Span<std::byte>, 2> bytes = BytesOf(gradient);
    const std::array<absl::Span<const std::byte>, 2> from = {bytes[0],
                                                             bytes[1]};
    OPTSTATE_RETURN_IF_ERROR(shared.Step(session, commit, from, to).status());
    if (commit.step % 100 == 0) {
      std::cout << "step " << commit.step << "  w " << parameters[0] << "  b "
                << parameters[1] << std::endl;
    }
  }
  return absl::OkStatus();
}

absl::Status Train(const Arguments& arguments) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<client::FileStore> store,
                            client::FileStore::Open(arguments.folder));
  client::TcpOptions tcp;
  tcp.rank = arguments.rank;
  tcp.world_size = arguments.world_size;
  tcp.name = arguments.job;
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<client::Collective> collective,
      client::MakeTcpCollective(tcp, store.get()));
  OPTSTATE_ASSIGN_OR_RETURN(const std::string node, client::NodeName());
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<client::SharedOut> shared,
      client::SharedOut::Make(collective.get(), node, MakeLayout(),
                              client::SharedOutOptions()));

  client::SessionOptions options;
  options.job = arguments.job;
  options.endpoint = arguments.endpoint;
  shared->Place(&options);
  OPTSTATE_RETURN_IF_ERROR(shared->Settle(options));
  const absl::StatusOr<std::unique_ptr<client::Session>> session =
      client::Session::Open(options);
  OPTSTATE_RETURN_IF_ERROR(shared->Agree(session.status()));
  OPTSTATE_RETURN_IF_ERROR(shared->CheckAttached(**session));
  std::cout << "rank " << arguments.rank << " on "
            << shared->places().node_name() << " starts at step "
            << (*session)->committed_step() + 1 << std::endl;
  if ((*session)->info().phase == client::JobPhase::kLoading) {
    OPTSTATE_RETURN_IF_ERROR(LoadZeros(**session, *shared));
  }
  return TrainWith(arguments, *shared, **session);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse({argv + 1, argv + argc}, &arguments)) {
    std::cerr << "usage: train_shared_out [--steps N] JOB ENDPOINT RANK "
                 "WORLD_SIZE FOLDER\n";
    return 2;
  }
  const absl::Status status = Train(arguments);
  if (status.ok()) return 0;
  std::cerr << "rank " << arguments.rank << ": " << status << "\n";
  return 1;
}
