// The arithmetic of Adam and AdamW on registers; kernels/README.md derives it.
// Per-target include.

#if defined(OPTSTATE_KERNELS_CPU_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OPTSTATE_KERNELS_CPU_ADAM_INL_H_
#undef OPTSTATE_KERNELS_CPU_ADAM_INL_H_
#else
#define OPTSTATE_KERNELS_CPU_ADAM_INL_H_
#endif

#include <limits>

#include "hwy/highway.h"
#include "kernels/adam_factors.h"
#include "kernels/cpu/float16-inl.h"
#include "kernels/cpu/product-inl.h"
#include "kernels/update_kernel.h"
#include "proto/types/optimizer_kind.h"

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// State arrays: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
template <OptimizerKind kKind, bool kAmsgrad>
class Adam {
 public:
  static constexpr int kStateArrays = kAmsgrad ? 3 : 2;

  explicit Adam(const UpdateFactors& factors)
      : gradient_factor_(factors.slot[kAdamGradientFactor]),
        decay_(factors.slot[kAdamDecay]),
        exp_avg_weight_(factors.slot[kAdamExpAvgWeight]),
        square_gain_(factors.slot[kAdamSquareGain]),
        square_keep_(factors.slot[kAdamSquareKeep]),
        square_loss_(factors.slot[kAdamSquareLoss]),
        eps_(factors.slot[kAdamEps]),
        step_size_(factors.slot[kAdamStepSize]) {}

  template <class D, class V>
  HWY_INLINE void operator()(D d, V gradient, V& master, V& exp_avg,
                             V& exp_avg_sq, V& max_exp_avg_sq) const {
    const V grad = ScaledGradient(d, gradient, master);
    exp_avg = CanonicalNan(d, NextExpAvg(d, grad, exp_avg));
    exp_avg_sq = CanonicalNan(d, NextExpAvgSq(d, grad, exp_avg_sq));
    V square = exp_avg_sq;
    if constexpr (kAmsgrad) {
      max_exp_avg_sq = CanonicalNan(d, Maximum(max_exp_avg_sq, exp_avg_sq));
      square = max_exp_avg_sq;
    }
    const V denom = hn::Add(hn::Sqrt(square), hn::Set(d, eps_));
    V change = hn::Div(hn::Mul(hn::Set(d, step_size_), exp_avg), denom);
    if constexpr (kKind == OptimizerKind::kAdamW) {
      change = hn::Add(DecoupledDecay(d, master), change);
    }
    master = CanonicalNan(d, hn::Sub(master, change));
  }

 private:
  template <class D, class V>
  HWY_INLINE V ScaledGradient(D d, V gradient, V master) const {
    const V grad = Product(gradient, hn::Set(d, gradient_factor_));
    if constexpr (kKind == OptimizerKind::kAdam) {
      // Without decay an infinite master must not make NaN of the gradient.
      const V decay = hn::Set(d, decay_);
      return hn::Add(grad, hn::IfThenElseZero(hn::Gt(decay, hn::Zero(d)),
                                              Product(decay, master)));
    }
    return grad;
  }

  template <class D, class V>
  HWY_INLINE V NextExpAvg(D d, V grad, V exp_avg) const {
    const V weight = hn::Set(d, exp_avg_weight_);
    const V start = hn::IfThenElse(hn::Gt(weight, hn::Zero(d)), exp_avg, grad);
    return hn::Add(start, Product(weight, hn::Sub(grad, exp_avg)));
  }

  template <class D, class V>
  HWY_INLINE V NextExpAvgSq(D d, V grad, V exp_avg_sq) const {
    const V gain = Product(Product(hn::Set(d, square_gain_), grad), grad);
    const V keep = Product(hn::Set(d, square_keep_), exp_avg_sq);
    const V loss = Product(hn::Set(d, square_loss_), exp_avg_sq);
    // Once infinite it stays so, as in torch, and does not turn NaN.
    const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    return hn::IfThenElse(hn::Eq(exp_avg_sq, infinity),
                          hn::Add(exp_avg_sq, gain),
                          hn::Add(keep, hn::Sub(gain, loss)));
  }

  // torch.maximum: a NaN on either side wins. Highway's Max leaves it open.
  template <class V>
  static HWY_INLINE V Maximum(V a, V b) {
    return hn::IfThenElse(hn::Or(hn::Lt(a, b), hn::IsNaN(b)), b, a);
  }

  template <class D, class V>
  HWY_INLINE V DecoupledDecay(D d, V master) const {
    // None for an infinite master: it stays infinite, as in torch.
    const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    return hn::IfThenElseZero(hn::Lt(hn::Abs(master), infinity),
                              Product(hn::Set(d, decay_), master));
  }

  const float gradient_factor_;
  const float decay_;
  const float exp_avg_weight_;
  const float square_gain_;
  const float square_keep_;
  const float square_loss_;
  const float eps_;
  const float step_size_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
