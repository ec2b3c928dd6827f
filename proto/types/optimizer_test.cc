#include "proto/types/optimizer.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace optstate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Returns the message for the defaults with one value changed; "" when valid.
std::string MessageWith(OptimizerKind kind, size_t index, double value) {
  Hyperparams hyperparams = DefaultHyperparams(kind);
  hyperparams[index] = value;
  const absl::Status status = Validate(kind, hyperparams);
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

std::string AdamMessageWith(size_t index, double value) {
  return MessageWith(OptimizerKind::kAdam, index, value);
}

TEST(OptimizerTest, TableIsInOrderOfKindAndFits) {
  std::set<std::string> names;
  uint32_t kind = 0;
  for (const OptimizerInfo& info : Optimizers()) {
    EXPECT_EQ(static_cast<uint32_t>(info.kind), ++kind);
    EXPECT_EQ(&InfoOf(info.kind), &info);
    EXPECT_EQ(FindOptimizer(kind), &info);
    EXPECT_TRUE(names.insert(std::string(info.name)).second) << info.name;
    EXPECT_LE(info.hyperparams.size(), kHyperparamsMax);
    EXPECT_LE(info.state_arrays.size(), static_cast<size_t>(kStateArraysMax));
    EXPECT_EQ(info.hyperparams[kLr].name, "lr");
  }
  EXPECT_EQ(FindOptimizer(0), nullptr);
  EXPECT_EQ(FindOptimizer(kind + 1), nullptr);
}

TEST(OptimizerTest, DefaultsAreValid) {
  for (const OptimizerInfo& info : Optimizers()) {
    EXPECT_TRUE(Validate(info.kind, DefaultHyperparams(info.kind)).ok())
        << info.name;
  }
}

TEST(OptimizerTest, OptionsBringArrays) {
  const OptimizerInfo& adam = InfoOf(OptimizerKind::kAdam);
  EXPECT_TRUE(HasStateArray(adam, 1, 0));
  EXPECT_FALSE(HasStateArray(adam, 2, 0));
  EXPECT_TRUE(HasStateArray(adam, 2, adam::kAmsgrad));
  const OptimizerInfo& sgd = InfoOf(OptimizerKind::kSgd);
  EXPECT_FALSE(HasStateArray(sgd, 0, 0));
  EXPECT_TRUE(HasStateArray(sgd, 0, sgd::kHasMomentum));
  EXPECT_FALSE(HasStateArray(sgd, 1, sgd::kHasMomentum));
}

TEST(OptimizerTest, EdgesAreValid) {
  EXPECT_EQ(AdamMessageWith(adam::kLr, 0), "");
  EXPECT_EQ(AdamMessageWith(adam::kEps, 0), "");
  EXPECT_EQ(AdamMessageWith(adam::kBeta1, 0), "");
  EXPECT_EQ(AdamMessageWith(adam::kBeta2, std::nextafter(1.0, 0.0)), "");
  EXPECT_EQ(AdamMessageWith(adam::kWeightDecay, 0), "");
  EXPECT_EQ(AdamMessageWith(adam::kMaximize, 1), "");
  EXPECT_EQ(MessageWith(OptimizerKind::kSgd, sgd::kDampening, -1), "");
}

// torch checks these values in its constructors, and trains on when a group or
// a scheduler changes them later.
TEST(OptimizerTest, WhatTorchChecksInConstructorsAloneIsValid) {
  EXPECT_EQ(AdamMessageWith(adam::kLr, -1e-19), "");
  EXPECT_EQ(AdamMessageWith(adam::kEps, -1e-8), "");
  EXPECT_EQ(MessageWith(OptimizerKind::kAdagrad, adagrad::kLrDecay, -1), "");
  EXPECT_EQ(MessageWith(OptimizerKind::kAdafactor, adafactor::kD, 0.5), "");
  EXPECT_EQ(MessageWith(OptimizerKind::kMuon, muon::kNsSteps, -1), "");
}

TEST(OptimizerTest, MessagesAreTorchs) {
  EXPECT_EQ(AdamMessageWith(adam::kLr, kInfinity),
            "Invalid learning rate: inf");
  EXPECT_EQ(AdamMessageWith(adam::kBeta1, 1),
            "Invalid beta parameter at index 0: 1");
  EXPECT_EQ(AdamMessageWith(adam::kBeta2, -0.5),
            "Invalid beta parameter at index 1: -0.5");
  EXPECT_EQ(AdamMessageWith(adam::kWeightDecay, -2),
            "Invalid weight_decay value: -2");
  EXPECT_EQ(AdamMessageWith(adam::kMaximize, 2), "Invalid maximize: 2");
  EXPECT_EQ(MessageWith(OptimizerKind::kSgd, sgd::kMomentum, -0.1),
            "Invalid momentum value: -0.1");
  EXPECT_EQ(MessageWith(OptimizerKind::kAdafactor, adafactor::kBeta2Decay, 0.5),
            "Invalid beta2_decay: 0.5");
}

TEST(OptimizerTest, WhatRangesDoNotSay) {
  EXPECT_EQ(MessageWith(OptimizerKind::kAdafactor, adafactor::kD, 0),
            "Invalid clipping threshold d: 0");
  EXPECT_EQ(MessageWith(OptimizerKind::kMuon, muon::kNsSteps, 100),
            "Number of steps must be less than 100, ns_steps is: 100");
  EXPECT_EQ(MessageWith(OptimizerKind::kMuon, muon::kAdjustLr, 3),
            "Adjust learning rate function 3 is not supported");
}

TEST(OptimizerTest, StateElementsOfAdafactor) {
  const OptimizerInfo& info = InfoOf(OptimizerKind::kAdafactor);
  EXPECT_EQ(StateElements(info, 0, {3, 5}), 3u);
  EXPECT_EQ(StateElements(info, 1, {3, 5}), 5u);
  EXPECT_EQ(StateElements(info, 2, {3, 5}), 0u);
  EXPECT_EQ(StateElements(info, 0, {2, 3, 5}), 6u);
  EXPECT_EQ(StateElements(info, 1, {2, 3, 5}), 10u);
  EXPECT_EQ(StateElements(info, 0, {7}), 0u);
  EXPECT_EQ(StateElements(info, 2, {7}), 7u);
  EXPECT_EQ(StateElements(info, 2, {}), 1u);
  EXPECT_EQ(StateElements(info, 0, {0, 5}), 0u);
  EXPECT_EQ(StateElements(info, 0, {3, 0}), 0u);
  EXPECT_EQ(StateElements(InfoOf(OptimizerKind::kLamb), 0, {3, 5}), 15u);
}

TEST(OptimizerTest, KnowsWhereMaximizeIs) {
  for (const OptimizerInfo& info : Optimizers()) {
    int maximize = -1;
    for (size_t i = 0; i < info.hyperparams.size(); ++i) {
      if (info.hyperparams[i].name == "maximize")
        maximize = static_cast<int>(i);
    }
    EXPECT_EQ(info.maximize, maximize) << info.name;
  }
}

TEST(OptimizerTest, MeansAndSumsOfSquaresAreNeverNegative) {
  const std::set<std::string> squares = {
      "exp_avg_sq", "max_exp_avg_sq", "sum",     "square_avg",
      "row_var",    "col_var",        "variance"};
  for (const OptimizerInfo& info : Optimizers()) {
    for (int k = 0; k < kStateArraysMax; ++k) {
      const auto index = static_cast<size_t>(k);
      const bool is_square =
          index < info.state_arrays.size() &&
          squares.count(std::string(info.state_arrays[index].name)) != 0;
      EXPECT_EQ(IsNeverNegative(info.kind, k), is_square) << info.name << k;
    }
  }
}

TEST(OptimizerTest, AdafactorAloneHasPrefixes) {
  for (const OptimizerInfo& info : Optimizers()) {
    EXPECT_EQ(info.has_prefixes(), info.kind == OptimizerKind::kAdafactor);
  }
}

TEST(OptimizerTest, NanAndInfinityAreInvalid) {
  for (const OptimizerInfo& info : Optimizers()) {
    for (size_t i = 0; i < info.hyperparams.size(); ++i) {
      for (double value : {kNan, kInfinity, -kInfinity}) {
        EXPECT_NE(MessageWith(info.kind, i, value), "") << info.name << i;
      }
    }
  }
}

TEST(OptimizerTest, ValuesBehindTheLastMustBeZero) {
  EXPECT_EQ(AdamMessageWith(adam::kMaximize + 1, 1),
            "adam has 6 hyperparameters, number 6 is set");
}

TEST(OptimizerTest, FirstInvalidValueIsNamed) {
  Hyperparams hyperparams = DefaultHyperparams(OptimizerKind::kAdam);
  hyperparams[adam::kLr] = kInfinity;
  hyperparams[adam::kWeightDecay] = kInfinity;
  EXPECT_EQ(Validate(OptimizerKind::kAdam, hyperparams).message(),
            "Invalid learning rate: inf");
}

}  // namespace
}  // namespace optstate
