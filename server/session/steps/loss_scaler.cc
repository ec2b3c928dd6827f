#include "server/session/steps/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/shm/segment_layout.h"

namespace optstate::session {
namespace {

// The largest value that fits into shm::Completion.
constexpr uint32_t kHysteresisMax =
    UINT32_MAX >> shm::kCompletionHysteresisShift;

absl::Status Invalid(absl::string_view field, double value,
                     absl::string_view rule) {
  return absl::InvalidArgumentError(absl::StrCat(
      "Invalid loss_scaler.", field, ": ", value, ": must be ", rule));
}

absl::Status InvalidState(absl::string_view field, double value,
                          absl::string_view rule) {
  return absl::InvalidArgumentError(absl::StrCat(
      "Invalid loss_scaler_state.", field, ": ", value, ": must be ", rule));
}

}  // namespace

absl::Status CheckLossScaler(const v1::LossScaler& scaler) {
  if (!(scaler.init_scale() > 0) || !std::isfinite(scaler.init_scale())) {
    return Invalid("init_scale", scaler.init_scale(), "finite and above 0");
  }
  if (!scaler.dynamic()) return absl::OkStatus();
  if (!(scaler.growth_factor() > 1) || !std::isfinite(scaler.growth_factor())) {
    return Invalid("growth_factor", scaler.growth_factor(),
                   "finite and above 1");
  }
  if (!(scaler.backoff_factor() > 0) || !(scaler.backoff_factor() < 1)) {
    return Invalid("backoff_factor", scaler.backoff_factor(),
                   "between 0 and 1");
  }
  if (scaler.growth_interval() == 0) {
    return Invalid("growth_interval", 0, "at least 1");
  }
  if (scaler.hysteresis() == 0 || scaler.hysteresis() > kHysteresisMax) {
    return Invalid("hysteresis", scaler.hysteresis(),
                   absl::StrCat("from 1 to ", kHysteresisMax));
  }
  if (!(scaler.min_scale() >= 0) ||
      !(scaler.min_scale() <= scaler.init_scale())) {
    return Invalid("min_scale", scaler.min_scale(), "from 0 to init_scale");
  }
  return absl::OkStatus();
}

absl::Status CheckLossScalerState(const v1::LossScaler& scaler,
                                  const v1::LossScalerState& state) {
  if (!scaler.dynamic()) {
    return absl::InvalidArgumentError(
        "a loss_scaler_state was given without a dynamic loss_scaler");
  }
  if (!(state.loss_scale() > 0) || !std::isfinite(state.loss_scale())) {
    return InvalidState("loss_scale", state.loss_scale(), "finite and above 0");
  }
  if (state.good_steps() >= scaler.growth_interval()) {
    return InvalidState("good_steps", state.good_steps(),
                        "below growth_interval");
  }
  if (state.hysteresis_left() == 0 ||
      state.hysteresis_left() > scaler.hysteresis()) {
    return InvalidState("hysteresis_left", state.hysteresis_left(),
                        "from 1 to hysteresis");
  }
  return absl::OkStatus();
}

void StartLossScaler(const v1::LossScaler& scaler,
                     storage::StepRecord* record) {
  record->loss_scale = scaler.init_scale();
  record->good_steps = 0;
  record->hysteresis_left = scaler.hysteresis();
}

// A scale of 0 means that there was no scaler, and a static scaler never moves.
bool RepairLossScaler(const v1::LossScaler& scaler,
                      storage::StepRecord* record) {
  const bool is_sound =
      record->loss_scale != 0 &&
      (scaler.dynamic() || record->loss_scale == scaler.init_scale());
  if (!is_sound) StartLossScaler(scaler, record);
  return !is_sound;
}

void ContinueLossScaler(const v1::LossScalerState& state,
                        storage::StepRecord* record) {
  record->loss_scale = state.loss_scale();
  record->good_steps = state.good_steps();
  record->hysteresis_left = state.hysteresis_left();
}

void ChangeLossScaler(const v1::LossScaler& former,
                      const v1::LossScaler& scaler,
                      storage::StepRecord* record) {
  const double found = record->loss_scale;
  StartLossScaler(scaler, record);
  if (scaler.dynamic() && former.dynamic() &&
      scaler.init_scale() == former.init_scale()) {
    record->loss_scale = std::max(found, scaler.min_scale());
  }
}

void AdvanceLossScaler(const v1::LossScaler& scaler, bool found_inf,
                       storage::StepRecord* record) {
  if (!scaler.dynamic()) return;
  if (found_inf) {
    record->good_steps = 0;
    if (record->hysteresis_left > 1) {
      --record->hysteresis_left;
      return;
    }
    // The scale never becomes 0, which means that there is no scaler.
    constexpr double kLeast = std::numeric_limits<float>::denorm_min();
    record->loss_scale =
        std::max({record->loss_scale * scaler.backoff_factor(),
                  scaler.min_scale(), std::min(record->loss_scale, kLeast)});
    return;
  }
  if (++record->good_steps < scaler.growth_interval()) return;
  record->good_steps = 0;
  record->hysteresis_left = scaler.hysteresis();
  // As in torch, the scale stays within the range of a float.
  const double grown = record->loss_scale * scaler.growth_factor();
  if (std::isfinite(static_cast<float>(grown))) record->loss_scale = grown;
}

}  // namespace optstate::session
