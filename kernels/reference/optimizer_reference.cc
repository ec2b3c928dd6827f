#include "kernels/reference/optimizer_reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace optstate::kernels {
namespace {

// Behaves as torch.lerp.
template <typename T>
T Lerp(T start, T end, T weight) {
  return std::abs(weight) < T(0.5) ? start + weight * (end - start)
                                   : end - (end - start) * (T(1) - weight);
}

// Behaves as torch.maximum.
template <typename T>
T Maximum(T a, T b) {
  return a < b || std::isnan(b) ? b : a;
}

// Behaves as torch.sign.
template <typename T>
T Sign(T a) {
  return static_cast<T>((a > 0) - (a < 0));
}

// The weight decay and the moments of Adam and its kin.
struct MomentsStep {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  bool decoupled;
};

// Applies weight decay to the parameter, or to the gradient; then updates both
// moments.
template <typename T>
void DecayAndUpdateMoments(const MomentsStep& step, T& param, T& grad,
                           T& exp_avg, T& exp_avg_sq) {
  if (step.weight_decay != 0) {
    if (step.decoupled) {
      param *= static_cast<T>(1 - step.lr * step.weight_decay);
    } else {
      grad += static_cast<T>(step.weight_decay) * param;
    }
  }
  exp_avg = Lerp(exp_avg, grad, static_cast<T>(1 - step.beta1));
  exp_avg_sq *= static_cast<T>(step.beta2);
  exp_avg_sq += static_cast<T>(1 - step.beta2) * grad * grad;
}

}  // namespace

template <typename T>
OptimizerReference<T>::OptimizerReference(OptimizerKind kind, uint32_t options,
                                          absl::Span<const T> parameter)
    : kind_(kind),
      options_(options),
      parameter_(parameter.begin(), parameter.end()) {
  for (auto& state : state_) state.resize(parameter.size());
}

template <typename T>
void OptimizerReference<T>::Step(const Hyperparams& hyperparams,
                                 absl::Span<const T> gradient) {
  ++step_count_;
  switch (kind_) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return StepAdam(hyperparams, gradient);
    case OptimizerKind::kSgd:
      return StepSgd(hyperparams, gradient);
    case OptimizerKind::kAdagrad:
      return StepAdagrad(hyperparams, gradient);
    case OptimizerKind::kRmsprop:
      return StepRmsprop(hyperparams, gradient);
    case OptimizerKind::kLion:
      return StepLion(hyperparams, gradient);
    case OptimizerKind::kNadam:
      return StepNadam(hyperparams, gradient);
    case OptimizerKind::kRadam:
      return StepRadam(hyperparams, gradient);
    default:
      return;
  }
}

template <typename T>
void OptimizerReference<T>::StepAdam(const Hyperparams& hyperparams,
                                     absl::Span<const T> gradient) {
  const double lr = hyperparams[adam::kLr];
  const double beta1 = hyperparams[adam::kBeta1];
  const double beta2 = hyperparams[adam::kBeta2];
  const MomentsStep moments = {lr, beta1, beta2,
                               hyperparams[adam::kWeightDecay],
                               kind_ == OptimizerKind::kAdamW};
  const double step = static_cast<double>(step_count_);
  const double bias_correction1 = 1 - std::pow(beta1, step);
  const double bias_correction2_sqrt = std::sqrt(1 - std::pow(beta2, step));
  const double step_size = lr / bias_correction1;
  auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = state_;

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T& param = parameter_[i];
    T grad = hyperparams[adam::kMaximize] != 0 ? -gradient[i] : gradient[i];
    DecayAndUpdateMoments(moments, param, grad, exp_avg[i], exp_avg_sq[i]);
    T square = exp_avg_sq[i];
    if ((options_ & adam::kAmsgrad) != 0) {
      max_exp_avg_sq[i] = Maximum(max_exp_avg_sq[i], exp_avg_sq[i]);
      square = max_exp_avg_sq[i];
    }
    const T denom = std::sqrt(square) / static_cast<T>(bias_correction2_sqrt) +
                    static_cast<T>(hyperparams[adam::kEps]);
    param += static_cast<T>(-step_size) * exp_avg[i] / denom;
  }
}

template <typename T>
void OptimizerReference<T>::StepSgd(const Hyperparams& hyperparams,
                                    absl::Span<const T> gradient) {
  const double lr = hyperparams[sgd::kLr];
  const T weight_decay = static_cast<T>(hyperparams[sgd::kWeightDecay]);
  const T momentum = static_cast<T>(hyperparams[sgd::kMomentum]);
  const double dampening = hyperparams[sgd::kDampening];
  const bool maximize = hyperparams[sgd::kMaximize] != 0;
  const bool nesterov = hyperparams[sgd::kNesterov] != 0;
  auto& momentum_buffer = state_[0];

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T grad = maximize ? -gradient[i] : gradient[i];
    if (weight_decay != 0) grad += weight_decay * parameter_[i];
    if (momentum != 0) {
      T& buf = momentum_buffer[i];
      if (step_count_ == 1) {
        buf = grad;
      } else {
        buf *= momentum;
        buf += static_cast<T>(1 - dampening) * grad;
      }
      grad = nesterov ? grad + momentum * buf : buf;
    }
    parameter_[i] += static_cast<T>(-lr) * grad;
  }
}

template <typename T>
void OptimizerReference<T>::StepAdagrad(const Hyperparams& hyperparams,
                                        absl::Span<const T> gradient) {
  const T weight_decay = static_cast<T>(hyperparams[adagrad::kWeightDecay]);
  const T eps = static_cast<T>(hyperparams[adagrad::kEps]);
  const bool maximize = hyperparams[adagrad::kMaximize] != 0;
  const double clr =
      hyperparams[adagrad::kLr] / (1 + static_cast<double>(step_count_ - 1) *
                                           hyperparams[adagrad::kLrDecay]);
  auto& state_sum = state_[0];
  if (step_count_ == 1) {
    const double initial = hyperparams[adagrad::kInitialAccumulatorValue];
    std::fill(state_sum.begin(), state_sum.end(), static_cast<T>(initial));
  }

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T grad = maximize ? -gradient[i] : gradient[i];
    if (weight_decay != 0) grad += weight_decay * parameter_[i];
    state_sum[i] += grad * grad;
    const T std = std::sqrt(state_sum[i]) + eps;
    parameter_[i] += static_cast<T>(-clr) * grad / std;
  }
}

template <typename T>
void OptimizerReference<T>::StepRmsprop(const Hyperparams& hyperparams,
                                        absl::Span<const T> gradient) {
  const T lr = static_cast<T>(hyperparams[rmsprop::kLr]);
  const double alpha = hyperparams[rmsprop::kAlpha];
  const T weight_decay = static_cast<T>(hyperparams[rmsprop::kWeightDecay]);
  const T eps = static_cast<T>(hyperparams[rmsprop::kEps]);
  const T momentum = static_cast<T>(hyperparams[rmsprop::kMomentum]);
  const bool maximize = hyperparams[rmsprop::kMaximize] != 0;
  const bool centered = (options_ & rmsprop::kCentered) != 0;
  auto& [square_avg, momentum_buffer, grad_avg] = state_;

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T grad = maximize ? -gradient[i] : gradient[i];
    if (weight_decay != 0) grad += weight_decay * parameter_[i];
    square_avg[i] *= static_cast<T>(alpha);
    square_avg[i] += static_cast<T>(1 - alpha) * grad * grad;
    T avg = square_avg[i];
    if (centered) {
      grad_avg[i] = Lerp(grad_avg[i], grad, static_cast<T>(1 - alpha));
      avg -= grad_avg[i] * grad_avg[i];
    }
    avg = std::sqrt(avg) + eps;
    if (momentum > 0) {
      momentum_buffer[i] *= momentum;
      momentum_buffer[i] += grad / avg;
      parameter_[i] += -lr * momentum_buffer[i];
    } else {
      parameter_[i] += -lr * grad / avg;
    }
  }
}

template <typename T>
void OptimizerReference<T>::StepLion(const Hyperparams& hyperparams,
                                     absl::Span<const T> gradient) {
  const double lr = hyperparams[lion::kLr];
  const double beta1 = hyperparams[lion::kBeta1];
  const double beta2 = hyperparams[lion::kBeta2];
  const double weight_decay = hyperparams[lion::kWeightDecay];
  const bool maximize = hyperparams[lion::kMaximize] != 0;
  auto& exp_avg = state_[0];

  for (size_t i = 0; i < parameter_.size(); ++i) {
    const T grad = maximize ? -gradient[i] : gradient[i];
    parameter_[i] *= static_cast<T>(1 - lr * weight_decay);
    T update = exp_avg[i] * static_cast<T>(beta1);
    update += static_cast<T>(1 - beta1) * grad;
    parameter_[i] += static_cast<T>(-lr) * Sign(update);
    exp_avg[i] *= static_cast<T>(beta2);
    exp_avg[i] += static_cast<T>(1 - beta2) * grad;
  }
}

template <typename T>
void OptimizerReference<T>::StepNadam(const Hyperparams& hyperparams,
                                      absl::Span<const T> gradient) {
  const double lr = hyperparams[nadam::kLr];
  const double beta1 = hyperparams[nadam::kBeta1];
  const double beta2 = hyperparams[nadam::kBeta2];
  const double momentum_decay = hyperparams[nadam::kMomentumDecay];
  const MomentsStep moments = {lr, beta1, beta2,
                               hyperparams[nadam::kWeightDecay],
                               hyperparams[nadam::kDecoupledWeightDecay] != 0};
  const bool maximize = hyperparams[nadam::kMaximize] != 0;
  const double step = static_cast<double>(step_count_);
  const double bias_correction2 = 1 - std::pow(beta2, step);
  const double mu = beta1 * (1. - 0.5 * std::pow(0.96, step * momentum_decay));
  const double mu_next =
      beta1 * (1. - 0.5 * std::pow(0.96, (step + 1) * momentum_decay));
  mu_product_ *= static_cast<T>(mu);
  const double mu_product = static_cast<double>(mu_product_);
  const double mu_product_next = mu_product * mu_next;
  auto& [exp_avg, exp_avg_sq, unused] = state_;

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T& param = parameter_[i];
    T grad = maximize ? -gradient[i] : gradient[i];
    DecayAndUpdateMoments(moments, param, grad, exp_avg[i], exp_avg_sq[i]);
    const T denom =
        std::sqrt(exp_avg_sq[i] / static_cast<T>(bias_correction2)) +
        static_cast<T>(hyperparams[nadam::kEps]);
    param += static_cast<T>(-lr * (1. - mu) / (1. - mu_product)) * grad / denom;
    param += static_cast<T>(-lr * mu_next / (1. - mu_product_next)) *
             exp_avg[i] / denom;
  }
}

template <typename T>
void OptimizerReference<T>::StepRadam(const Hyperparams& hyperparams,
                                      absl::Span<const T> gradient) {
  const double lr = hyperparams[radam::kLr];
  const double beta1 = hyperparams[radam::kBeta1];
  const double beta2 = hyperparams[radam::kBeta2];
  const MomentsStep moments = {lr, beta1, beta2,
                               hyperparams[radam::kWeightDecay],
                               hyperparams[radam::kDecoupledWeightDecay] != 0};
  const bool maximize = hyperparams[radam::kMaximize] != 0;
  const double step = static_cast<double>(step_count_);
  const double bias_correction1 = 1 - std::pow(beta1, step);
  const double bias_correction2 = 1 - std::pow(beta2, step);
  const double rho_inf = 2 / (1 - beta2) - 1;
  const double rho_t =
      rho_inf - 2 * step * std::pow(beta2, step) / bias_correction2;
  auto& [exp_avg, exp_avg_sq, unused] = state_;

  for (size_t i = 0; i < parameter_.size(); ++i) {
    T& param = parameter_[i];
    T grad = maximize ? -gradient[i] : gradient[i];
    DecayAndUpdateMoments(moments, param, grad, exp_avg[i], exp_avg_sq[i]);
    T update = exp_avg[i] / static_cast<T>(bias_correction1);
    update *= static_cast<T>(lr);
    if (rho_t > 5.0) {
      // A scalar divided by a tensor is the tensor's reciprocal times it.
      const T reciprocal = T(1) / (std::sqrt(exp_avg_sq[i]) +
                                   static_cast<T>(hyperparams[radam::kEps]));
      update *= reciprocal * static_cast<T>(std::sqrt(bias_correction2));
      update *=
          static_cast<T>(std::sqrt((rho_t - 4) * (rho_t - 2) * rho_inf /
                                   ((rho_inf - 4) * (rho_inf - 2) * rho_t)));
    }
    param += T(-1) * update;
  }
}

template class OptimizerReference<float>;
template class OptimizerReference<double>;

}  // namespace optstate::kernels
