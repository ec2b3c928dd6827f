#ifndef OPTSTATE_TESTS_CONFORMANCE_STEP_SCRIPT_H_
#define OPTSTATE_TESTS_CONFORMANCE_STEP_SCRIPT_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "proto/types/layout.h"

namespace optstate {

// Returns a new seed for a randomised test, printed first; OPTSTATE_TEST_SEED
// in the environment repeats a run.
uint64_t ScriptSeed();

// Returns a layout of every dtype, two groups (the second with amsgrad), sizes
// around a tile, one element, none, and a scalar.
LayoutSpec MixedLayout();
// Returns a layout of `count` float32 parameters of `numel` elements in one
// group.
LayoutSpec UniformLayout(size_t count, int64_t numel);

// Returns options of a job of this layout whose name no other test of the
// process has.
client::SessionOptions NewJob(LayoutSpec layout);

// Returns commit options with one set of hyperparameters per group.
client::CommitOptions CommitOf(const client::Session& session, uint64_t step);

// Draws hyperparameters as schedules make them, of any optimizer; `unit` draws
// from [0, 1).
Hyperparams DrawHyperparams(const OptimizerInfo& info,
                            absl::FunctionRef<double()> unit);

// Gradients and settings of a run, all of them drawn from a seed, so that two
// runs of one seed differ only by what carried them.
//
// Gradients are small multiples of 1/64: exact in every dtype, and their sums
// of squares exact in double whatever the order, so that even the clip
// coefficient has equal bits on any implementation.
class StepScript {
 public:
  StepScript(const Layout& layout, uint64_t seed);

  // Loads parameters, the same on every rank. The session is this rank's.
  absl::Status Load(client::Session& session) const;

  struct Step {
    client::CommitOptions commit;
    std::vector<uint32_t> parameters;  // that have a gradient
    std::vector<std::vector<std::byte>> gradients;
  };
  // Makes a step: hyperparameters, clipping, scale and missing gradients change
  // from step to step. Every rank that asks for step k gets the same.
  Step Make(uint64_t step) const;

  // Pushes and commits one step.
  absl::StatusOr<client::Outcome> Run(client::Session& session,
                                      uint64_t step) const;
  // Pushes one step, without a commit.
  static absl::Status Push(client::Session& session, const Step& step);

 private:
  const Layout layout_;
  const uint64_t seed_;
};

// Returns a whole gradient of one parameter, with every element `value`.
std::vector<std::byte> ConstantGradient(const Layout& layout,
                                        uint32_t parameter, float value);
// Pushes a ConstantGradient() of every parameter.
absl::Status PushConstant(client::Session& session, uint64_t step,
                          uint32_t micro_step, float value);
// Loads every parameter of a job with `value`; begin and finish included.
absl::Status LoadConstant(client::Session& session, float value);

// Returns a parameter as of the committed step, of a session that maps
// parameters or fetches them.
absl::StatusOr<std::vector<std::byte>> ParameterOf(client::Session& session,
                                                   uint32_t parameter);

// All that can be seen of a job: parameters and state arrays.
struct StateSnapshot {
  uint64_t step = 0;
  std::vector<std::string> names;  // "exp_avg of w"
  std::vector<std::vector<std::byte>> arrays;
};
absl::StatusOr<StateSnapshot> Snapshot(client::Session& session);
// Returns "" when equal, else the first difference.
std::string FirstDifference(const StateSnapshot& a, const StateSnapshot& b);

}  // namespace optstate

#endif  // OPTSTATE_TESTS_CONFORMANCE_STEP_SCRIPT_H_
