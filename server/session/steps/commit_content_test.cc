#include "server/session/steps/commit_content.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr auto kAdamW = OptimizerKind::kAdamW;

// A commit of three groups, of which the third is clipped with the first.
struct Commit {
  Commit() {
    spec.groups = groups;
    spec.clips_with = clips_with;
    spec.step = 7;
    spec.grad_scale = 8;
    spec.max_norm = 2;
  }
  std::vector<Hyperparams> groups =
      std::vector<Hyperparams>(3, DefaultHyperparams(kAdamW));
  std::vector<uint32_t> clips_with = {0, 0, 1};
  CommitSpec spec;
};

absl::Status Check(const Commit& commit) {
  return CheckContent(commit.spec, kAdamW, 3);
}

// A thing that a rank can ask for in another way.
std::vector<std::pair<std::string, std::function<void(Commit*)>>> Changes() {
  return {{"eps of group 1", [](Commit* c) { c->groups[1][adam::kEps] = 0.5; }},
          {"max_norm of group 1", [](Commit* c) { c->groups[1].max_norm = 3; }},
          {"the group that group 2 is clipped with",
           [](Commit* c) { c->clips_with[2] = 2; }},
          {"grad_scale", [](Commit* c) { c->spec.grad_scale = 16; }},
          {"max_norm", [](Commit* c) { c->spec.max_norm = 0; }},
          {"max_value", [](Commit* c) { c->spec.max_value = 0.25; }},
          {"norm_type", [](Commit* c) { c->spec.norm_type = kInf; }}};
}

TEST(CommitContentTest, GroupsAreClippedAloneOrWithAnother) {
  Commit commit;
  EXPECT_EQ(FirstOfClipped(commit.spec, 0), 0u);
  EXPECT_EQ(FirstOfClipped(commit.spec, 1), 1u);
  EXPECT_EQ(FirstOfClipped(commit.spec, 2), 0u);
  commit.spec.clips_with = {};
  EXPECT_EQ(FirstOfClipped(commit.spec, 2), 2u);
}

TEST(CommitContentTest, TheDefaultsAreValid) {
  EXPECT_TRUE(Check(Commit()).ok());
  for (const double norm_type : {1.0, 2.0, kInf}) {
    Commit commit;
    commit.spec.norm_type = norm_type;
    EXPECT_TRUE(Check(commit).ok());
  }
  Commit commit;
  commit.spec.clips_with = {};
  commit.spec.max_norm = commit.spec.max_value = 0;
  EXPECT_TRUE(Check(commit).ok());
}

TEST(CommitContentTest, OneEntryPerGroup) {
  const absl::Status refused = CheckContent(Commit().spec, kAdamW, 2);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(refused.message(), "hyperparameters of 3 groups, the job has 2");
  Commit commit;
  commit.spec.clips_with = absl::MakeConstSpan(commit.clips_with).first(2);
  EXPECT_EQ(Check(commit), absl::InvalidArgumentError(
                               "clips_with of 2 groups, the commit has 3"));
}

TEST(CommitContentTest, HyperparametersAreTorchs) {
  Commit commit;
  commit.groups[1][adam::kBeta1] = 1;
  const absl::Status refused = Check(commit);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("group 1"));
  EXPECT_THAT(refused.message(), HasSubstr("Invalid beta"));
}

TEST(CommitContentTest, NumbersOutOfRangeAreRefused) {
  const struct {
    double CommitSpec::*field;
    const char* name;
    std::vector<double> wrong;
  } kFields[] = {
      {&CommitSpec::grad_scale, "Invalid grad_scale", {0, -1, kInf, kNan}},
      {&CommitSpec::max_norm, "Invalid max_norm", {-1, kInf, kNan}},
      {&CommitSpec::max_value, "Invalid max_value", {-1, kInf, kNan}},
      {&CommitSpec::norm_type, "Invalid norm_type", {0, 3, -kInf, kNan}}};
  for (const auto& field : kFields) {
    for (const double wrong : field.wrong) {
      Commit commit;
      commit.spec.*field.field = wrong;
      const absl::Status refused = Check(commit);
      EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
      EXPECT_THAT(refused.message(), HasSubstr(field.name));
      EXPECT_THAT(refused.message(), HasSubstr("must be"));
    }
  }
}

TEST(CommitContentTest, AStepThatAwaitsANormHasNoneOfItsOwn) {
  Commit commit;
  commit.spec.max_norm = 0;
  for (Hyperparams& group : commit.groups) group.max_norm = 0;
  commit.spec.awaits_norm = true;
  EXPECT_TRUE(absl::IsInvalidArgument(Check(commit))) << "in one phase";
  commit.spec.two_phase = true;
  EXPECT_TRUE(Check(commit).ok()) << Check(commit);
  commit.groups[1].max_norm = 2;
  EXPECT_TRUE(absl::IsInvalidArgument(Check(commit)));
  commit.groups[1].max_norm = 0;
  commit.spec.max_norm = 2;
  const absl::Status refused = Check(commit);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(refused.message(), HasSubstr("awaits_norm"));
}

TEST(CommitContentTest, AGroupIsClippedWithAnEarlierOneAlone) {
  const std::vector<uint32_t> wrongs[] = {
      {0, 0, 4},   // no group
      {2, 0, 0},   // a later one
      {0, 1, 2}};  // one that is clipped with another
  for (const std::vector<uint32_t>& wrong : wrongs) {
    Commit commit;
    commit.spec.clips_with = wrong;
    const absl::Status refused = Check(commit);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr("Invalid clips_with of group "));
  }
  Commit itself;  // named, and alone
  itself.clips_with = {1, 2, 3};
  EXPECT_TRUE(Check(itself).ok());
  Commit norms;
  norms.groups[2].max_norm = 5;
  EXPECT_THAT(Check(norms).message(),
              HasSubstr("Invalid clips_with of group 2: 1: must be 0, or 1 + "
                        "the number of an earlier group"));
}

// The format: computed as FNV-1a is published, over bytes that are put down
// one after the other.
class Bytes {
 public:
  Bytes& Add(uint64_t bits) {
    for (int i = 0; i < 8; ++i, bits >>= 8) {
      bytes_.push_back(static_cast<char>(bits & 0xff));
    }
    return *this;
  }
  Bytes& Add(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return Add(bits);
  }
  Bytes& Add(const std::string& text) {
    bytes_ += text;
    return *this;
  }
  uint64_t Fnv1a() const {
    uint64_t hash = 14695981039346656037u;
    for (const char byte : bytes_) {
      hash ^= static_cast<unsigned char>(byte);
      hash *= 1099511628211u;
    }
    return hash;
  }

 private:
  std::string bytes_;
};

TEST(CommitContentTest, TheDigestIsAPartOfTheFormat) {
  const Commit commit;
  Bytes bytes;
  for (const Hyperparams& group : commit.groups) {
    for (size_t i = 0; i < 12; ++i) bytes.Add(group[i]);
    bytes.Add(group.max_norm);
  }
  bytes.Add(8.0).Add(2.0).Add(0.0).Add(2.0).Add(2.0).Add(0.0);
  EXPECT_EQ(DigestOf(commit.spec), bytes.Fnv1a());
}

TEST(CommitContentTest, TheDigestHasAllButFoundInfAndTheStep) {
  Commit same;
  same.spec.step = 8;
  same.spec.found_inf = true;
  same.spec.two_phase = true;
  EXPECT_EQ(DigestOf(same.spec), DigestOf(Commit().spec));
  std::set<uint64_t> digests = {DigestOf(Commit().spec)};
  for (const auto& [name, change] : Changes()) {
    Commit commit;
    change(&commit);
    EXPECT_TRUE(digests.insert(DigestOf(commit.spec)).second) << name;
  }
}

TEST(CommitContentTest, APreparedStepIsNamedByAllThatItIs) {
  const Commit commit;
  const std::vector<double> norms = {0.5, -1, kNan};
  const uint64_t digest = PreparedDigest(commit.spec, "layout", 3, norms);
  EXPECT_EQ(digest, Bytes()
                        .Add(uint64_t{7})
                        .Add(DigestOf(commit.spec))
                        .Add(std::string("layout"))
                        .Add(uint64_t{3})
                        .Add(0.5)
                        .Add(-1.0)
                        .Add(kNan)
                        .Fnv1a());
  EXPECT_EQ(PreparedDigest(commit.spec, "layout", 3, {0.5, -1, -kNan}), digest)
      << "any NaN is one";
  Commit next;
  next.spec.step = 8;
  const std::set<uint64_t> others = {
      digest,
      PreparedDigest(next.spec, "layout", 3, norms),
      PreparedDigest(commit.spec, "other", 3, norms),
      PreparedDigest(commit.spec, "layout", 4, norms),
      PreparedDigest(commit.spec, "layout", 3, {0.5, 0, kNan}),
      PreparedDigest(commit.spec, "layout", 3, {0.5, -1})};
  EXPECT_EQ(others.size(), 6u);
}

TEST(CommitContentTest, CommitsThatAskForTheSame) {
  Commit same;
  same.spec.step = 8;
  same.spec.found_inf = true;
  EXPECT_TRUE(AsksForTheSame(Commit().spec, same.spec));
  Commit named;  // each group is named, as alone
  named.clips_with = {1, 2, 1};
  EXPECT_TRUE(AsksForTheSame(Commit().spec, named.spec));
  EXPECT_TRUE(CheckEqual(kAdamW, 0, Commit().spec, 1, named.spec).ok());
  Commit negative_zero;
  negative_zero.spec.max_value = -0.0;
  EXPECT_FALSE(AsksForTheSame(Commit().spec, negative_zero.spec));
  for (const auto& [name, change] : Changes()) {
    Commit commit;
    change(&commit);
    EXPECT_FALSE(AsksForTheSame(Commit().spec, commit.spec)) << name;
  }
}

TEST(CommitContentTest, TheFirstDifferenceIsNamedWithTheRanks) {
  Commit same;
  same.spec.found_inf = true;
  EXPECT_TRUE(CheckEqual(kAdamW, 0, Commit().spec, 1, same.spec).ok());
  for (const auto& [name, change] : Changes()) {
    Commit commit;
    change(&commit);
    const absl::Status unequal =
        CheckEqual(kAdamW, 0, Commit().spec, 5, commit.spec);
    EXPECT_TRUE(absl::IsFailedPrecondition(unequal)) << unequal;
    EXPECT_THAT(unequal.message(),
                HasSubstr("the ranks' commits differ: " + name + " is "));
    EXPECT_THAT(unequal.message(), HasSubstr("push and commit the step again"));
  }
  Commit two_phase;
  two_phase.spec.two_phase = true;
  two_phase.spec.norm_type = 1;
  EXPECT_EQ(CheckEqual(kAdamW, 0, Commit().spec, 5, two_phase.spec).message(),
            "the ranks' commits differ: norm_type is 2 at rank 0 and 1 at rank "
            "5; what was staged is dropped, push and commit the step again");
  two_phase.spec.norm_type = 2;
  EXPECT_THAT(CheckEqual(kAdamW, 0, Commit().spec, 5, two_phase.spec).message(),
              HasSubstr("two_phase is 0 at rank 0 and 1 at rank 5"));
}

// Both are printed so that they look different.
TEST(CommitContentTest, NeighbouringDoublesAreToldApart) {
  Commit commit;
  commit.groups[0][adam::kLr] =
      std::nextafter(commit.groups[0][adam::kLr], 1.0);
  EXPECT_THAT(CheckEqual(kAdamW, 0, Commit().spec, 1, commit.spec).message(),
              HasSubstr("lr of group 0 is 0.001 at rank 0 and "
                        "0.0010000000000000002 at rank 1"));
}

}  // namespace
}  // namespace optstate::session
