#include "kernels/reference/adam_reference.h"

#include <cmath>
#include <cstddef>

namespace optstate {
namespace {

// torch.lerp
template <typename T>
T Lerp(T start, T end, T weight) {
  return std::abs(weight) < T(0.5) ? start + weight * (end - start)
                                   : end - (end - start) * (T(1) - weight);
}

// torch.maximum
template <typename T>
T Maximum(T a, T b) {
  return a < b || std::isnan(b) ? b : a;
}

}  // namespace

template <typename T>
void AdamReference<T>::Step(const Hyperparams& hyperparams,
                            absl::Span<const T> gradient) {
  ++step_count_;
  const double lr = hyperparams.lr;
  const double beta1 = hyperparams.beta1;
  const double beta2 = hyperparams.beta2;
  const double weight_decay = hyperparams.weight_decay;
  const double step = static_cast<double>(step_count_);
  const double bias_correction1 = 1 - std::pow(beta1, step);
  const double bias_correction2_sqrt = std::sqrt(1 - std::pow(beta2, step));
  const double step_size = lr / bias_correction1;

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T& param = parameter_[i];
    T grad = hyperparams.maximize ? -gradient[i] : gradient[i];
    if (weight_decay != 0) {
      if (kind_ == OptimizerKind::kAdamW) {
        param *= static_cast<T>(1 - lr * weight_decay);
      } else {
        grad += static_cast<T>(weight_decay) * param;
      }
    }
    exp_avg_[i] = Lerp(exp_avg_[i], grad, static_cast<T>(1 - beta1));
    exp_avg_sq_[i] *= static_cast<T>(beta2);
    exp_avg_sq_[i] += static_cast<T>(1 - beta2) * grad * grad;
    T square = exp_avg_sq_[i];
    if (amsgrad_) {
      max_exp_avg_sq_[i] = Maximum(max_exp_avg_sq_[i], exp_avg_sq_[i]);
      square = max_exp_avg_sq_[i];
    }
    const T denom = std::sqrt(square) / static_cast<T>(bias_correction2_sqrt) +
                    static_cast<T>(hyperparams.eps);
    param += static_cast<T>(-step_size) * exp_avg_[i] / denom;
  }
}

template class AdamReference<float>;
template class AdamReference<double>;

}  // namespace optstate
