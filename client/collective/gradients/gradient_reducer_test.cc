// Compares reductions with float64 arithmetic.

#include "client/collective/gradients/gradient_reducer.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/collective/half_floats.h"
#include "client/collective/nccl/nccl_collective.h"
#include "client/collective/single_rank.h"
#include "client/collective/testing/fake_nccl.h"
#include "client/collective/testing/memory_store.h"
#include "client/collective/testing/ranks.h"
#include "client/fake/fake_arithmetic.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

// One rank's gradients, as memory.
class Gradients {
 public:
  explicit Gradients(const std::vector<GradientSpec>& specs) : specs_(specs) {
    for (const GradientSpec& each : specs) {
      bytes_.emplace_back(each.numel * SizeInBytes(each.dtype));
    }
  }
  void Set(size_t gradient, size_t i, float value) {
    StoreElement(specs_[gradient].dtype, bytes_[gradient].data(), i, value);
  }
  float Get(size_t gradient, size_t i) const {
    return LoadElement(specs_[gradient].dtype, bytes_[gradient].data(), i);
  }
  std::vector<absl::Span<std::byte>> spans() {
    std::vector<absl::Span<std::byte>> all;
    for (std::vector<std::byte>& each : bytes_) {
      all.push_back(absl::MakeSpan(each));
    }
    return all;
  }
  const std::vector<std::vector<std::byte>>& bytes() const { return bytes_; }

 private:
  std::vector<GradientSpec> specs_;
  std::vector<std::vector<std::byte>> bytes_;
};

std::vector<GradientSpec> MixedSpecs() {
  return {{.numel = 3000, .dtype = DType::kFloat32},
          {.numel = 0, .dtype = DType::kFloat32},
          {.numel = 1, .dtype = DType::kBFloat16},
          {.numel = 1025, .dtype = DType::kBFloat16},
          {.numel = 700, .dtype = DType::kFloat16}};
}

// Multiples of 1/64 of up to 7 bits: exact in every dtype, and so are the sums
// of few ranks in float32.
float ValueOf(uint32_t rank, size_t gradient, size_t i) {
  return static_cast<float>(
             static_cast<int>((i * 31 + rank * 17 + gradient * 5) % 255) -
             127) /
         64;
}

void Fill(uint32_t rank, const std::vector<GradientSpec>& specs,
          Gradients* gradients) {
  for (size_t gradient = 0; gradient < specs.size(); ++gradient) {
    for (size_t i = 0; i < specs[gradient].numel; ++i) {
      gradients->Set(gradient, i, ValueOf(rank, gradient, i));
    }
  }
}

// Makes a reducer on each rank, and does something with it.
std::vector<absl::Status> WithReducers(
    const Collectives& collectives, const std::vector<GradientSpec>& specs,
    const ReducerOptions& options,
    const std::function<absl::Status(Collective&, GradientReducer&)>& what) {
  return OnRanks(collectives, [&](Collective& each) -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<GradientReducer> reducer,
                              GradientReducer::Make(&each, specs, options));
    return what(each, *reducer);
  });
}

void ExpectAllOk(const std::vector<absl::Status>& results) {
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

Collectives Tcp(uint32_t ranks) {
  absl::StatusOr<Collectives> all = MakeTcpRanks(ranks);
  EXPECT_TRUE(all.ok()) << all.status();
  return all.ok() ? *std::move(all) : Collectives();
}

// Expects result = f(sum over ranks of g), computed in float64.
void ExpectReduced(const ReducerOptions& options, uint32_t ranks) {
  const std::vector<GradientSpec> specs = MixedSpecs();
  const Collectives all = Tcp(ranks);
  const double divisor = options.reduction == ReductionOp::kMean ? ranks : 1;
  ExpectAllOk(WithReducers(
      all, specs, options,
      [&](Collective& each, GradientReducer& reducer) -> absl::Status {
        Gradients gradients(specs);
        Fill(each.rank(), specs, &gradients);
        OPTSTATE_RETURN_IF_ERROR(reducer.Reduce(gradients.spans()));
        for (size_t g = 0; g < specs.size(); ++g) {
          for (size_t i = 0; i < specs[g].numel; ++i) {
            double sum = 0;
            for (uint32_t rank = 0; rank < ranks; ++rank) {
              sum += static_cast<double>(ValueOf(rank, g, i)) /
                     options.predivide_factor;
            }
            if (options.communication == ElementType::kBFloat16) {
              sum = static_cast<double>(FloatFromBFloat16(
                  BFloat16FromFloat(static_cast<float>(sum))));
            }
            std::byte one[4];
            StoreElement(
                specs[g].dtype, one, 0,
                static_cast<float>(sum * options.predivide_factor *
                                   options.postscale_factor / divisor));
            const float wanted = LoadElement(specs[g].dtype, one, 0);
            if (gradients.Get(g, i) == wanted) continue;
            return absl::InternalError(
                absl::StrCat("gradient ", g, " element ", i, " is ",
                             gradients.Get(g, i), ", not ", wanted));
          }
        }
        return absl::OkStatus();
      }));
}

TEST(GradientReducer, SumsAndMeansAreThoseOfFloat64) {
  for (const uint32_t ranks : {1, 2, 3}) {
    for (const ReductionOp op : {ReductionOp::kSum, ReductionOp::kMean}) {
      ReducerOptions options;
      options.reduction = op;
      options.bucket_bytes = 4096;  // gradients are cut, and share buckets
      ExpectReduced(options, ranks);
      options.bucket_bytes = 1 << 20;
      ExpectReduced(options, ranks);
    }
  }
}

TEST(GradientReducer, FactorsAreApplied) {
  ReducerOptions options;
  options.predivide_factor = 4;
  options.postscale_factor = 0.37;
  ExpectReduced(options, 3);
}

TEST(GradientReducer, BFloat16IsRoundedOnTheWay) {
  ReducerOptions options;
  options.communication = ElementType::kBFloat16;
  options.bucket_bytes = 4096;
  ExpectReduced(options, 2);
}

// A step without a gradient on any rank leaves it alone.
TEST(GradientReducer, GradientsThatSomeOrAllRanksLack) {
  const std::vector<GradientSpec> specs(3, GradientSpec{.numel = 5});
  const Collectives all = Tcp(2);
  ReducerOptions options;
  options.reduction = ReductionOp::kSum;
  ExpectAllOk(WithReducers(
      all, specs, options,
      [&](Collective& each, GradientReducer& reducer) -> absl::Status {
        Gradients gradients(specs);
        for (size_t g = 0; g < 3; ++g) {
          for (size_t i = 0; i < 5; ++i) gradients.Set(g, i, 7);
        }
        // Rank 1 lacks gradient 0; both lack gradient 1.
        std::vector<bool> has = {each.rank() == 0, false, true};
        OPTSTATE_RETURN_IF_ERROR(reducer.Reduce(gradients.spans(), &has));
        if (has != std::vector<bool>{true, false, true}) {
          return absl::InternalError("has_gradient is wrong");
        }
        for (size_t g = 0; g < 3; ++g) {
          if (gradients.Get(g, 4) == (g == 2 ? 14 : 7)) continue;
          return absl::InternalError(absl::StrCat("gradient ", g));
        }
        return absl::OkStatus();
      }));
}

TEST(GradientReducer, RanksThatDifferAreRefused) {
  const Collectives all = Tcp(3);
  const std::vector<absl::Status> results = OnRanks(all, [](Collective& each) {
    std::vector<GradientSpec> specs(4, GradientSpec{.numel = 5});
    if (each.rank() == 2) specs[3].numel = 6;
    return GradientReducer::Make(&each, specs, ReducerOptions()).status();
  });
  for (const absl::Status& each : results) {
    EXPECT_TRUE(absl::IsFailedPrecondition(each)) << each;
    EXPECT_THAT(std::string(each.message()), HasSubstr("rank 2"));
    EXPECT_THAT(std::string(each.message()), HasSubstr("6 float32"));
  }
}

TEST(GradientReducer, BadOptionsAndSpansAreRefused) {
  const std::unique_ptr<Collective> single = MakeSingleRank();
  std::vector<ReducerOptions> bad(10);
  bad[0].communication = ElementType::kFloat64;
  bad[1].bucket_bytes = 100;
  bad[2].predivide_factor = 0;
  bad[3].postscale_factor = -1;
  bad[4].predivide_factor = std::numeric_limits<double>::infinity();
  bad[5].quantization = BlockQuantization{.block_elements = 1};
  bad[6].quantization = BlockQuantization{.block_elements = 1u << 30};
  bad[7].quantization = BlockQuantization();
  bad[7].communication = ElementType::kBFloat16;
  bad[8].reduction = static_cast<ReductionOp>(9);
  bad[9].predivide_factor = 1e-200;
  bad[9].postscale_factor = 1e-200;  // the product is 0
  for (size_t i = 0; i < bad.size(); ++i) {
    const absl::Status status =
        GradientReducer::Make(single.get(), {}, bad[i]).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << i << ": " << status;
  }
  // So many float32 elements have 4 bytes in 64 bits.
  const std::vector<GradientSpec> endless = {
      {.numel = (uint64_t{1} << 62) + 1}};
  const absl::Status too_many =
      GradientReducer::Make(single.get(), endless, ReducerOptions()).status();
  EXPECT_TRUE(absl::IsInvalidArgument(too_many)) << too_many;
  EXPECT_THAT(std::string(too_many.message()), HasSubstr("gradient 0"));
  const std::vector<GradientSpec> specs(2, GradientSpec{.numel = 3});
  const auto reducer =
      GradientReducer::Make(single.get(), specs, ReducerOptions());
  ASSERT_TRUE(reducer.ok()) << reducer.status();
  Gradients gradients(specs);
  std::vector<absl::Span<std::byte>> spans = gradients.spans();
  spans[1] = spans[1].subspan(4);
  EXPECT_TRUE(absl::IsInvalidArgument((*reducer)->Reduce(spans)));
  EXPECT_TRUE(absl::IsInvalidArgument((*reducer)->Reduce({})));
  std::vector<bool> has(1);
  EXPECT_TRUE(
      absl::IsInvalidArgument((*reducer)->Reduce(gradients.spans(), &has)));
}

// Over many steps, what all ranks have got is what they had, but for the last
// feedback of each.
TEST(GradientReducer, QuantisedStepsAddUpToTheGradients) {
  const std::vector<GradientSpec> specs = {{.numel = 700}, {.numel = 33}};
  constexpr int kSteps = 40;
  const Collectives all = Tcp(2);
  ReducerOptions options;
  options.reduction = ReductionOp::kSum;
  options.bucket_bytes = 4096;
  options.quantization = BlockQuantization{.block_elements = 64};
  const uint64_t seed = ScriptSeed();
  std::vector<std::vector<double>> had(2, std::vector<double>(733));
  std::vector<std::vector<double>> got(2, std::vector<double>(733));
  std::vector<std::vector<double>> left(2, std::vector<double>(733));
  ExpectAllOk(WithReducers(
      all, specs, options,
      [&](Collective& each, GradientReducer& reducer) -> absl::Status {
        std::mt19937_64 draw(seed + each.rank());
        const auto at = [](size_t g, size_t i) { return g * 700 + i; };
        for (int step = 0; step < kSteps; ++step) {
          Gradients gradients(specs);
          for (size_t g = 0; g < 2; ++g) {
            for (size_t i = 0; i < specs[g].numel; ++i) {
              const auto value =
                  static_cast<float>(static_cast<int>(draw() % 2001) - 1000) /
                  1024;
              gradients.Set(g, i, value);
              had[each.rank()][at(g, i)] += static_cast<double>(value);
            }
          }
          OPTSTATE_RETURN_IF_ERROR(reducer.Reduce(gradients.spans()));
          reducer.NoteApplied();
          reducer.NoteApplied();  // does nothing
          for (size_t g = 0; g < 2; ++g) {
            for (size_t i = 0; i < specs[g].numel; ++i) {
              got[each.rank()][at(g, i)] +=
                  static_cast<double>(gradients.Get(g, i));
            }
          }
        }
        for (size_t g = 0; g < 2; ++g) {
          for (size_t i = 0; i < specs[g].numel; ++i) {
            left[each.rank()][at(g, i)] =
                static_cast<double>(reducer.feedback(g)[i]);
          }
        }
        return absl::OkStatus();
      }));
  EXPECT_EQ(got[0], got[1]);
  for (size_t i = 0; i < 733; ++i) {
    EXPECT_NEAR(got[0][i] + left[0][i] + left[1][i], had[0][i] + had[1][i],
                kSteps * 0x1p-23)
        << i;
    // A mean error would be as large as a scale times the steps.
    EXPECT_LT(std::abs(left[0][i]), 1.0 / 127);
  }
}

// A step that was not applied leaves the feedback as it was.
TEST(GradientReducer, SkippedStepsKeepTheFeedback) {
  const std::vector<GradientSpec> specs = {{.numel = 100}};
  const std::unique_ptr<Collective> single = MakeSingleRank();
  ReducerOptions options;
  options.quantization = BlockQuantization{.block_elements = 32};
  const auto made = GradientReducer::Make(single.get(), specs, options);
  ASSERT_TRUE(made.ok()) << made.status();
  GradientReducer& reducer = **made;
  const auto reduce = [&](float extra) {
    Gradients gradients(specs);
    for (size_t i = 0; i < 100; ++i) {
      gradients.Set(0, i, static_cast<float>(i) / 3);
    }
    gradients.Set(0, 40, extra);
    EXPECT_TRUE(reducer.Reduce(gradients.spans()).ok());
    return gradients;
  };
  const Gradients first = reduce(1.1f);
  // Taken again, it is the same.
  EXPECT_EQ(reduce(1.1f).bytes(), first.bytes());
  reducer.NoteApplied();
  const std::vector<float> kept(reducer.feedback(0).begin(),
                                reducer.feedback(0).end());
  EXPECT_NE(kept, std::vector<float>(100));
  const Gradients second = reduce(1.1f);
  EXPECT_NE(second.bytes(), first.bytes());
  // A NaN goes to every rank, and the step is skipped.
  const Gradients bad = reduce(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(bad.Get(0, 40)));
  EXPECT_TRUE(std::isnan(bad.Get(0, 33)));  // of the same block
  EXPECT_FALSE(std::isnan(bad.Get(0, 0)));
  EXPECT_EQ(std::vector<float>(reducer.feedback(0).begin(),
                               reducer.feedback(0).end()),
            kept);
  EXPECT_EQ(reduce(1.1f).bytes(), second.bytes());
}

TEST(GradientReducer, OverADevice) {
  const absl::StatusOr<FakeNccl> fake = FakeNccl::Open();
  ASSERT_TRUE(fake.ok()) << fake.status();
  MemoryStore store;
  const absl::StatusOr<Collectives> all = MakeRanks(2, [&](uint32_t rank) {
    NcclOptions nccl;
    nccl.rank = rank;
    nccl.world_size = 2;
    nccl.library = kFakeNcclPath;
    return MakeNcclCollective(nccl, &store, fake->MakeQueue());
  });
  ASSERT_TRUE(all.ok()) << all.status();
  const std::vector<GradientSpec> specs = {{.numel = 10}, {.numel = 3}};
  ReducerOptions options;
  EXPECT_TRUE(absl::IsUnimplemented(
      GradientReducer::Make((*all)[0].get(), specs, options).status()));
  options.reduction = ReductionOp::kSum;
  EXPECT_TRUE(absl::IsUnimplemented(
      GradientReducer::Make((*all)[0].get(), MixedSpecs(), options).status()));
  ExpectAllOk(WithReducers(
      *all, specs, options,
      [&](Collective& each, GradientReducer& reducer) -> absl::Status {
        Gradients gradients(specs);
        Fill(each.rank(), specs, &gradients);
        OPTSTATE_RETURN_IF_ERROR(reducer.Reduce(gradients.spans()));
        for (size_t g = 0; g < specs.size(); ++g) {
          for (size_t i = 0; i < specs[g].numel; ++i) {
            if (gradients.Get(g, i) == ValueOf(0, g, i) + ValueOf(1, g, i)) {
              continue;
            }
            return absl::InternalError(absl::StrCat("gradient ", g));
          }
        }
        std::vector<bool> has = {true, false};
        return absl::IsUnimplemented(reducer.Reduce(gradients.spans(), &has))
                   ? absl::OkStatus()
                   : absl::InternalError("a gradient was lacking");
      }));
}

}  // namespace
}  // namespace optstate::client
