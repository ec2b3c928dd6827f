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
// The largest number of state arrays of an optimizer besides the master
// parameter.
inline constexpr int kStateArraysMax = 3;

// The values that the user may change at every step, per param group, in
// double, as the trainer holds them. OptimizerInfo::hyperparams of the
// optimizer gives the meaning of each value; values behind its last are 0.
// Plain data: a commit carries the struct unchanged.
struct Hyperparams {
  std::array<double, kHyperparamsMax> value = {};
  // The limit to which the L2 norm of the group's gradients is clipped; 0: no
  // clipping. The commit applies it, not the optimizer.
  double max_norm = 0;

  double operator[](size_t index) const { return value[index]; }
  double& operator[](size_t index) { return value[index]; }
};

// The range of a hyperparameter in a step; all values are finite. Within the
// range the kernels compute as torch does: torch's constructors check more (a
// scheduler may bring a learning rate a hair below 0, and torch trains on), its
// steps check nothing.
enum class HyperparamRange : uint8_t {
  kAny,
  kNotNegative,
  kUnit,  // [0, 1)
  kFlag,  // 0 or 1
  kNotPositive,
  kNotZero,  // the update divides by it
};

struct HyperparamInfo {
  // The name that torch gives it in a param group; a part of a tuple has its
  // index behind a dot ("betas.0").
  absl::string_view name;
  double default_value = 0;
  HyperparamRange range = HyperparamRange::kAny;
  // The name that torch.optim uses in "Invalid ...: -1".
  absl::string_view called;
};

// The unit for which a state array has one element. A matrix is spanned by the
// last two dimensions of a parameter.
enum class StateExtent : uint8_t {
  kElements,  // each element
  kRows,      // each row of each matrix; a vector has none
  kColumns,   // each column of each matrix; a vector has none
  kVector,    // each element of a vector; a matrix has none
};

struct StateArrayInfo {
  absl::string_view name;  // torch's name
  // The bit of GroupSpec::options that enables the array; 0: always present.
  uint32_t option = 0;
  StateExtent extent = StateExtent::kElements;
  // Whether no element is ever negative, as of means and sums of squares: an
  // 8-bit format then needs no sign.
  bool is_never_negative = false;
};

// Returns bit k for each array k that is never negative.
constexpr uint32_t NeverNegativeBits(absl::Span<const StateArrayInfo> arrays) {
  uint32_t bits = 0;
  for (size_t k = 0; k < arrays.size(); ++k) {
    if (arrays[k].is_never_negative) bits |= uint32_t{1} << k;
  }
  return bits;
}

// One optimizer: the description that every folder and the Python package use.
struct OptimizerInfo {
  OptimizerKind kind;
  absl::string_view name;  // torch's class, in lower case: "adamw"
  absl::Span<const HyperparamInfo> hyperparams;
  absl::Span<const StateArrayInfo> state_arrays;  // at most kStateArraysMax
  // The properties fixed for a group at registration because they determine its
  // memory: bit k of GroupSpec::options is options[k]. A group has a property
  // when torch's param group has a value of this name that is true or not 0.
  absl::Span<const absl::string_view> options = {};
  // The name that torch gives to a number kept per parameter; empty: none.
  absl::string_view scalar = {};
  // The value of the scalar before the first step.
  double scalar_initial = 0;
  // True when the update of an element depends on that element alone; a
  // non-separable update processes a whole parameter.
  bool is_separable = true;
  // The index of the hyperparameter that reverses the gradient; -1: none.
  int maximize = -1;
  // Checks, with torch's messages, what the ranges of single hyperparameters
  // cannot express; null: nothing.
  absl::Status (*check)(const Hyperparams& hyperparams) = nullptr;

  // Returns whether some array has fewer elements than its parameter. Such
  // elements are at the beginning of the parameter's place in the flat space.
  bool has_prefixes() const;
};

// Returns all optimizers, in order of kind.
absl::Span<const OptimizerInfo> Optimizers();
// Returns null for an invalid value, which a peer or a file may contain.
const OptimizerInfo* FindOptimizer(uint32_t kind);
// Returns the description of a valid kind.
const OptimizerInfo& InfoOf(OptimizerKind kind);

// The number of elements of state array `index` of a parameter of this shape;
// see StateExtent.
uint64_t StateElements(const OptimizerInfo& info, int index,
                       absl::Span<const int64_t> shape);

// Returns whether a group with these options has state array `index`.
bool HasStateArray(const OptimizerInfo& info, int index, uint32_t options);

// Whether the optimizer has state array `index`, and it is never negative.
bool IsNeverNegative(OptimizerKind kind, int index);

// Returns torch's defaults.
Hyperparams DefaultHyperparams(OptimizerKind kind);

// Checks the values. INVALID_ARGUMENT, in torch.optim's words ("Invalid
// learning rate: -1"), for the first value that is NaN, infinite or out of
// range.
absl::Status Validate(OptimizerKind kind, const Hyperparams& hyperparams);

// The state arrays of each kind, and the indices of its values. Value 0 is lr
// in all kinds.
inline constexpr size_t kLr = 0;

// Adam, AdamW and Lamb.
namespace adam {
enum : size_t { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kMaximize };
inline constexpr uint32_t kAmsgrad = 1;  // option; Lamb lacks it
inline constexpr StateArrayInfo kArrays[] = {
    {.name = "exp_avg"},
    {.name = "exp_avg_sq", .is_never_negative = true},
    {.name = "max_exp_avg_sq", .option = kAmsgrad, .is_never_negative = true}};
// The arrays of the kinds without amsgrad: Lamb, Nadam and Radam.
inline constexpr absl::Span<const StateArrayInfo> kMoments(kArrays, 2);
}  // namespace adam

// Hyperparameters by name, for C++ code that knows its optimizer.
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
inline constexpr StateArrayInfo kArrays[] = {
    {.name = "momentum_buffer", .option = kHasMomentum}};
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
inline constexpr StateArrayInfo kArrays[] = {
    {.name = "sum", .is_never_negative = true}};
}  // namespace adagrad

namespace rmsprop {
enum : size_t { kLr, kAlpha, kEps, kWeightDecay, kMomentum, kMaximize };
inline constexpr uint32_t kHasMomentum = 1;  // options
inline constexpr uint32_t kCentered = 2;
inline constexpr StateArrayInfo kArrays[] = {
    {.name = "square_avg", .is_never_negative = true},
    {.name = "momentum_buffer", .option = kHasMomentum},
    {.name = "grad_avg", .option = kCentered}};
}  // namespace rmsprop

namespace lion {
enum : size_t { kLr, kBeta1, kBeta2, kWeightDecay, kMaximize };
inline constexpr StateArrayInfo kArrays[] = {{.name = "exp_avg"}};
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
inline constexpr StateArrayInfo kArrays[] = {{.name = "row_var",
                                              .extent = StateExtent::kRows,
                                              .is_never_negative = true},
                                             {.name = "col_var",
                                              .extent = StateExtent::kColumns,
                                              .is_never_negative = true},
                                             {.name = "variance",
                                              .extent = StateExtent::kVector,
                                              .is_never_negative = true}};
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
inline constexpr StateArrayInfo kArrays[] = {{.name = "momentum_buffer"}};
}  // namespace muon

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_OPTIMIZER_H_
