#include "client/collective/sharded/shared_out_fixture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/fake/fake_arithmetic.h"
#include "proto/types/dtype.h"
#include "proto/types/shard.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

std::vector<std::byte> ArrayOf(Session& session, StateArray array,
                               uint32_t parameter) {
  const ParameterSpec& spec = session.layout().parameters()[parameter];
  std::vector<std::byte> bytes(ElementCount(session.layout(), array, spec) *
                               sizeof(float));
  const auto step = session.Fetch(array, parameter, absl::MakeSpan(bytes));
  EXPECT_TRUE(step.ok()) << step.status();
  return bytes;
}

}  // namespace

std::vector<absl::Span<std::byte>> SharedRank::spans() {
  std::vector<absl::Span<std::byte>> all;
  all.reserve(parameters.size());
  for (std::vector<std::byte>& each : parameters) {
    all.push_back(absl::MakeSpan(each));
  }
  return all;
}

void ExpectAllOk(const std::vector<absl::Status>& results) {
  for (const absl::Status& each : results) EXPECT_TRUE(each.ok()) << each;
}

SharedOutTest::SharedOutTest(bool is_ephemeral)
    : layout_(MixedLayout()),
      script_(*Layout::Make(layout_), ScriptSeed()),
      job_(NewJob(layout_)) {
  job_.ephemeral = is_ephemeral;
}

void SharedOutTest::SetUpTestSuite() {
  auto daemon = TestDaemon::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = daemon->release();
}

void SharedOutTest::TearDownTestSuite() {
  delete daemon_;
  daemon_ = nullptr;
}

void SharedOutTest::SetUp() {
  ASSERT_NE(daemon_, nullptr);
  job_.endpoint = daemon_->shm_endpoint();
  auto one = Session::Open(job_);
  ASSERT_TRUE(one.ok()) << one.status();
  one_ = *std::move(one);
  const absl::Status loaded = script_.Load(*one_);
  ASSERT_TRUE(loaded.ok()) << loaded;
  for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
    masters_.push_back(ArrayOf(*one_, StateArray::kMaster, p));
  }
}

SessionOptions SharedOutTest::OptionsOf(size_t node) const {
  SessionOptions options = job_;
  options.job = absl::StrCat(job_.job, "-on-", node);
  return options;
}

Places SharedOutTest::PlacesOf(const Collective& collective,
                               uint32_t ranks_of_node) {
  std::vector<std::string> names;
  for (uint32_t rank = 0; rank < collective.world_size(); ++rank) {
    names.push_back(absl::StrCat("node", rank / ranks_of_node));
  }
  return *Places::Make(std::move(names), collective.rank());
}

absl::StatusOr<SharedRank> SharedOutTest::Attach(Collective& collective,
                                                 const SharedOutOptions& how,
                                                 uint32_t ranks_of_node) {
  const Places places = PlacesOf(collective, ranks_of_node);
  SharedRank rank;
  rank.rank = collective.rank();
  OPTSTATE_ASSIGN_OR_RETURN(rank.shared,
                            SharedOut::Make(&collective, places, layout_, how));
  SessionOptions options = OptionsOf(places.node());
  rank.shared->Place(&options);
  OPTSTATE_RETURN_IF_ERROR(rank.shared->Settle(options));
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Open(options);
  OPTSTATE_RETURN_IF_ERROR(rank.shared->Agree(session.status()));
  rank.session = *std::move(session);
  OPTSTATE_RETURN_IF_ERROR(rank.shared->CheckAttached(*rank.session));
  const bool is_new = rank.session->info().phase == JobPhase::kLoading;
  if (is_new) OPTSTATE_RETURN_IF_ERROR(rank.session->BeginLoad());
  for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
    const ParameterSpec& spec = layout_.parameters[p];
    rank.parameters.emplace_back(static_cast<size_t>(spec.numel) *
                                 SizeInBytes(spec.dtype));
    if (!is_new) continue;
    OPTSTATE_RETURN_IF_ERROR(rank.shared->Load(
        *rank.session, StateArray::kMaster, p, DType::kFloat32, masters_[p]));
  }
  if (is_new) OPTSTATE_RETURN_IF_ERROR(rank.session->FinishLoad());
  OPTSTATE_RETURN_IF_ERROR(rank.shared->Spread(*rank.session, rank.spans()));
  return rank;
}

StepScript::Step SharedOutTest::MakeRoughStep(uint64_t step,
                                              uint64_t draw) const {
  constexpr std::array<double, 3> kNormTypes = {
      2, 1, std::numeric_limits<double>::infinity()};
  StepScript::Step made = script_.Make(step);
  made.commit.norm_type = kNormTypes[draw % kNormTypes.size()];
  made.commit.max_norm = 0.25 / made.commit.grad_scale;
  std::mt19937_64 generator(draw);
  std::uniform_real_distribution<float> value(-1, 1);
  std::uniform_int_distribution<int> exponent(-10, 2);
  for (size_t i = 0; i < made.parameters.size(); ++i) {
    const ParameterSpec& spec = layout_.parameters[made.parameters[i]];
    for (uint64_t k = 0; k < static_cast<uint64_t>(spec.numel); ++k) {
      StoreElement(spec.gradient_dtype, made.gradients[i].data(), k,
                   std::ldexp(value(generator), exponent(generator)));
    }
  }
  return made;
}

absl::StatusOr<Outcome> SharedOutTest::Take(SharedRank& rank,
                                            const StepScript::Step& made,
                                            bool found_inf) {
  const size_t count = rank.parameters.size();
  std::vector<bool> has(count, false);
  std::vector<absl::Span<const std::byte>> gradients(count);
  for (size_t i = 0; i < made.parameters.size(); ++i) {
    has[made.parameters[i]] = true;
    gradients[made.parameters[i]] = made.gradients[i];
  }
  CommitOptions commit = made.commit;
  commit.found_inf = found_inf;
  return rank.shared->Step(*rank.session, commit, gradients, rank.spans(),
                           &has);
}

Outcome SharedOutTest::TakeOnOne(const StepScript::Step& made, bool found_inf) {
  const absl::Status pushed = StepScript::Push(*one_, made);
  EXPECT_TRUE(pushed.ok()) << pushed;
  CommitOptions commit = made.commit;
  commit.found_inf = found_inf;
  const absl::StatusOr<Outcome> outcome = one_->Commit(commit);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return outcome.value_or(Outcome());
}

void SharedOutTest::ExpectOutcomeOfOne(const Outcome& outcome,
                                       const Outcome& of_one) {
  EXPECT_EQ(outcome.step, of_one.step);
  EXPECT_EQ(outcome.applied, of_one.applied);
  EXPECT_EQ(outcome.found_inf, of_one.found_inf);
  EXPECT_EQ(outcome.loss_scale, of_one.loss_scale);
  EXPECT_FALSE(outcome.prepared);
  if (!outcome.applied) return;
  EXPECT_EQ(outcome.gradient_norm, of_one.gradient_norm);
  EXPECT_EQ(outcome.clip_coefficient, of_one.clip_coefficient);
}

void SharedOutTest::ExpectParametersOfOne(const SharedRank& rank) {
  for (uint32_t p = 0; p < layout_.parameters.size(); ++p) {
    const absl::Span<const std::byte> expected = one_->parameter(p);
    EXPECT_TRUE(std::equal(rank.parameters[p].begin(), rank.parameters[p].end(),
                           expected.begin(), expected.end()))
        << layout_.parameters[p].name << " on rank " << rank.rank;
  }
}

void SharedOutTest::ExpectStateOfOne(Session& node) {
  for (uint32_t i = 0; i < node.layout().parameters().size(); ++i) {
    const ParameterSpec& shard = node.layout().parameters()[i];
    if (shard.numel == 0) continue;
    const auto found =
        std::find_if(layout_.parameters.begin(), layout_.parameters.end(),
                     [&shard](const ParameterSpec& each) {
                       return each.name == GlobalName(shard.name);
                     });
    ASSERT_NE(found, layout_.parameters.end()) << shard.name;
    const auto p = static_cast<uint32_t>(found - layout_.parameters.begin());
    const int64_t begin =
        shard.numel == found->numel ? 0 : shard.shard->offset[0];
    for (const StateArray array :
         {StateArray::kMaster, StateArray::kState0, StateArray::kState1}) {
      const std::vector<std::byte> whole = ArrayOf(*one_, array, p);
      const std::vector<std::byte> part = ArrayOf(node, array, i);
      EXPECT_TRUE(std::equal(
          part.begin(), part.end(),
          whole.begin() + begin * static_cast<int64_t>(sizeof(float))))
          << shard.name << ", array " << static_cast<int>(array);
    }
  }
}

}  // namespace optstate::client
