// Fits y = w x + b on several nodes, each with a daemon of its own, which all
// take the same steps with the gradients of all ranks. Ranks find each other
// through a folder that all of them see, a fresh one for each run:
//
//   OPTSTATE_NODE=a train_on_nodes my-job unix:A 0 2 FOLDER &
//   OPTSTATE_NODE=b train_on_nodes my-job unix:B 1 2 FOLDER
//
// Kill one at any time, and start all again with another folder: they go on
// from the step that all nodes have. $OPTSTATE_NODE is for several daemons on
// one machine; machines of their own need none.

#include <array>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "client/client.h"
#include "client/collective/gradients/gradient_reducer.h"
#include "client/collective/nodes/node_agreement.h"
#include "client/collective/nodes/places.h"
#include "client/collective/store/file_store.h"
#include "client/collective/tcp/tcp_collective.h"
#include "proto/types/status_macros.h"

namespace {

namespace client = optstate::client;

constexpr int kBatch = 32;
// Parameter 0 is w, parameter 1 is b.
constexpr std::array<uint32_t, 2> kParameters = {0, 1};

struct Arguments {
  uint64_t steps = 400;
  bool is_quantised = false;
  std::string job;
  std::string endpoint;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  std::string folder;
  std::string host = "127.0.0.1";
};

bool Parse(std::vector<std::string> words, Arguments* arguments) {
  while (!words.empty() && words[0].rfind("--", 0) == 0) {
    if (words[0] == "--quantised") {
      arguments->is_quantised = true;
    } else if (words[0] == "--steps" && words.size() > 1) {
      if (!absl::SimpleAtoi(words[1], &arguments->steps)) return false;
      words.erase(words.begin());
    } else {
      return false;
    }
    words.erase(words.begin());
  }
  if (words.size() < 5 || words.size() > 6) return false;
  arguments->job = words[0];
  arguments->endpoint = words[1];
  arguments->folder = words[4];
  if (words.size() == 6) arguments->host = words[5];
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

float Read(const client::Session& session, uint32_t parameter) {
  float value;
  std::memcpy(&value, session.parameter(parameter).data(), sizeof(value));
  return value;
}

// A new job waits for its initial parameters, the same on all nodes.
absl::Status LoadZeros(client::Session& session,
                       client::NodeAgreement& agreement) {
  OPTSTATE_RETURN_IF_ERROR(session.BeginLoad());
  const float zero = 0;
  const absl::Span<const std::byte> data(
      reinterpret_cast<const std::byte*>(&zero), sizeof(zero));
  for (const uint32_t parameter : kParameters) {
    OPTSTATE_RETURN_IF_ERROR(session.Load(client::StateArray::kMaster,
                                          parameter, optstate::DType::kFloat32,
                                          data));
    agreement.NoteLoad(client::StateArray::kMaster, parameter, data);
  }
  return session.FinishLoad();
}

// Computes the gradients of this rank's own batch.
std::array<float, 2> ComputeGradients(const client::Session& session,
                                      std::mt19937& generator) {
  std::uniform_real_distribution<float> input(-1, 1);
  std::normal_distribution<float> noise(0, 0.1f);
  const float w = Read(session, 0);
  const float b = Read(session, 1);
  std::array<float, 2> gradient = {0, 0};
  for (int i = 0; i < kBatch; ++i) {
    const float x = input(generator);
    const float error = w * x + b - (3 * x - 2 + noise(generator));
    gradient[0] += 2 * error * x / kBatch;
    gradient[1] += 2 * error / kBatch;
  }
  return gradient;
}

absl::Status TrainWith(const Arguments& arguments,
                       client::NodeAgreement& agreement,
                       client::GradientReducer& reducer,
                       client::Session& session) {
  const uint64_t first = session.committed_step() + 1;
  std::cout << "rank " << arguments.rank << " on "
            << agreement.places().node_name() << " starts at step " << first
            << std::endl;
  std::mt19937 generator(static_cast<uint32_t>(first * 1000 + arguments.rank));
  client::CommitOptions commit;
  commit.groups = {optstate::AdamHyperparams{.lr = 0.05, .weight_decay = 0}};
  commit.max_norm = 1;
  for (commit.step = first; commit.step < first + arguments.steps;
       ++commit.step) {
    std::array<float, 2> gradient = ComputeGradients(session, generator);
    const std::array<absl::Span<std::byte>, 2> spans = {
        absl::MakeSpan(reinterpret_cast<std::byte*>(&gradient[0]), 4),
        absl::MakeSpan(reinterpret_cast<std::byte*>(&gradient[1]), 4)};
    OPTSTATE_RETURN_IF_ERROR(reducer.Reduce(spans));
    const std::array<const void*, 2> pointers = {&gradient[0], &gradient[1]};
    OPTSTATE_RETURN_IF_ERROR(
        session.PushGradients(commit.step, 0, kParameters, pointers));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome outcome,
                              agreement.Take(session, commit));
    if (outcome.applied) reducer.NoteApplied();
    if (commit.step % 100 == 0) {
      std::cout << "step " << commit.step << "  w " << Read(session, 0)
                << "  b " << Read(session, 1) << std::endl;
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
  tcp.host = arguments.host;
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<client::Collective> collective,
      client::MakeTcpCollective(tcp, store.get()));
  OPTSTATE_ASSIGN_OR_RETURN(const std::string node, client::NodeName());
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<client::NodeAgreement> agreement,
      client::NodeAgreement::Make(collective.get(), node));

  client::SessionOptions options;
  options.job = arguments.job;
  options.endpoint = arguments.endpoint;
  options.layout = MakeLayout();
  agreement->Place(&options);
  OPTSTATE_RETURN_IF_ERROR(agreement->Settle(options));
  const absl::StatusOr<std::unique_ptr<client::Session>> session =
      client::Session::Open(options);
  OPTSTATE_RETURN_IF_ERROR(agreement->Agree(session.status()));
  OPTSTATE_RETURN_IF_ERROR(agreement->CheckAttached(**session));
  if ((*session)->info().phase == client::JobPhase::kLoading) {
    OPTSTATE_RETURN_IF_ERROR(LoadZeros(**session, *agreement));
  }

  client::ReducerOptions how;
  if (arguments.is_quantised) how.quantization = client::BlockQuantization();
  const std::vector<client::GradientSpec> gradients(
      kParameters.size(), client::GradientSpec{.numel = 1});
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<client::GradientReducer> reducer,
      client::GradientReducer::Make(collective.get(), gradients, how));
  return TrainWith(arguments, *agreement, *reducer, **session);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse({argv + 1, argv + argc}, &arguments)) {
    std::cerr << "usage: train_on_nodes [--steps N] [--quantised] JOB ENDPOINT "
                 "RANK WORLD_SIZE FOLDER [HOST]\n";
    return 2;
  }
  const absl::Status status = Train(arguments);
  if (status.ok()) return 0;
  std::cerr << "rank " << arguments.rank << ": " << status << "\n";
  return 1;
}
