// The interface of an update rule. Per-target include.
//
// A rule is the arithmetic on registers, written in the operations of
// ops/ops-inl.h, and nothing else:
//
//   struct Rule {
//     static constexpr uint32_t kStates;  // bit k: it has state array k
//     static constexpr uint32_t kSquares;  // NeverNegativeBits() of its arrays
//     static constexpr auto kPrepare = ...;  // UpdateKernel::prepare
//     static constexpr auto kAdvance = ...;  // UpdateKernel::advance, nullptr
//     OPTSTATE_HOST_DEVICE explicit Rule(const UpdateFactors& factors);
//     // `grad` is summed, scaled and cut. Updates the others in place; those
//     // that it does not have are neither loaded nor stored.
//     template <class D, class V>
//     OPTSTATE_OP void operator()(D d, V grad, V& master, V& state0, V& state1,
//                     V& state2) const;
//   };
//
// Or, instead of operator(), its two halves, each in a plain form too that
// leaves out what NaN and infinities need:
//
//     // May the plain form be used with these factors? It must then make NaN
//     // of the new master wherever the other form gives anything else.
//     bool HasPlain() const;
//     // Each state array from its own old value, `grad` and the old master?
//     static constexpr bool kIsSeparable;
//     template <bool kPlain, class D, class V>
//     void UpdateStates(D d, V grad, V master, V& state0, V& state1,
//                       V& state2) const;
//     template <bool kPlain, class D, class V>  // of the new states
//     void UpdateMaster(D d, V& master, V state0, V state1, V state2) const;
//
// Vectors are passed one by one because those of a scalable instruction set
// (SVE) cannot be members of a struct or an array.

#if defined(OPTSTATE_KERNELS_RULES_RULE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_RULES_RULE_INL_H_
#undef OPTSTATE_KERNELS_RULES_RULE_INL_H_
#else
#define OPTSTATE_KERNELS_RULES_RULE_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "kernels/ops/ops-inl.h"
#include "kernels/update_kernel.h"

OPTSTATE_BEFORE_OPS();
namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE {

template <class Rule>
constexpr bool HasState(int k) {
  return (Rule::kStates >> k & 1) != 0;
}

template <class Rule>
constexpr bool HasHalves() {
  return requires { Rule::kIsSeparable; };
}

// The gradient times the factor, cut to the limit; NaN stays NaN.
class GradientScale {
 public:
  OPTSTATE_HOST_DEVICE explicit GradientScale(const UpdateFactors& factors)
      : factor_(factors.gradient_factor), limit_(factors.gradient_limit) {}

  OPTSTATE_HOST_DEVICE bool HasPlain() const {
    return limit_ == std::numeric_limits<float>::infinity();
  }

  template <bool kPlain, class D, class V>
  OPTSTATE_OP V Scaled(D d, V gradient) const {
    const V scaled = ops::Product(gradient, ops::Set(d, factor_));
    if constexpr (kPlain) return scaled;
    const V limit = ops::Set(d, limit_);
    return ops::IfThenElse(ops::Gt(ops::Abs(scaled), limit),
                           ops::CopySign(limit, scaled), scaled);
  }

 private:
  const float factor_;
  const float limit_;
};

// Updates what LoadInputs gave.
template <bool kPlain, class D, class Rule, class V>
OPTSTATE_OP void UpdateLoaded(D d, const GradientScale& scale, const Rule& rule,
                              V gradient, V& master, V& state0, V& state1,
                              V& state2) {
  const V scaled = scale.template Scaled<kPlain>(d, gradient);
  if constexpr (HasHalves<Rule>()) {
    rule.template UpdateStates<kPlain>(d, scaled, master, state0, state1,
                                       state2);
    rule.template UpdateMaster<kPlain>(d, master, state0, state1, state2);
  } else {
    rule(d, scaled, master, state0, state1, state2);
  }
}

}  // namespace optstate::kernels::OPTSTATE_OPS_NAMESPACE
OPTSTATE_AFTER_OPS();

#endif  // per-target include guard
