#include "kernels/reference/whole_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <type_traits>
#include <utility>

namespace optstate::kernels {
namespace {

// Behaves as torch.lerp.
template <typename T>
T Lerp(T start, T end, T weight) {
  return std::abs(weight) < T(0.5) ? start + weight * (end - start)
                                   : end - (end - start) * (T(1) - weight);
}

// Behaves as torch.clamp(min=).
template <typename T>
T ClampMin(T value, T min) {
  return value < min ? min : value;
}

// Returns the norm of `count` elements, `stride` apart.
template <typename T>
T NormOf(const T* elements, size_t count, size_t stride = 1) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double element = static_cast<double>(elements[i * stride]);
    sum += element * element;
  }
  return static_cast<T>(std::sqrt(sum));
}

template <typename T>
T MeanOf(const T* elements, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += static_cast<double>(elements[i]);
  return static_cast<T>(sum / static_cast<double>(count));
}

template <typename T>
T RootMeanSquare(const std::vector<T>& elements) {
  const double numel = static_cast<double>(elements.size());
  return static_cast<T>(
      static_cast<double>(NormOf(elements.data(), elements.size())) /
      std::sqrt(numel));
}

// Rounds to the nearest bfloat16, ties to even; only for float.
template <typename T>
T Rounded(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    if (std::isnan(value)) return value;
    uint32_t bits = std::bit_cast<uint32_t>(value);
    bits += 0x7FFF + (bits >> 16 & 1);
    return std::bit_cast<float>(bits & 0xFFFF0000u);
  }
}

template <typename T>
struct Matrix {
  size_t rows = 0;
  size_t columns = 0;
  std::vector<T> elements;

  Matrix(size_t row_count, size_t column_count)
      : rows(row_count), columns(column_count), elements(rows * columns) {}
  T& At(size_t i, size_t j) { return elements[i * columns + j]; }
  T At(size_t i, size_t j) const { return elements[i * columns + j]; }

  Matrix Transposed() const {
    Matrix result(columns, rows);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < columns; ++j) result.At(j, i) = At(i, j);
    }
    return result;
  }
};

// Returns beta * addend + alpha * (a @ b).
template <typename T>
Matrix<T> AddMm(const Matrix<T>* addend, const Matrix<T>& a, const Matrix<T>& b,
                double beta, double alpha) {
  Matrix<T> result(a.rows, b.columns);
  for (size_t i = 0; i < a.rows; ++i) {
    T* row = &result.elements[i * b.columns];
    for (size_t k = 0; k < a.columns; ++k) {
      const T* of_b = &b.elements[k * b.columns];
      for (size_t j = 0; j < b.columns; ++j) row[j] += a.At(i, k) * of_b[j];
    }
    for (size_t j = 0; j < b.columns; ++j) {
      row[j] *= static_cast<T>(alpha);
      if (addend != nullptr) row[j] += static_cast<T>(beta) * addend->At(i, j);
      row[j] = Rounded(row[j]);
    }
  }
  return result;
}

template <typename T>
Matrix<T> ZeroPower(const Matrix<T>& gradient, const Hyperparams& h) {
  const bool is_tall = gradient.rows > gradient.columns;
  Matrix<T> x = is_tall ? gradient.Transposed() : gradient;
  for (T& element : x.elements) element = Rounded(element);
  const T norm = ClampMin(Rounded(NormOf(x.elements.data(), x.elements.size())),
                          Rounded(static_cast<T>(h[muon::kEps])));
  for (T& element : x.elements) element = Rounded(element / norm);
  for (int step = 0; step < h[muon::kNsSteps]; ++step) {
    const Matrix<T> gram = AddMm<T>(nullptr, x, x.Transposed(), 0, 1);
    const Matrix<T> update = AddMm(&gram, gram, gram, h[muon::kB], h[muon::kC]);
    x = AddMm(&x, update, x, h[muon::kA], 1);
  }
  return is_tall ? x.Transposed() : x;
}

}  // namespace

template <typename T>
WholeReference<T>::WholeReference(OptimizerKind kind,
                                  absl::Span<const int64_t> shape,
                                  absl::Span<const T> parameter)
    : kind_(kind),
      shape_(shape.begin(), shape.end()),
      parameter_(parameter.begin(), parameter.end()) {
  for (auto& state : state_) state.resize(parameter.size());
  if (kind_ != OptimizerKind::kAdafactor || shape_.size() < 2) return;
  size_t batches = 1;
  for (size_t k = 0; k + 2 < shape_.size(); ++k) {
    batches *= static_cast<size_t>(shape_[k]);
  }
  state_[0].resize(batches * static_cast<size_t>(shape_[shape_.size() - 2]));
  state_[1].resize(batches * static_cast<size_t>(shape_.back()));
  state_[2].clear();
}

template <typename T>
void WholeReference<T>::Step(const Hyperparams& hyperparams,
                             absl::Span<const T> gradient) {
  ++step_count_;
  if (parameter_.empty()) return;
  switch (kind_) {
    case OptimizerKind::kLamb:
      return StepLamb(hyperparams, gradient);
    case OptimizerKind::kAdafactor:
      return StepAdafactor(hyperparams, gradient);
    case OptimizerKind::kMuon:
      return StepMuon(hyperparams, gradient);
    default:
      return;
  }
}

template <typename T>
void WholeReference<T>::StepLamb(const Hyperparams& hyperparams,
                                 absl::Span<const T> gradient) {
  const double beta1 = hyperparams[adam::kBeta1];
  const double beta2 = hyperparams[adam::kBeta2];
  const double step = static_cast<double>(step_count_);
  const T bias_correction1 = static_cast<T>(1 - std::pow(beta1, step));
  const T bias_correction2 = static_cast<T>(1 - std::pow(beta2, step));
  auto& exp_avg = state_[0];
  auto& exp_avg_sq = state_[1];
  std::vector<T> update(parameter_.size());
  for (size_t i = 0; i < parameter_.size(); ++i) {
    exp_avg[i] = static_cast<T>(beta1) * exp_avg[i] +
                 static_cast<T>(1 - beta1) * gradient[i];
    exp_avg_sq[i] = static_cast<T>(beta2) * exp_avg_sq[i] +
                    static_cast<T>(1 - beta2) * gradient[i] * gradient[i];
    const T m = exp_avg[i] / bias_correction1;
    const T v = exp_avg_sq[i] / bias_correction2;
    update[i] = m / (std::sqrt(v) + static_cast<T>(hyperparams[adam::kEps])) +
                static_cast<T>(hyperparams[adam::kWeightDecay]) * parameter_[i];
  }
  const T master_norm = NormOf(parameter_.data(), parameter_.size());
  const T update_norm = NormOf(update.data(), update.size());
  const T trust =
      master_norm != 0 && update_norm != 0 ? master_norm / update_norm : 1;
  for (size_t i = 0; i < parameter_.size(); ++i) {
    parameter_[i] -= static_cast<T>(hyperparams[adam::kLr]) * trust * update[i];
  }
}

template <typename T>
std::vector<T> WholeReference<T>::VectorVariance(absl::Span<const T> gradient,
                                                 double weight) {
  auto& variance = state_[2];
  for (size_t i = 0; i < variance.size(); ++i) {
    variance[i] =
        Lerp(variance[i], gradient[i] * gradient[i], static_cast<T>(weight));
  }
  return variance;
}

template <typename T>
std::vector<T> WholeReference<T>::FactoredVariance(absl::Span<const T> gradient,
                                                   double weight, double eps) {
  auto& row_var = state_[0];
  auto& col_var = state_[1];
  const size_t rows = static_cast<size_t>(shape_[shape_.size() - 2]);
  const size_t columns = static_cast<size_t>(shape_.back());
  std::vector<T> variance(gradient.size());
  for (size_t batch = 0; batch < gradient.size() / (rows * columns); ++batch) {
    const T* of_batch = gradient.data() + batch * rows * columns;
    T* row = row_var.data() + batch * rows;
    T* column = col_var.data() + batch * columns;
    for (size_t i = 0; i < rows; ++i) {
      const T norm = NormOf(of_batch + i * columns, columns);
      row[i] = Lerp(row[i], norm * norm / static_cast<T>(columns),
                    static_cast<T>(weight));
    }
    for (size_t j = 0; j < columns; ++j) {
      const T norm = NormOf(of_batch + j, rows, columns);
      column[j] = Lerp(column[j], norm * norm / static_cast<T>(rows),
                       static_cast<T>(weight));
    }
    const T mean = ClampMin(MeanOf(row, rows), static_cast<T>(eps));
    T* of_variance = variance.data() + batch * rows * columns;
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < columns; ++j) {
        of_variance[i * columns + j] = row[i] * column[j] / mean;
      }
    }
  }
  return variance;
}

template <typename T>
void WholeReference<T>::StepAdafactor(const Hyperparams& hyperparams,
                                      absl::Span<const T> gradient) {
  const double lr = hyperparams[adafactor::kLr];
  const double weight_decay = hyperparams[adafactor::kWeightDecay];
  const double step = static_cast<double>(step_count_);
  // None means float's epsilon, for the truth too.
  const double eps1 =
      hyperparams[adafactor::kEps1] < 0
          ? static_cast<double>(std::numeric_limits<float>::epsilon())
          : hyperparams[adafactor::kEps1];
  const double one_minus_beta2 =
      std::pow(step, hyperparams[adafactor::kBeta2Decay]);
  const double rho = std::min(lr, 1 / std::sqrt(step));
  const double alpha =
      std::max(hyperparams[adafactor::kEps2],
               static_cast<double>(RootMeanSquare(parameter_))) *
      rho;
  if (weight_decay != 0) {
    for (T& param : parameter_) param *= static_cast<T>(1 - lr * weight_decay);
  }
  std::vector<T> update =
      shape_.size() > 1 ? FactoredVariance(gradient, one_minus_beta2, eps1)
                        : VectorVariance(gradient, one_minus_beta2);
  for (size_t i = 0; i < update.size(); ++i) {
    update[i] =
        T(1) / std::sqrt(ClampMin(update[i], static_cast<T>(eps1 * eps1)));
    update[i] *= gradient[i];
  }
  const double denom =
      std::max(1.0, static_cast<double>(RootMeanSquare(update)) /
                        hyperparams[adafactor::kD]);
  for (size_t i = 0; i < update.size(); ++i) {
    parameter_[i] += static_cast<T>(-alpha / denom) * update[i];
  }
}

template <typename T>
void WholeReference<T>::StepMuon(const Hyperparams& hyperparams,
                                 absl::Span<const T> gradient) {
  const double lr = hyperparams[muon::kLr];
  const double momentum = hyperparams[muon::kMomentum];
  Matrix<T> update(static_cast<size_t>(shape_[0]),
                   static_cast<size_t>(shape_[1]));
  for (size_t i = 0; i < parameter_.size(); ++i) {
    T& buffer = state_[0][i];
    buffer = Lerp(buffer, gradient[i], static_cast<T>(1 - momentum));
    update.elements[i] =
        hyperparams[muon::kNesterov] != 0
            ? Lerp(gradient[i], buffer, static_cast<T>(momentum))
            : buffer;
  }
  update = ZeroPower(update, hyperparams);

  const double rows = static_cast<double>(update.rows);
  const double columns = static_cast<double>(update.columns);
  double ratio = 1;
  if (hyperparams[muon::kAdjustLr] == 0) {
    ratio = std::sqrt(std::max(1.0, rows / columns));
  } else if (hyperparams[muon::kAdjustLr] == 1) {
    ratio = 0.2 * std::sqrt(std::max(rows, columns));
  } else if (hyperparams[muon::kAdjustLr] == 2) {
    ratio = std::sqrt(rows / columns);
  }
  for (size_t i = 0; i < parameter_.size(); ++i) {
    parameter_[i] *= static_cast<T>(1 - lr * hyperparams[muon::kWeightDecay]);
    parameter_[i] += static_cast<T>(-lr * ratio) * update.elements[i];
  }
}

template class WholeReference<float>;
template class WholeReference<double>;

}  // namespace optstate::kernels
