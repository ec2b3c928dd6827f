// Tests what optctl shows of several daemons at once.

#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::ctl {
namespace {

constexpr char kNobody[] = "unix:/nonexistent.sock";

class OptctlNodesTest : public OptctlTest {
 protected:
  void SetUp() override {
    OptctlTest::SetUp();
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    other_ = *std::move(daemon);
  }

  // Does Train() at the other daemon.
  std::unique_ptr<client::Session> TrainThere(const std::string& job) {
    daemon_.swap(other_);
    auto session = Train(job);
    daemon_.swap(other_);
    return session;
  }

  std::string Both() const {
    return absl::StrCat("--endpoint ", daemon_->shm_endpoint(), " --endpoint ",
                        other_->shm_endpoint());
  }

  std::unique_ptr<TestDaemon> other_;
};

TEST_F(OptctlNodesTest, EachNodeHasALineOfEachOfItsJobs) {
  EXPECT_EQ(RunBinary(Both() + " get jobs -A").output, "none found\n");
  const auto here = Train("gpt");
  const auto there = TrainThere("gpt");
  const auto alone = TrainThere("bert");
  const Ran ran = RunBinary(Both() + " get jobs -A");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "DURABLE")) << ran.output;
  EXPECT_FALSE(absl::StrContains(ran.output, "differ")) << ran.output;
  // Both are on this host, so that their endpoints tell them apart.
  const size_t bert = ran.output.find("\nbert ");
  const size_t first = ran.output.find("\ngpt ");
  const size_t second = ran.output.find("\ngpt ", first + 1);
  ASSERT_NE(second, std::string::npos) << ran.output;
  EXPECT_LT(bert, first) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output.substr(first, second - first),
                                daemon_->shm_endpoint()))
      << ran.output;
  EXPECT_TRUE(
      absl::StrContains(ran.output.substr(second), other_->shm_endpoint()))
      << ran.output;
}

TEST_F(OptctlNodesTest, AJobWhoseNodesDifferIsMarked) {
  const auto here = Train("gpt");
  const auto there = TrainThere("gpt");
  ASSERT_TRUE(Step(*there, 2).ok());
  ASSERT_TRUE(Step(*there, 3).ok());
  const Ran ran = RunBinary(Both() + " get jobs -A");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "nodes differ: steps 1 and 3"))
      << ran.output;
  const Ran json = RunBinary(Both() + " get jobs -A -o json");
  google::protobuf::Struct said;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(json.output, &said).ok())
      << json.output;
  const auto& differences = said.fields().at("differences").struct_value();
  EXPECT_EQ(differences.fields().at("gpt").string_value(), "steps 1 and 3");
  const auto& nodes = said.fields().at("nodes").list_value();
  ASSERT_EQ(nodes.values_size(), 2) << json.output;
  const auto& node = nodes.values(1).struct_value();
  EXPECT_EQ(node.fields().at("endpoint").string_value(),
            other_->shm_endpoint());
  const auto& job =
      node.fields().at("jobs").list_value().values(0).struct_value();
  EXPECT_EQ(job.fields().at("committed_step").string_value(), "3");
}

TEST_F(OptctlNodesTest, ANodeThatDoesNotAnswerIsALineAndAnExitCode) {
  const auto here = Train("gpt");
  const std::string file = daemon_->directory() + "/endpoints";
  std::ofstream(file) << "# one is not there\n"
                      << kNobody << "\n"
                      << other_->shm_endpoint() << "\n";
  const std::string arguments =
      absl::StrCat(AtDaemon("get jobs -A --endpoints-file "), file);
  Ran ran = RunBinary(arguments);
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  for (const std::string& text :
       {std::string("\ngpt "), std::string("no daemon answers there"),
        absl::StrCat("optctl: 1 of 3 nodes gave no answer: ", kNobody)}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  ran = RunBinary(arguments + " -o json", "2>/dev/null");
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  google::protobuf::Struct said;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(ran.output, &said).ok())
      << ran.output;
  const auto& nodes = said.fields().at("nodes").list_value();
  ASSERT_EQ(nodes.values_size(), 3) << ran.output;
  const auto& absent = nodes.values(1).struct_value();
  EXPECT_EQ(absent.fields().at("exit_code").number_value(), kExitUnreachable);
  EXPECT_EQ(absent.fields().at("endpoint").string_value(), kNobody);
}

TEST_F(OptctlNodesTest, SeveralDaemonsAreForOneVerb) {
  for (const char* arguments :
       {"get jobs", "status", "get sessions", "drain"}) {
    const Ran ran = RunBinary(absl::StrCat(Both(), " ", arguments));
    EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, "get jobs -A")) << ran.output;
  }
  const std::string file = daemon_->directory() + "/endpoints";
  std::ofstream(file) << "nonsense\n";
  Ran ran = RunBinary("get jobs -A --endpoints-file " + file);
  EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, file + ":1: ")) << ran.output;
  ran = RunBinary("get jobs -A --endpoints-file /dev/null");
  EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "names no endpoint")) << ran.output;
  // One is enough.
  ran = RunBinary(AtDaemon("get jobs -A"));
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
}

}  // namespace
}  // namespace optstate::ctl
