// Tests reads of parameters while their step is being applied. The engine is a
// thread that follows the test's script.

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "client/channel/shm/fake_shm_engine.h"
#include "client/channel/shm/shm_channel.h"
#include "client/client.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

constexpr size_t kNumel = 100;

class SessionReadTest : public testing::Test {
 protected:
  std::unique_ptr<Session> Open(std::function<void(FakeShmEngine&)> script,
                                InterruptCheck interrupted = nullptr) {
    daemon_ = std::make_unique<FakeShmDaemon>(std::move(script));
    SessionOptions options;
    options.job = "job";
    options.layout = LayoutOfTest();
    options.interrupted = std::move(interrupted);
    auto session = Session::OpenOver(
        [&](ChannelSetup setup) -> absl::StatusOr<std::unique_ptr<Channel>> {
          return std::make_unique<ShmChannel>(daemon_->endpoint(),
                                              std::move(setup));
        },
        options);
    EXPECT_TRUE(session.ok()) << session.status();
    return *std::move(session);
  }

  static CommitOptions First() {
    CommitOptions options;
    options.step = 1;
    options.groups.resize(1);
    return options;
  }

  ParameterTargets Read() const {
    return {.parameters = parameters_, .destinations = destinations_};
  }

  // Reads the rank's last value, also from the engine's thread.
  float Last() { return std::atomic_ref(values_.back()).load(); }
  bool Arrives(float value) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (Last() != value && absl::Now() < end) std::this_thread::yield();
    return Last() == value;
  }

  static void WriteStep(const FakeShmEngine& engine, uint64_t step,
                        float value) {
    engine.parameters.Write(std::vector<float>(kNumel, value));
    engine.run_stamps.Write(std::vector<uint64_t>{step});
  }
  static void Answer(FakeShmEngine& engine, const Submission& commit,
                     bool applied) {
    Completion answer = {};
    answer.request_id = commit.request_id;
    answer.step = commit.step;
    answer.flags = applied ? shm::kCompletionApplied : 0;
    engine.Answer(answer);
  }

  std::vector<float> values_ = std::vector<float>(kNumel, -1);
  const std::vector<uint32_t> parameters_ = {0};
  const std::vector<void*> destinations_ = {values_.data()};
  std::unique_ptr<FakeShmDaemon> daemon_;
};

TEST_F(SessionReadTest, ComesBeforeTheAnswer) {
  const auto session = Open([&](FakeShmEngine& engine) {
    engine.Admit();
    const Submission commit = engine.Take();
    WriteStep(engine, 1, 2);
    EXPECT_TRUE(Arrives(2));
    Answer(engine, commit, /*applied=*/true);
  });
  const auto outcome = session->Commit(First(), Read());
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(values_, std::vector<float>(kNumel, 2));
}

// The stamps are of another step than the commit's, and the step is skipped.
TEST_F(SessionReadTest, StampsOfOtherStepsDoNotCount) {
  for (uint64_t stamp : {0, 2}) {
    const auto session = Open([&, stamp](FakeShmEngine& engine) {
      engine.Admit();
      const Submission commit = engine.Take();
      WriteStep(engine, stamp, 2);
      Answer(engine, commit, /*applied=*/false);
    });
    const auto outcome = session->Commit(First(), Read());
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_FALSE(outcome->applied);
    EXPECT_EQ(values_, std::vector<float>(kNumel, -1));
    session->Close();
  }
}

TEST_F(SessionReadTest, EngineWithoutRunStamps) {
  const auto session = Open([&](FakeShmEngine& engine) {
    engine.Admit({engine.completions.fd(), engine.parameters.readable.get()});
    const Submission commit = engine.Take();
    WriteStep(engine, 1, 2);
    Answer(engine, commit, /*applied=*/true);
  });
  EXPECT_TRUE(session->Commit(First(), Read()).ok());
  EXPECT_EQ(values_, std::vector<float>(kNumel, 2));
}

// An interrupted trainer has parameters of one step, not of two.
TEST_F(SessionReadTest, IsNotInterruptedOnceSomethingHasCome) {
  std::atomic<int> asked = 0;
  const auto session = Open(
      [&](FakeShmEngine& engine) {
        engine.Admit();
        const Submission commit = engine.Take();
        WriteStep(engine, 1, 2);
        EXPECT_TRUE(Arrives(2));
        while (asked < 2) std::this_thread::yield();
        Answer(engine, commit, /*applied=*/true);
      },
      [&] { return Last() == 2 && ++asked > 0; });
  const auto outcome = session->Commit(First(), Read());
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  asked = 2;  // lets the engine end
}

TEST_F(SessionReadTest, InterruptedBeforeItGoesOnLater) {
  std::atomic<bool> committing = false;
  std::atomic<bool> interrupted = true;
  const auto session = Open(
      [&](FakeShmEngine& engine) {
        engine.Admit();
        const Submission commit = engine.Take();
        while (interrupted) std::this_thread::yield();
        WriteStep(engine, 1, 2);
        Answer(engine, commit, /*applied=*/true);
      },
      [&] { return committing && interrupted; });
  committing = true;
  EXPECT_EQ(session->Commit(First(), Read()).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(values_, std::vector<float>(kNumel, -1));
  interrupted = false;
  const auto outcome = session->CommitWait(Read());
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(values_, std::vector<float>(kNumel, 2));
}

TEST_F(SessionReadTest, BadTargetsAreRefusedBeforeTheCommit) {
  const auto session = Open([](FakeShmEngine& engine) { engine.Admit(); });
  const std::vector<uint32_t> unknown = {1};
  const std::vector<void*> nowhere = {nullptr};
  for (const ParameterTargets& read :
       {ParameterTargets{.parameters = unknown, .destinations = destinations_},
        ParameterTargets{.parameters = parameters_, .destinations = nowhere},
        ParameterTargets{.parameters = parameters_, .destinations = {}}}) {
    EXPECT_EQ(session->Commit(First(), read).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace optstate::client
