#include "server/session/steps/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace optstate::session {
namespace {

v1::LossScaler Dynamic(double scale, uint32_t interval, uint32_t hysteresis = 1,
                       double min_scale = 0) {
  v1::LossScaler scaler;
  scaler.set_dynamic(true);
  scaler.set_init_scale(scale);
  scaler.set_growth_factor(2);
  scaler.set_backoff_factor(0.5);
  scaler.set_growth_interval(interval);
  scaler.set_hysteresis(hysteresis);
  scaler.set_min_scale(min_scale);
  return scaler;
}

TEST(LossScalerChangeTest, KeepsTheScaleThatWasFound) {
  const v1::LossScaler former = Dynamic(65536, 5);
  const auto scale_after = [&](const v1::LossScaler& scaler) {
    storage::StepRecord record;
    StartLossScaler(former, &record);
    AdvanceLossScaler(former, /*found_inf=*/true, &record);
    ChangeLossScaler(former, scaler, &record);
    EXPECT_EQ(record.good_steps, 0u);
    EXPECT_EQ(record.hysteresis_left, scaler.hysteresis());
    return record.loss_scale;
  };
  EXPECT_EQ(scale_after(Dynamic(65536, 7, 2)), 32768);
  EXPECT_EQ(scale_after(Dynamic(65536, 5, 1, 40000)), 40000);
  EXPECT_EQ(scale_after(Dynamic(1024, 5)), 1024);
  v1::LossScaler fixed = Dynamic(65536, 5);
  fixed.set_dynamic(false);
  EXPECT_EQ(scale_after(fixed), 65536);
}

TEST(LossScalerStateTest, IsOneThatTheScalerCanComeTo) {
  const v1::LossScaler scaler = Dynamic(65536, 5, 2);
  v1::LossScalerState state;
  state.set_loss_scale(512);
  state.set_good_steps(4);
  state.set_hysteresis_left(1);
  ASSERT_TRUE(CheckLossScalerState(scaler, state).ok());
  storage::StepRecord record;
  ContinueLossScaler(state, &record);
  AdvanceLossScaler(scaler, /*found_inf=*/false, &record);
  EXPECT_EQ(record.loss_scale, 1024);
  EXPECT_EQ(record.hysteresis_left, 2u);

  const auto refused = [&](auto change) {
    v1::LossScalerState other = state;
    change(&other);
    return !CheckLossScalerState(scaler, other).ok();
  };
  EXPECT_TRUE(refused([](auto* s) { s->set_loss_scale(0); }));
  EXPECT_TRUE(refused([](auto* s) { s->set_loss_scale(NAN); }));
  EXPECT_TRUE(refused([](auto* s) { s->set_good_steps(5); }));
  EXPECT_TRUE(refused([](auto* s) { s->set_hysteresis_left(0); }));
  EXPECT_TRUE(refused([](auto* s) { s->set_hysteresis_left(3); }));
  EXPECT_FALSE(CheckLossScalerState(v1::LossScaler(), state).ok());
}

TEST(LossScalerHysteresisTest, HasRoomInACompletion) {
  EXPECT_TRUE(CheckLossScaler(Dynamic(1, 1, (1 << 24) - 1)).ok());
  EXPECT_FALSE(CheckLossScaler(Dynamic(1, 1, 1 << 24)).ok());
}

TEST(LossScalerMinimumTest, IsNeverZero) {
  v1::LossScaler scaler = Dynamic(1, 1);
  scaler.set_backoff_factor(1e-30);
  storage::StepRecord record;
  StartLossScaler(scaler, &record);
  for (int i = 0; i < 20; ++i) AdvanceLossScaler(scaler, true, &record);
  EXPECT_EQ(record.loss_scale, std::numeric_limits<float>::denorm_min());
  // A scale that begins below this is not raised either.
  scaler.set_init_scale(1e-300);
  StartLossScaler(scaler, &record);
  AdvanceLossScaler(scaler, true, &record);
  EXPECT_EQ(record.loss_scale, 1e-300);
}

TEST(LossScalerRepairTest, OnlyWhatNoScalerHasIsRepaired) {
  v1::LossScaler scaler = Dynamic(64, 1);
  storage::StepRecord record;
  StartLossScaler(scaler, &record);
  record.loss_scale = 8;
  EXPECT_FALSE(RepairLossScaler(scaler, &record));
  record.loss_scale = 0;
  EXPECT_TRUE(RepairLossScaler(scaler, &record));
  EXPECT_EQ(record.loss_scale, 64);
  EXPECT_EQ(record.hysteresis_left, scaler.hysteresis());
  record.loss_scale = 8;  // of a former, dynamic one
  scaler.set_dynamic(false);
  EXPECT_TRUE(RepairLossScaler(scaler, &record));
  EXPECT_EQ(record.loss_scale, 64);
  EXPECT_FALSE(RepairLossScaler(scaler, &record));
}

// Transcribes update() of torch/amp/grad_scaler.py.
struct GradScaler {
  float scale;
  int growth_tracker = 0;

  void Update(bool found_inf, const v1::LossScaler& scaler) {
    if (found_inf) {
      scale *= static_cast<float>(scaler.backoff_factor());
      growth_tracker = 0;
      return;
    }
    if (++growth_tracker == static_cast<int>(scaler.growth_interval())) {
      const float grown = scale * static_cast<float>(scaler.growth_factor());
      if (grown <= std::numeric_limits<float>::max()) scale = grown;
      growth_tracker = 0;
    }
  }
};

// Transcribes DynamicLossScaler.update_scale() of
// deepspeed/runtime/fp16/loss_scaler.py.
struct DynamicLossScaler {
  double cur_scale;
  int64_t scale_window;
  double min_scale;
  uint32_t delayed_shift;
  uint32_t cur_hysteresis;
  int64_t cur_iter = 0;
  int64_t last_overflow_iter = -1;

  void UpdateScale(bool overflow) {
    if (overflow) {
      if (delayed_shift == 1 || cur_hysteresis == 1) {
        cur_scale = std::max(cur_scale / 2, min_scale);
      } else {
        --cur_hysteresis;
      }
      last_overflow_iter = cur_iter;
    } else if ((cur_iter - last_overflow_iter) % scale_window == 0) {
      cur_hysteresis = delayed_shift;
      cur_scale *= 2;
    }
    ++cur_iter;
  }
};

class LossScalerTest : public ::testing::Test {
 protected:
  LossScalerTest() {
    const uint64_t seed = std::random_device{}();
    std::cerr << "seed " << seed << std::endl;
    generator_.seed(seed);
  }
  bool Overflow(double odds) {
    return std::uniform_real_distribution<double>(0, 1)(generator_) < odds;
  }

  std::mt19937_64 generator_;
  storage::StepRecord record_ = {};
};

TEST_F(LossScalerTest, IsGradScaler) {
  const v1::LossScaler scaler = Dynamic(65536, 5);
  StartLossScaler(scaler, &record_);
  GradScaler torch = {65536};
  for (int step = 0; step < 5000; ++step) {
    // The scale goes up to float's end and down to its denormals.
    const bool found_inf = Overflow(step < 2500 ? 0.01 : 0.3);
    AdvanceLossScaler(scaler, found_inf, &record_);
    torch.Update(found_inf, scaler);
    if (torch.scale == 0) break;
    ASSERT_EQ(static_cast<float>(record_.loss_scale), torch.scale) << step;
  }
}

TEST_F(LossScalerTest, IsDeepSpeedsWithHysteresisAndMinimum) {
  for (const uint32_t hysteresis : {1u, 2u, 3u}) {
    const v1::LossScaler scaler = Dynamic(65536, 7, hysteresis, 4);
    StartLossScaler(scaler, &record_);
    DynamicLossScaler deepspeed = {65536, 7, 4, hysteresis, hysteresis};
    for (int step = 0; step < 700; ++step) {
      const bool overflow = Overflow(0.2);
      AdvanceLossScaler(scaler, overflow, &record_);
      deepspeed.UpdateScale(overflow);
      ASSERT_EQ(record_.loss_scale, deepspeed.cur_scale)
          << "hysteresis " << hysteresis << ", step " << step;
    }
  }
}

TEST_F(LossScalerTest, StaticStays) {
  v1::LossScaler scaler;
  scaler.set_init_scale(128);
  ASSERT_TRUE(CheckLossScaler(scaler).ok());
  StartLossScaler(scaler, &record_);
  AdvanceLossScaler(scaler, true, &record_);
  AdvanceLossScaler(scaler, false, &record_);
  EXPECT_EQ(record_.loss_scale, 128);
}

TEST_F(LossScalerTest, BadSettingsAreNamed) {
  EXPECT_TRUE(CheckLossScaler(Dynamic(65536, 1)).ok());
  const auto message = [](auto&& change) {
    v1::LossScaler scaler = Dynamic(65536, 10);
    change(&scaler);
    return std::string(CheckLossScaler(scaler).message());
  };
  EXPECT_EQ(message([](auto* s) { s->set_init_scale(0); }),
            "Invalid loss_scaler.init_scale: 0: must be finite and above 0");
  EXPECT_EQ(message([](auto* s) { s->set_growth_factor(1); }),
            "Invalid loss_scaler.growth_factor: 1: must be finite and above 1");
  EXPECT_EQ(message([](auto* s) { s->set_backoff_factor(1); }),
            "Invalid loss_scaler.backoff_factor: 1: must be between 0 and 1");
  EXPECT_EQ(message([](auto* s) { s->set_growth_interval(0); }),
            "Invalid loss_scaler.growth_interval: 0: must be at least 1");
  EXPECT_EQ(message([](auto* s) { s->set_hysteresis(0); }),
            "Invalid loss_scaler.hysteresis: 0: must be from 1 to "
            "16777215");
  EXPECT_EQ(message([](auto* s) { s->set_min_scale(1e9); }),
            "Invalid loss_scaler.min_scale: 1e+09: must be from 0 to "
            "init_scale");
}

}  // namespace
}  // namespace optstate::session
