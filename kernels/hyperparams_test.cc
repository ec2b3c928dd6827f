#include "kernels/hyperparams.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace optstate {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The message for the defaults with `field` set to `value`; "" when valid.
std::string MessageWith(double Hyperparams::*field, double value) {
  Hyperparams hyperparams;
  hyperparams.*field = value;
  const absl::Status status = Validate(hyperparams);
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(HyperparamsTest, DefaultsAreValid) {
  EXPECT_TRUE(Validate(Hyperparams()).ok());
}

TEST(HyperparamsTest, EdgesAreValid) {
  EXPECT_EQ(MessageWith(&Hyperparams::lr, 0), "");
  EXPECT_EQ(MessageWith(&Hyperparams::eps, 0), "");
  EXPECT_EQ(MessageWith(&Hyperparams::beta1, 0), "");
  EXPECT_EQ(MessageWith(&Hyperparams::beta2, std::nextafter(1.0, 0.0)), "");
  EXPECT_EQ(MessageWith(&Hyperparams::weight_decay, 0), "");
}

TEST(HyperparamsTest, MessagesAreTorchs) {
  EXPECT_EQ(MessageWith(&Hyperparams::lr, -1), "Invalid learning rate: -1");
  EXPECT_EQ(MessageWith(&Hyperparams::eps, -1e-8),
            "Invalid epsilon value: -1e-08");
  EXPECT_EQ(MessageWith(&Hyperparams::beta1, 1),
            "Invalid beta parameter at index 0: 1");
  EXPECT_EQ(MessageWith(&Hyperparams::beta2, -0.5),
            "Invalid beta parameter at index 1: -0.5");
  EXPECT_EQ(MessageWith(&Hyperparams::weight_decay, -2),
            "Invalid weight_decay value: -2");
}

TEST(HyperparamsTest, NanAndInfinityAreInvalid) {
  for (double Hyperparams::*field :
       {&Hyperparams::lr, &Hyperparams::eps, &Hyperparams::beta1,
        &Hyperparams::beta2, &Hyperparams::weight_decay}) {
    EXPECT_NE(MessageWith(field, kNan), "");
    EXPECT_NE(MessageWith(field, kInfinity), "");
    EXPECT_NE(MessageWith(field, -kInfinity), "");
  }
}

TEST(HyperparamsTest, FirstInvalidValueIsNamed) {
  Hyperparams hyperparams;
  hyperparams.lr = -1;
  hyperparams.weight_decay = -1;
  EXPECT_EQ(Validate(hyperparams).message(), "Invalid learning rate: -1");
}

}  // namespace
}  // namespace optstate
