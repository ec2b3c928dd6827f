#ifndef OPTSTATE_PROTO_TYPES_OPTIMIZER_H_
#define OPTSTATE_PROTO_TYPES_OPTIMIZER_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate {

// Values are part of the wire and file formats (optstate.v1.OptimizerKind).
enum class OptimizerKind : uint8_t {
  kAdam = 1,   // weight decay added to the gradient (L2)
  kAdamW = 2,  // decoupled weight decay
  kSgd = 3,
  kAdagrad = 4,
  kRmsprop = 5,
  kLion = 6,
  kNadam = 7,
  kRadam = 8,
  kLamb = 9,
  kAdafactor = 10,
  kMuon = 11,
};

inline constexpr size_t kHyperparamsMax = 12;
// State arrays of an optimizer besides the master parameter.
inline constexpr int kStateArraysMax = 3;

// What the user may change at every step, per param group, in double, as the
// trainer holds it. Which value means what is the optimizer's
// OptimizerInfo::hyperparams; those behind its last are 0. Plain data: it
// travels in the commit as it is.
struct Hyperparams {
  std::array<double, kHyperparamsMax> value = {};
  // The L2 norm of the group's gradients is clipped to this; 0: it is not. No
  // business of the optimizer's, but of the commit that takes the others along.
  double max_norm = 0;

  double operator[](size_t index) const { return value[index]; }
  double& operator[](size_t index) { return value[index]; }
};

// What a hyperparameter may be in a step; all are finite. It is what the
// kernels compute as torch does: torch's constructors check more (a scheduler
// may bring a learning rate a hair below 0, and torch trains on), its steps
// nothing.
enum class HyperparamRange : uint8_t {
  kAny,
  kNotNegative,
  kUnit,  // [0, 1)
  kFlag,  // 0 or 1
  kNotPositive,
  kNotZero,  // it is divided by
};

struct HyperparamInfo {
  // torch's name of it in a param group; a part of a tuple has its index
  // behind a dot ("betas.0").
  absl::string_view name;
  double default_value = 0;
  HyperparamRange range = HyperparamRange::kAny;
  // As torch.optim calls it in "Invalid ...: -1".
  absl::string_view called;
};

// What a state array has one element for. A matrix is what the last two
// dimensions of a parameter span.
enum class StateExtent : uint8_t {
  kElements,  // each element
  kRows,      // each row of each matrix; a vector has none
  kColumns,   // each column of each matrix; a vector has none
  kVector,    // each element of a vector; a matrix has none
};

struct StateArrayInfo {
  absl::string_view name;  // torch's
  // The bit of GroupSpec::options that brings it; 0: always there.
  uint32_t option = 0;
  StateExtent extent = StateExtent::kElements;
};

// One optimizer, as every folder and the Python package know it.
struct OptimizerInfo {
  OptimizerKind kind;
  absl::string_view name;  // torch's class, in lower case: "adamw"
  absl::Span<const HyperparamInfo> hyperparams;
  absl::Span<const StateArrayInfo> state_arrays;  // at most kStateArraysMax
  // What is fixed for a group at registration, because memory hangs on it: bit
  // k of GroupSpec::options is options[k]. A group has it when torch's param
  // group has a value of this name that is true or not 0.
  absl::Span<const absl::string_view> options;
  // torch's name of a number that is kept per parameter; empty: none.
  absl::string_view scalar;
  // Before the first step.
  double scalar_initial = 0;
  // Whether the update of an element depends on that element alone; else it
  // takes a parameter whole.
  bool is_separable = true;
  // The index of the hyperparameter that reverses the gradient; -1: none.
  int maximize = -1;

  // Whether some array has fewer elements than its parameter. They are at the
  // beginning of the parameter's place in the flat space.
  bool has_prefixes() const;
};

// In order of kind.
absl::Span<const OptimizerInfo> Optimizers();
// Null for a value that is none, as a peer or a file may have it.
const OptimizerInfo* FindOptimizer(uint32_t kind);
// Of a valid kind.
const OptimizerInfo& InfoOf(OptimizerKind kind);

// Elements of state array `index` of a parameter of this shape; see
// StateExtent.
uint64_t StateElements(const OptimizerInfo& info, int index,
                       absl::Span<const int64_t> shape);

// Whether a group with these options has state array `index`.
bool HasStateArray(const OptimizerInfo& info, int index, uint32_t options);

// The defaults of torch.
Hyperparams DefaultHyperparams(OptimizerKind kind);

// INVALID_ARGUMENT, in torch.optim's words ("Invalid learning rate: -1"), for
// the first value that is NaN, infinite or not in its range.
absl::Status Validate(OptimizerKind kind, const Hyperparams& hyperparams);

// Where each value of a kind is. Of all kinds value 0 is lr.
inline constexpr size_t kLr = 0;

// Adam, AdamW and Lamb.
namespace adam {
enum : size_t { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMaximize };
inline constexpr uint32_t kAmsgrad = 1;  // option; not of Lamb
}  // namespace adam

// The same by name, for C++ that knows its optimizer.
struct AdamHyperparams {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool maximize = false;

  // NOLINTNEXTLINE(google-explicit-constructor)
  operator Hyperparams() const {
    return {
        .value = {lr, beta1, beta2, eps, weight_decay, maximize ? 1.0 : 0.0}};
  }
};

namespace sgd {
enum : size_t {
  kLr,
  kMomentum,
  kDampening,
  kWeightDecay,
  kNesterov,
  kMaximize
};
inline constexpr uint32_t kHasMomentum = 1;  // option
}  // namespace sgd

namespace adagrad {
enum : size_t {
  kLr,
  kLrDecay,
  kWeightDecay,
  kInitialAccumulatorValue,
  kEps,
  kMaximize
};
}  // namespace adagrad

namespace rmsprop {
enum : size_t { kLr, kAlpha, kEps, kWeightDecay, kMomentum, kMaximize };
inline constexpr uint32_t kHasMomentum = 1;  // options
inline constexpr uint32_t kCentered = 2;
}  // namespace rmsprop

namespace lion {
enum : size_t { kLr, kBeta1, kBeta2, kWeightDecay, kMaximize };
}  // namespace lion

namespace nadam {
enum : size_t {
  kLr,
  kBeta1,
  kBeta2,
  kEps,
  kWeightDecay,
  kMomentumDecay,
  kDecoupledWeightDecay,
  kMaximize
};
}  // namespace nadam

namespace radam {
enum : size_t {
  kLr,
  kBeta1,
  kBeta2,
  kEps,
  kWeightDecay,
  kDecoupledWeightDecay,
  kMaximize
};
}  // namespace radam

namespace adafactor {
enum : size_t { kLr, kBeta2Decay, kEps1, kEps2, kD, kWeightDecay, kMaximize };
}  // namespace adafactor

namespace muon {
enum : size_t {
  kLr,
  kWeightDecay,
  kMomentum,
  kNesterov,
  kA,
  kB,
  kC,
  kEps,
  kNsSteps,
  kAdjustLr  // 0 original, 1 match_rms_adamw, 2 spectral_unclamped
};
}  // namespace muon

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_OPTIMIZER_H_
