#include "proto/types/layout.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"

namespace optstate {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ParameterSpec Parameter(std::string name, std::vector<int64_t> shape,
                        uint32_t group = 0) {
  int64_t numel = 1;
  for (int64_t dimension : shape) numel *= dimension;
  return {.name = std::move(name),
          .shape = std::move(shape),
          .numel = numel,
          .group = group};
}

// Returns two groups with three parameters.
LayoutSpec SmallSpec() {
  return {
      .optimizer = OptimizerKind::kAdamW,
      .groups = {{.options = 0}, {.options = adam::kAmsgrad}},
      .parameters = {Parameter("a.weight", {4, 4}), Parameter("a.bias", {3}),
                     Parameter("b.weight", {5000}, 1)}};
}

Layout MakeOrDie(LayoutSpec spec) {
  absl::StatusOr<Layout> layout = Layout::Make(std::move(spec));
  EXPECT_TRUE(layout.ok()) << layout.status();
  return *std::move(layout);
}

void ExpectInvalid(LayoutSpec spec, const std::string& reason) {
  const absl::Status status = Layout::Make(std::move(spec)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
}

TEST(LayoutTest, PlacesParametersInBothSpaces) {
  const Layout layout = MakeOrDie(SmallSpec());
  EXPECT_EQ(layout.flat_offset(0), 0u);
  EXPECT_EQ(layout.flat_offset(1), 16u);
  EXPECT_EQ(layout.flat_offset(2), 4096u);  // a new group, a new tile
  EXPECT_EQ(layout.group_begin(0), 0u);
  EXPECT_EQ(layout.group_end(0), 4096u);
  EXPECT_EQ(layout.group_end(1), 4096u + 8192u);
  EXPECT_EQ(layout.flat_elements(), 4096u + 8192u);
  EXPECT_EQ(layout.element_count(), 16u + 3u + 5000u);
  EXPECT_EQ(layout.parameter_offset_bytes(1), 64u);
  EXPECT_EQ(layout.parameter_offset_bytes(2), 128u);
  EXPECT_EQ(layout.parameter_area_bytes(), 128u + 20032u);
  EXPECT_TRUE(layout.has_state_array(2));
}

TEST(LayoutTest, EmptyGroupsTakeNoTiles) {
  const Layout layout = MakeOrDie(
      {.groups = {{}, {}, {}, {}},
       .parameters = {Parameter("a", {1}, 1), Parameter("b", {1}, 2)}});
  EXPECT_EQ(layout.group_end(0), 0u);
  EXPECT_EQ(layout.group_begin(1), 0u);
  EXPECT_EQ(layout.group_begin(2), 4096u);
  EXPECT_EQ(layout.group_begin(3), 8192u);
  EXPECT_EQ(layout.group_end(3), 8192u);
  EXPECT_FALSE(layout.has_state_array(2));
}

TEST(LayoutTest, ParametersWithoutElementsTakeNoRoom) {
  const Layout layout = MakeOrDie(
      {.groups = {{}},
       .parameters = {Parameter("a", {0}), Parameter("b", {3, 0, 1LL << 40})}});
  EXPECT_EQ(layout.flat_elements(), 0u);
  EXPECT_EQ(layout.parameter_area_bytes(), 0u);
  EXPECT_EQ(layout.element_count(), 0u);
}

TEST(LayoutTest, RandomLayoutsKeepTheInvariants) {
  RandomLayouts random;
  for (int round = 0; round < 100; ++round) {
    const Layout layout = MakeOrDie(random.Next(60));
    uint64_t flat = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < layout.parameters().size(); ++i) {
      const ParameterSpec& p = layout.parameters()[i];
      EXPECT_EQ(layout.flat_offset(i) % kParameterAlignElements, 0u);
      EXPECT_EQ(layout.parameter_offset_bytes(i) % kSegmentAlignBytes, 0u);
      EXPECT_GE(layout.flat_offset(i), flat);
      EXPECT_GE(layout.parameter_offset_bytes(i), bytes);
      flat = layout.flat_offset(i) + p.numel;
      bytes = layout.parameter_offset_bytes(i) + p.numel * SizeInBytes(p.dtype);
      EXPECT_GE(layout.flat_offset(i), layout.group_begin(p.group));
      EXPECT_LE(flat, layout.group_end(p.group));
    }
    EXPECT_LE(flat, layout.flat_elements());
    EXPECT_LE(bytes, layout.parameter_area_bytes());
    for (uint32_t g = 0; g < layout.groups().size(); ++g) {
      EXPECT_EQ(layout.group_begin(g) % kTileElements, 0u);
      EXPECT_LE(layout.group_begin(g), layout.group_end(g));
    }
    EXPECT_EQ(layout.flat_elements(),
              layout.group_end(layout.groups().size() - 1));
  }
}

TEST(LayoutTest, RefusesWhatIsNotALayout) {
  LayoutSpec spec = SmallSpec();
  spec.parameters.clear();
  ExpectInvalid(spec, "no parameters");

  spec = SmallSpec();
  spec.parameters[1].name = "";
  ExpectInvalid(spec, "parameter 1 \"\": the name is empty");

  spec = SmallSpec();
  spec.groups.resize(kGroupsMax + 1);
  ExpectInvalid(spec, "524289 groups; at most 524288");

  spec = SmallSpec();
  spec.parameters[1].name = "\xff.bias";
  ExpectInvalid(spec, "parameter 1 \"\\377.bias\": the name is not UTF-8");

  spec = SmallSpec();
  spec.parameters[2].name = "a.weight";
  ExpectInvalid(spec,
                "parameter 2 \"a.weight\": parameter 0 has the same name");

  spec = SmallSpec();
  spec.parameters[0].numel = 15;
  ExpectInvalid(spec, "numel is 15, but shape [4,4] has 16");

  spec = SmallSpec();
  spec.parameters[0].shape = {};  // a scalar has one element
  ExpectInvalid(spec, "numel is 16, but shape [] has 1");

  spec = SmallSpec();
  spec.parameters[0].shape = {-4, -4};
  ExpectInvalid(spec, "negative dimension");

  spec = SmallSpec();
  spec.parameters[2].group = 2;
  ExpectInvalid(spec, "group 2 is not one of the 2 groups");

  spec = SmallSpec();
  spec.parameters[0].group = 1;
  ExpectInvalid(spec, "parameter 1 \"a.bias\": group 0 comes after group 1");

  spec = SmallSpec();
  spec.parameters[0].dtype = static_cast<DType>(4);
  ExpectInvalid(spec, "dtype 4");

  spec = SmallSpec();
  spec.parameters[0].gradient_dtype = static_cast<DType>(0);
  ExpectInvalid(spec, "gradient dtype 0");

  spec = SmallSpec();
  spec.optimizer = static_cast<OptimizerKind>(99);
  ExpectInvalid(spec, "optimizer 99");
}

TEST(LayoutTest, RefusesSizesThatOverflow) {
  LayoutSpec spec = SmallSpec();
  spec.parameters[0].shape = {1LL << 32, 1LL << 32};  // 0 modulo 2^64
  spec.parameters[0].numel = 0;
  ExpectInvalid(spec, "2^48 elements or more");

  spec = {.groups = {{}}, .parameters = {}};
  for (int i = 0; i < 3; ++i) {
    spec.parameters.push_back(Parameter(absl::StrCat("p", i), {1LL << 47}));
  }
  ExpectInvalid(spec, "parameter 2 \"p2\": the layout grows beyond 2^48");
  spec.parameters.pop_back();
  EXPECT_TRUE(Layout::Make(spec).ok());
}

TEST(LayoutTest, MessagesStayShortWhateverTheNames) {
  LayoutSpec spec = SmallSpec();
  spec.parameters[0].name = std::string(1 << 20, '\xff');
  spec.parameters[0].numel = 1;
  const absl::Status status = Layout::Make(spec).status();
  EXPECT_LT(status.message().size(), 1000u);
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\xff")));
}

TEST(LayoutTest, HandlesAHundredThousandParameters) {
  LayoutSpec spec = {.groups = {{}}, .parameters = {}};
  for (int i = 0; i < 100000; ++i) {
    spec.parameters.push_back(Parameter(absl::StrCat("p", i), {i % 50}));
  }
  const Layout layout = MakeOrDie(spec);
  EXPECT_EQ(layout.element_count(), 100000u / 50 * (49 * 50 / 2));
  EXPECT_TRUE(layout.CheckSame(MakeOrDie(spec), false).ok());
}

// The serialisation is part of the format: stored jobs carry this hash. It was
// computed apart from this code, by Python's hashlib over the documented bytes.
TEST(LayoutTest, HashIsTheDocumentedOne) {
  EXPECT_EQ(absl::BytesToHexString(MakeOrDie(SmallSpec()).hash()),
            "2230dee79fc4baed7782c6c012e98f4817880136fa1e9e0c19eaac53cb9b0131");
}

TEST(LayoutTest, HashChangesWithEveryField) {
  const std::string hash = MakeOrDie(SmallSpec()).hash();
  EXPECT_EQ(MakeOrDie(SmallSpec()).hash(), hash);
  const auto changed = [&hash](const auto& change) {
    LayoutSpec spec = SmallSpec();
    change(spec);
    return MakeOrDie(spec).hash() != hash;
  };
  EXPECT_TRUE(
      changed([](LayoutSpec& s) { s.optimizer = OptimizerKind::kAdam; }));
  EXPECT_TRUE(
      changed([](LayoutSpec& s) { s.groups[0].options = adam::kAmsgrad; }));
  EXPECT_TRUE(changed([](LayoutSpec& s) { s.groups.push_back({}); }));
  EXPECT_TRUE(changed([](LayoutSpec& s) { s.parameters[0].name = "c"; }));
  EXPECT_TRUE(changed([](LayoutSpec& s) { s.parameters[0].shape = {16}; }));
  EXPECT_TRUE(
      changed([](LayoutSpec& s) { s.parameters[0].dtype = DType::kFloat16; }));
  EXPECT_TRUE(changed(
      [](LayoutSpec& s) { s.parameters[0].gradient_dtype = DType::kFloat16; }));
  EXPECT_TRUE(changed([](LayoutSpec& s) { s.parameters[1].group = 1; }));
  EXPECT_TRUE(changed([](LayoutSpec& s) { s.parameters.pop_back(); }));
  EXPECT_TRUE(
      changed([](LayoutSpec& s) { s.state_format = StateFormat::kBFloat16; }));
  EXPECT_TRUE(
      changed([](LayoutSpec& s) { s.master_format = MasterFormat::kSplit; }));
}

// A split master is the bfloat16 parameter and 16 bits; float32 parameters are
// their own masters.
TEST(LayoutTest, SplitMastersNeedBFloat16) {
  LayoutSpec spec = SmallSpec();
  spec.master_format = MasterFormat::kSplit;
  spec.parameters[2].dtype = DType::kBFloat16;
  const Layout layout = MakeOrDie(spec);
  EXPECT_EQ(layout.master_format(0), MasterFormat::kParameter);
  EXPECT_EQ(layout.master_format(2), MasterFormat::kSplit);
  spec.parameters[2].dtype = DType::kFloat16;
  ExpectInvalid(spec, "parameter 2 \"b.weight\": a split master");
  spec.master_format = MasterFormat::kFloat32;
  EXPECT_EQ(MakeOrDie(spec).master_format(2), MasterFormat::kFloat32);
  spec.master_format = MasterFormat::kParameter;
  ExpectInvalid(spec, "master format 3");
}

// Returns the error of CheckSame when `change` is made to the layout of a rank.
std::string Difference(const std::function<void(LayoutSpec&)>& change,
                       bool allow_extension = false) {
  LayoutSpec spec = SmallSpec();
  change(spec);
  const absl::Status status =
      MakeOrDie(SmallSpec()).CheckSame(MakeOrDie(spec), allow_extension);
  if (status.ok()) return "OK";
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(LayoutTest, CheckSameNamesTheFirstDifference) {
  EXPECT_EQ(Difference([](LayoutSpec&) {}), "OK");
  EXPECT_EQ(
      Difference([](LayoutSpec& s) { s.optimizer = OptimizerKind::kAdam; }),
      "the optimizer is adamw in the job, adam here");
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.parameters[0].name = "b"; }),
            "parameter 0 is \"a.weight\" float32[4,4] in the job, \"b\" here");
  EXPECT_EQ(Difference([](LayoutSpec& s) {
              s.parameters[0].shape = {2, 8};
            }),
            "parameter 0 \"a.weight\" is float32[4,4] in the job, "
            "float32[2,8] here");
  EXPECT_EQ(
      Difference(
          [](LayoutSpec& s) { s.parameters[1].dtype = DType::kBFloat16; }),
      "parameter 1 \"a.bias\" is float32[3] in the job, bfloat16[3] here");
  EXPECT_EQ(Difference([](LayoutSpec& s) {
              s.parameters[2].gradient_dtype = DType::kFloat16;
            }),
            "the gradient of parameter 2 \"b.weight\" is float32 in the job, "
            "float16 here");
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.parameters[1].group = 1; }),
            "the group of parameter 1 \"a.bias\" is 0 in the job, 1 here");
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.groups[1].options = 0; }),
            "amsgrad of group 1 is on in the job, off here");
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.parameters.pop_back(); }),
            "the number of parameters is 3 in the job, 2 here");
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.groups.push_back({}); }),
            "the number of groups is 2 in the job, 3 here");
}

// Float32 parameters are their own masters, with any requested format.
TEST(LayoutTest, AMasterFormatMattersToOtherParametersAlone) {
  const auto split = [](LayoutSpec& s) {
    s.master_format = MasterFormat::kSplit;
  };
  EXPECT_EQ(Difference(split), "OK");
  const auto split_group = [&](LayoutSpec& s) {
    split(s);
    s.groups.push_back({});
    s.parameters.push_back(Parameter("c", {7}, 2));
    s.parameters.back().dtype = DType::kBFloat16;
  };
  EXPECT_EQ(Difference(split_group, /*allow_extension=*/true), "OK");
  LayoutSpec job = SmallSpec();
  job.parameters[2].dtype = DType::kBFloat16;
  LayoutSpec rank = job;
  split(rank);
  const absl::Status status =
      MakeOrDie(job).CheckSame(MakeOrDie(rank), /*allow_extension=*/false);
  EXPECT_EQ(status.message(),
            "the master format is float32 in the job, split here");
}

TEST(LayoutTest, AnExtensionAddsWholeGroupsAtTheEnd) {
  const auto add_group = [](LayoutSpec& s) {
    s.groups.push_back({});
    s.parameters.push_back(Parameter("c", {7}, 2));
  };
  EXPECT_EQ(Difference(add_group, true), "OK");
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.groups.push_back({}); }, true),
            "OK");
  EXPECT_EQ(Difference(add_group, false),
            "the number of parameters is 3 in the job, 4 here");
  EXPECT_THAT(
      Difference(
          [](LayoutSpec& s) { s.parameters.push_back(Parameter("c", {7}, 1)); },
          true),
      AllOf(HasSubstr("parameter 3 \"c\" is new and in group 1"),
            HasSubstr("only whole groups")));
  EXPECT_EQ(Difference([](LayoutSpec& s) { s.parameters.pop_back(); }, true),
            "the number of parameters is 3 in the job, 2 here");
  // Here the job has more parameters than the rank.
  LayoutSpec spec = SmallSpec();
  add_group(spec);
  EXPECT_FALSE(MakeOrDie(spec).CheckSame(MakeOrDie(SmallSpec()), true).ok());
}

}  // namespace
}  // namespace optstate
