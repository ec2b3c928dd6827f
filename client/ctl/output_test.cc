#include "client/ctl/output.h"

#include <yaml-cpp/yaml.h>

#include <string>
#include <vector>

#include "google/protobuf/util/json_util.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

v1::Job ExampleJob() {
  v1::Job job;
  job.set_name("gpt: \"quoted\" # not a comment");
  job.set_committed_step(18446744073709551615u);
  job.set_phase(v1::JOB_PHASE_READY);
  job.mutable_last_outcome()->set_gradient_norm(0.1);
  job.add_arrays()->set_name("master");
  job.add_arrays()->set_name("exp_avg");
  return job;
}

TEST(OutputTest, JsonIsReadBackByProtobufsOwnReader) {
  const v1::Job job = ExampleJob();
  auto json = RenderMessage(job, OutputFormat::kJson);
  ASSERT_TRUE(json.ok()) << json.status();
  v1::Job read;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(*json, &read).ok());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(job, read));
}

// A reader takes a stream of messages apart by lines, or by YAML's documents.
TEST(OutputTest, OneOfMany) {
  const v1::Job job = ExampleJob();
  const auto json = RenderOne(job, OutputFormat::kJson);
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->find('\n'), json->size() - 1) << *json;
  v1::Job read;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(*json, &read).ok());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(job, read));
  const auto yaml = RenderOne(job, OutputFormat::kYaml);
  ASSERT_TRUE(yaml.ok()) << yaml.status();
  const std::vector<YAML::Node> nodes = YAML::LoadAll(*yaml + *yaml);
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[1]["name"].as<std::string>(), job.name());
}

TEST(OutputTest, YamlHasTheSameTree) {
  auto yaml = RenderMessage(ExampleJob(), OutputFormat::kYaml);
  ASSERT_TRUE(yaml.ok()) << yaml.status();
  const YAML::Node node = YAML::Load(*yaml);
  EXPECT_EQ(node["name"].as<std::string>(), ExampleJob().name());
  EXPECT_EQ(node["committed_step"].as<std::string>(), "18446744073709551615");
  EXPECT_EQ(node["arrays"][1]["name"].as<std::string>(), "exp_avg");
  EXPECT_EQ(yaml->find('{'), std::string::npos) << "block style: " << *yaml;
}

// A reader may take an unquoted text for a number, a boolean or a date.
TEST(OutputTest, YamlKeepsTypes) {
  v1::ListJobsReply reply;
  const std::vector<std::string> names = {
      "007", "1e3", "20261122", "no",         "true",          "2026-01-01",
      "~",   "",    "a\nb",     "\"quoted\"", "\xc3\xa4 \t \\"};
  for (const std::string& name : names) reply.add_jobs()->set_name(name);
  reply.mutable_jobs(0)->set_committed_step(56);
  reply.mutable_jobs(0)->set_accumulate(true);
  reply.mutable_jobs(0)->set_uid(1000);
  auto yaml = RenderMessage(reply, OutputFormat::kYaml);
  ASSERT_TRUE(yaml.ok()) << yaml.status();
  const YAML::Node jobs = YAML::Load(*yaml)["jobs"];
  ASSERT_EQ(jobs.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(jobs[i]["name"].Tag(), "!") << names[i] << " is not quoted";
    EXPECT_EQ(jobs[i]["name"].as<std::string>(), names[i]);
  }
  for (const char* line :
       {"- name: \"007\"\n", "    committed_step: \"56\"\n",
        "    accumulate: true\n", "    uid: 1000\n", "    arrays: []\n",
        "    phase: \"JOB_PHASE_UNSPECIFIED\"\n"}) {
    EXPECT_NE(yaml->find(line), std::string::npos) << line << *yaml;
  }
  EXPECT_EQ(yaml->back(), '\n');
}

TEST(OutputTest, UnknownFormatNamesTheKnownOnes) {
  auto format = ParseOutputFormat("xml");
  EXPECT_EQ(format.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(format.status().message().find("json"), std::string::npos);
}

TEST(OutputTest, HumanBytes) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(uint64_t{3} << 30), "3.0 GiB");
}

TEST(OutputTest, HumanCount) {
  EXPECT_EQ(HumanCount(9999), "9999");
  EXPECT_EQ(HumanCount(12345), "12.3K");
  EXPECT_EQ(HumanCount(7'000'000'000), "7.0G");
}

TEST(OutputTest, HumanAge) {
  google::protobuf::Timestamp then;
  EXPECT_EQ(HumanAge(then, 1000), "-");
  then.set_seconds(1000);
  EXPECT_EQ(HumanAge(then, 1059), "59s");
  EXPECT_EQ(HumanAge(then, 1000 + 3 * 3600 + 12 * 60), "3h12m");
  EXPECT_EQ(HumanAge(then, 900), "0s") << "a clock that ran backwards";
}

}  // namespace
}  // namespace optstate::ctl
