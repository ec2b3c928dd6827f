// Tests of what is refused, what may be repeated, and what is left afterwards.

#include <algorithm>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

// Takes one step with gradient 1 everywhere.
void ExpectStep(client::Session& session, uint64_t step) {
  const absl::Status pushed = PushConstant(session, step, 0, 1);
  ASSERT_TRUE(pushed.ok()) << pushed;
  const auto outcome = session.Commit(CommitOf(session, step));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied);
  EXPECT_EQ(session.committed_step(), step);
}

TEST_P(ChannelSuite, CommitMayBeRepeated) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 100)));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  const client::CommitOptions commit = CommitOf(*session, 1);
  const auto first = session->Commit(commit);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto before = Snapshot(*session);
  const auto again = session->Commit(commit);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->step, first->step);
  EXPECT_EQ(again->applied, first->applied);
  EXPECT_EQ(again->gradient_norm, first->gradient_norm);
  EXPECT_EQ(again->clip_coefficient, first->clip_coefficient);

  client::CommitOptions other = commit;
  other.groups[0][adam::kLr] *= 2;
  EXPECT_EQ(session->Commit(other).status().code(),
            StatusCode::kFailedPrecondition);
  const auto after = Snapshot(*session);
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_EQ(FirstDifference(*before, *after), "");
  ExpectStep(*session, 2);
}

TEST_P(ChannelSuite, StepsComeInOrder) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 100)));
  ASSERT_NE(session, nullptr);
  ExpectStep(*session, 1);
  // The error is asynchronous: told by one of the two.
  absl::Status pushed = session->Push(3, 0, 0, 1);
  pushed.Update(session->Flush());
  EXPECT_EQ(pushed.code(), StatusCode::kFailedPrecondition) << pushed;
  EXPECT_EQ(session->Commit(CommitOf(*session, 3)).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(session->Abort(7).code(), StatusCode::kFailedPrecondition);
  ExpectStep(*session, 2);
}

TEST_P(ChannelSuite, NoStepBeforeTheLoad) {
  auto session = Open(NewJob(UniformLayout(2, 100)));
  ASSERT_TRUE(session.ok()) << session.status();
  absl::Status pushed = (*session)->Push(1, 0, 0, 2);
  pushed.Update((*session)->Flush());
  EXPECT_EQ(pushed.code(), StatusCode::kFailedPrecondition) << pushed;
  EXPECT_FALSE((*session)->Commit(CommitOf(**session, 1)).ok());
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  ExpectStep(**session, 1);
}

// The error is told by FinishLoad at the latest, and the load can be taken
// again.
TEST_P(ChannelSuite, LoadOfAnArrayThatIsNotThereIsRefused) {
  auto session = Open(NewJob(UniformLayout(2, 100)));
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->BeginLoad().ok());
  const std::vector<float> values(100, 1);
  absl::Status status = (*session)->Load(
      client::StateArray::kState2, 0, DType::kFloat32,
      {reinterpret_cast<const std::byte*>(values.data()), 400});
  if (status.ok()) status = (*session)->FinishLoad();
  EXPECT_FALSE(status.ok());
  EXPECT_NE((*session)->info().phase, client::JobPhase::kReady);
  ASSERT_TRUE(LoadConstant(**session, 1).ok());
  ExpectStep(**session, 1);
}

// A job gets to a step by as many that update nothing, or at once.
TEST_P(ChannelSuite, AJobBeginsAtAStep) {
  const auto stepped = OpenLoaded(NewJob(UniformLayout(2, 100)));
  ASSERT_NE(stepped, nullptr);
  for (uint64_t step = 1; step <= 3; ++step) {
    client::CommitOptions nothing = CommitOf(*stepped, step);
    nothing.found_inf = true;
    ASSERT_TRUE(stepped->Commit(nothing).ok());
  }
  const client::SessionOptions options = NewJob(UniformLayout(2, 100));
  auto begun = OpenLoaded(options);
  ASSERT_NE(begun, nullptr);
  ASSERT_TRUE(begun->BeginLoad().ok());
  const absl::Status at_3 = begun->FinishLoad(client::BeginAt{3, 9});
  ASSERT_TRUE(at_3.ok()) << at_3;
  EXPECT_EQ(begun->committed_step(), 3);
  EXPECT_EQ(begun->info().phase, client::JobPhase::kReady);
  ExpectStep(*stepped, 4);
  ExpectStep(*begun, 4);
  const auto a = Snapshot(*stepped);
  const auto b = Snapshot(*begun);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(FirstDifference(*a, *b), "");
  begun.reset();
  auto again = Open(options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->committed_step(), 4);
}

TEST_P(ChannelSuite, AJobBeginsAtALateStepWithItsFirstLoad) {
  const client::SessionOptions options = NewJob(UniformLayout(2, 100));
  constexpr uint64_t kStep = (uint64_t{1} << 63) - 2;
  auto session = Open(options);
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->BeginLoad().ok());
  const std::vector<float> values(100, 1);
  for (uint32_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(
        (*session)
            ->Load(client::StateArray::kMaster, i, DType::kFloat32,
                   {reinterpret_cast<const std::byte*>(values.data()), 400})
            .ok());
  }
  ASSERT_TRUE((*session)->FinishLoad(client::BeginAt{kStep, 1}).ok());
  (*session).reset();
  session = Open(options);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->committed_step(), kStep);
  ExpectStep(**session, kStep + 1);
}

TEST_P(ChannelSuite, OnlyANewJobBeginsAtAStepThatIsOne) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 100)));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->BeginLoad().ok());
  for (const client::BeginAt at :
       {client::BeginAt{uint64_t{1} << 63, 1}, client::BeginAt{5, 0}}) {
    EXPECT_EQ(session->FinishLoad(at).code(), StatusCode::kInvalidArgument);
  }
  // The load goes on.
  ASSERT_TRUE(session->FinishLoad().ok());
  ExpectStep(*session, 1);
  ASSERT_TRUE(session->BeginLoad().ok());
  EXPECT_EQ(session->FinishLoad(client::BeginAt{5, 2}).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(session->committed_step(), 1);
  ASSERT_TRUE(session->FinishLoad().ok());
  ExpectStep(*session, 2);
}

TEST_P(ChannelSuite, SecondPushNeedsAccumulate) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 100)));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Push(1, 0, 0, 2).ok());
  // A push of the same micro-step again is a repeat.
  ASSERT_TRUE(session->Push(1, 0, 0, 2).ok());
  ASSERT_TRUE(session->Flush().ok());
  absl::Status pushed = session->Push(1, 1, 0, 1);
  pushed.Update(session->Flush());
  EXPECT_EQ(pushed.code(), StatusCode::kFailedPrecondition) << pushed;
  // A step with a push that was refused is not taken by mistake.
  EXPECT_FALSE(session->Commit(CommitOf(*session, 1)).ok());
  EXPECT_EQ(session->committed_step(), 0);
  ExpectStep(*session, 1);
}

TEST_P(ChannelSuite, AbortDropsWhatWasStaged) {
  const auto aborted = OpenLoaded(NewJob(UniformLayout(3, 5000)));
  const auto plain = OpenLoaded(NewJob(UniformLayout(3, 5000)));
  ASSERT_NE(aborted, nullptr);
  ASSERT_NE(plain, nullptr);
  ASSERT_TRUE(PushConstant(*aborted, 1, 0, 50).ok());
  ASSERT_TRUE(aborted->Abort(1).ok());
  ExpectStep(*aborted, 1);
  ExpectStep(*plain, 1);
  const auto a = Snapshot(*aborted);
  const auto b = Snapshot(*plain);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(FirstDifference(*a, *b), "");
}

TEST_P(ChannelSuite, DetachDropsWhatWasStaged) {
  const client::SessionOptions options = NewJob(UniformLayout(2, 100));
  auto session = OpenLoaded(options);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  ASSERT_TRUE(session->Flush().ok());
  session.reset();
  auto again = Open(options);
  ASSERT_TRUE(again.ok()) << again.status();
  const auto outcome = (*again)->Commit(CommitOf(**again, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->gradient_norm, 0);
}

TEST_P(ChannelSuite, ReattachFindsTheCommittedStep) {
  const client::SessionOptions options = NewJob(MixedLayout());
  auto session = OpenLoaded(options);
  ASSERT_NE(session, nullptr);
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(*session, step);
  const auto before = Snapshot(*session);
  session->Close();
  EXPECT_EQ(session->Flush().code(), StatusCode::kFailedPrecondition);

  auto again = Open(options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE((*again)->info().created);
  EXPECT_EQ((*again)->info().phase, client::JobPhase::kReady);
  EXPECT_EQ((*again)->committed_step(), 3);
  const auto after = Snapshot(**again);
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_EQ(FirstDifference(*before, *after), "");
  ExpectStep(**again, 4);
}

TEST_P(ChannelSuite, EphemeralJobEndsWithItsLastSession) {
  client::SessionOptions options = NewJob(UniformLayout(1, 10));
  options.ephemeral = true;
  auto session = OpenLoaded(options);
  ASSERT_NE(session, nullptr);
  ExpectStep(*session, 1);
  session.reset();
  auto again = Open(options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE((*again)->info().created);
  EXPECT_EQ((*again)->committed_step(), 0);
}

TEST_P(ChannelSuite, AnotherLayoutIsRefusedByName) {
  client::SessionOptions options = NewJob(UniformLayout(3, 10));
  const auto session = OpenLoaded(options);
  ASSERT_NE(session, nullptr);
  options.layout.parameters[1].shape = {2, 5};
  auto other = Open(options);
  EXPECT_EQ(other.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(other.status().message(), HasSubstr("\"p1\""));
  EXPECT_THAT(other.status().message(), HasSubstr(options.job));

  options.layout = UniformLayout(3, 10);
  options.layout.parameters[2].dtype = DType::kBFloat16;
  other = Open(options);
  EXPECT_EQ(other.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(other.status().message(), HasSubstr("bfloat16"));
  ExpectStep(*session, 1);
}

TEST_P(ChannelSuite, BadLayoutsAreRefused) {
  client::SessionOptions options = NewJob(UniformLayout(2, 10));
  options.layout.parameters[1].numel = 11;
  auto session = Open(options);
  EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(session.status().message(), HasSubstr("p1"));

  options.layout = UniformLayout(2, 10);
  options.layout.parameters[1].name = "p0";
  session = Open(options);
  EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument);

  options.layout = UniformLayout(2, 10);
  options.rank = 1;
  session = Open(options);
  EXPECT_EQ(session.status().code(), StatusCode::kInvalidArgument);
}

TEST_P(ChannelSuite, SecondOwnerOfARankIsRefused) {
  const client::SessionOptions options = NewJob(UniformLayout(2, 10));
  const auto session = OpenLoaded(options);
  ASSERT_NE(session, nullptr);
  const auto second = Open(options);
  EXPECT_EQ(second.status().code(), StatusCode::kAlreadyExists)
      << second.status();
  ExpectStep(*session, 1);
}

TEST_P(ChannelSuite, BadHyperparametersAreRefused) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 10)));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  client::CommitOptions commit = CommitOf(*session, 1);
  commit.groups[0][adam::kLr] = std::numeric_limits<double>::quiet_NaN();
  absl::Status status = session->Commit(commit).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("learning rate"));
  commit = CommitOf(*session, 1);
  commit.max_norm = -1;
  EXPECT_EQ(session->Commit(commit).status().code(),
            StatusCode::kInvalidArgument);
  commit = CommitOf(*session, 1);
  commit.groups.clear();
  EXPECT_EQ(session->Commit(commit).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(session->committed_step(), 0);
  ExpectStep(*session, 1);
}

TEST_P(ChannelSuite, BadRequestsAreRefused) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 10)));
  ASSERT_NE(session, nullptr);
  std::byte bytes[40];
  EXPECT_EQ(session->Push(1, 0, 1, 2).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(session->Push(1, 0, 4'000'000'000u, 4'000'000'000u).code(),
            StatusCode::kInvalidArgument);
  EXPECT_FALSE(session
                   ->Load(client::StateArray::kMaster, 0, DType::kFloat32,
                          {bytes, sizeof(bytes)})
                   .ok());
  // No group of this job has this array.
  EXPECT_FALSE(session->Fetch(client::StateArray::kState2, 0, bytes).ok());
  EXPECT_EQ(session
                ->Fetch(client::StateArray::kMaster, 0,
                        absl::MakeSpan(bytes).subspan(0, 36))
                .status()
                .code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(
      session->Fetch(client::StateArray::kMaster, 2, bytes).status().code(),
      StatusCode::kInvalidArgument);
  ExpectStep(*session, 1);
}

TEST_P(ChannelSuite, CommitInTwoHalves) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 10)));
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->CommitWait().status().code(),
            StatusCode::kFailedPrecondition);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  ASSERT_TRUE(session->CommitStart(CommitOf(*session, 1)).ok());
  EXPECT_EQ(session->Push(1, 0, 0, 1).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(session->CommitStart(CommitOf(*session, 1)).code(),
            StatusCode::kFailedPrecondition);
  const auto outcome = session->CommitWait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 1);
  ExpectStep(*session, 2);
}

// Many fetches at once give what one after the other gives; an error among them
// leaves the session as it was.
TEST_P(ChannelSuite, ManyFetchesAtOnce) {
  constexpr uint32_t kCount = 700;
  const auto session = OpenLoaded(NewJob(UniformLayout(kCount, 33)), 1);
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 1).ok());
  ASSERT_TRUE(session->Commit(CommitOf(*session, 1)).ok());
  std::vector<std::byte> all(size_t{kCount} * 33 * sizeof(float));
  std::vector<client::FetchTarget> targets;
  for (uint32_t i = 0; i < kCount; ++i) {
    const client::StateArray array =
        i % 2 == 0 ? client::StateArray::kMaster : client::StateArray::kState0;
    targets.push_back(
        {.array = array,
         .parameter = i,
         .out = absl::MakeSpan(all).subspan(size_t{i} * 33 * sizeof(float),
                                            33 * sizeof(float))});
  }
  targets[300].array = client::StateArray::kState2;  // has none
  EXPECT_FALSE(session->FetchMany(targets).ok());
  targets[300].array = client::StateArray::kMaster;
  const auto step = session->FetchMany(targets);
  ASSERT_TRUE(step.ok()) << step.status();
  EXPECT_EQ(*step, 1);
  for (const client::FetchTarget& target : targets) {
    std::vector<std::byte> one(target.out.size());
    ASSERT_TRUE(
        session->Fetch(target.array, target.parameter, absl::MakeSpan(one))
            .ok());
    EXPECT_TRUE(std::equal(one.begin(), one.end(), target.out.begin(),
                           target.out.end()))
        << target.parameter;
  }
}

}  // namespace
}  // namespace optstate
