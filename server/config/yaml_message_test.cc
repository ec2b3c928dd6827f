#include "server/config/yaml_message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optstate/v1/config.pb.h"

namespace optstate::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string ErrorOf(absl::string_view text) {
  v1::DaemonConfig config;
  const absl::Status status = MergeYaml(text, "f.yaml", &config);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status << "\n" << text;
  return std::string(status.message());
}

TEST(YamlMessageTest, SetsNamedFieldsAndKeepsTheOthers) {
  v1::DaemonConfig config;
  config.set_socket("/kept");
  config.add_listen("replaced:1");
  ASSERT_TRUE(MergeYaml(R"(
state_dir: /state
listen: ["a:1", "unix:/b"]
huge_pages: mount
engine: {workers: 3}
limits:
  memory_reserve_bytes: 2 GiB
)",
                        "f.yaml", &config)
                  .ok());
  EXPECT_EQ(config.state_dir(), "/state");
  EXPECT_EQ(config.socket(), "/kept");
  EXPECT_THAT(config.listen(), ElementsAre("a:1", "unix:/b"));
  EXPECT_EQ(config.huge_pages(), v1::HUGE_PAGES_MOUNT);
  EXPECT_EQ(config.engine().workers(), 3u);
  EXPECT_EQ(config.limits().memory_reserve_bytes(), uint64_t{2} << 30);
}

TEST(YamlMessageTest, EmptyDocumentAndEmptySectionChangeNothing) {
  for (const char* text : {"", "# only a comment\n", "engine:\n", "---\n"}) {
    v1::DaemonConfig config;
    EXPECT_TRUE(MergeYaml(text, "f.yaml", &config).ok()) << text;
    EXPECT_EQ(config.state_dir(), "");
  }
}

TEST(YamlMessageTest, NothingAfterTheDocumentIsIgnored) {
  EXPECT_THAT(ErrorOf("log_level: info\n---\nlog_level: bogus\n"),
              StartsWith("f.yaml:3: a second YAML document"));
  EXPECT_THAT(ErrorOf("log_level: info\n...\ngarbage: 1\n"),
              StartsWith("f.yaml:3: a second YAML document"));
  EXPECT_THAT(ErrorOf("\xff\xfe"), HasSubstr("UTF-8"));
  v1::DaemonConfig config;
  EXPECT_TRUE(
      MergeYaml("---\r\nlog_level: info\t# c\n...\n", "f.yaml", &config).ok());
}

TEST(YamlMessageTest, ModesAreOctal) {
  for (const char* text :
       {"socket_mode: 0660", "socket_mode: 660", "socket_mode: \"0660\""}) {
    v1::DaemonConfig config;
    ASSERT_TRUE(MergeYaml(text, "f.yaml", &config).ok()) << text;
    EXPECT_EQ(config.socket_mode(), 0660u) << text;
  }
  EXPECT_THAT(ErrorOf("socket_mode: 0689"), HasSubstr("octal"));
}

TEST(YamlMessageTest, UnknownKeyNamesLineAndTheKnownOnes) {
  EXPECT_EQ(ErrorOf("log_level: info\nengine:\n  workerz: 3\n"),
            "f.yaml:3: unknown key \"engine.workerz\" (known: workers, "
            "subgroup_elements, doorbell_spin_us, restarts_max, "
            "restart_window_s, on_rank_loss, pinning, weight, "
            "job_weights)");
}

TEST(YamlMessageTest, AKeyOfAnotherPlaceNamesThat) {
  EXPECT_THAT(ErrorOf("limits:\njobs_max: 3\n"),
              StartsWith("f.yaml:2: unknown key \"jobs_max\": did you mean "
                         "limits.jobs_max or quotas.jobs_max? (known: "));
  EXPECT_THAT(ErrorOf("engine:\n  limits:\n    jobs_max: 3\n"),
              StartsWith("f.yaml:2: unknown key \"engine.limits\": did you "
                         "mean limits? (known: "));
  EXPECT_THAT(ErrorOf("engine: {jobs_max: 3}\n"),
              HasSubstr("did you mean limits.jobs_max or quotas.jobs_max?"));
  EXPECT_THAT(ErrorOf("limits: {state_dir: /a}\n"),
              HasSubstr("did you mean state_dir?"));
}

TEST(YamlMessageTest, ATabIsNamed) {
  for (const char* text : {"socket: /s\nlimits:\n\tjobs_max: 3\n",
                           "socket: /s\nlimits:\n  \tjobs_max: 3\n",
                           "socket: /s\nlimits:\n\t- a\n",
                           "socket: /s\r\nlimits:\r\n\tjobs_max: 3\r\n",
                           "socket: /s\n# c\n\tstate_dir: /a\n"}) {
    EXPECT_THAT(ErrorOf(text),
                StartsWith("f.yaml:3: a tab at the beginning of the line: YAML "
                           "is indented by spaces"))
        << text;
  }
  // Outside of indentation a tab equals a space.
  v1::DaemonConfig config;
  EXPECT_TRUE(MergeYaml("socket:\t/s\nlimits:\t# c\n  jobs_max:\t3\n", "f.yaml",
                        &config)
                  .ok());
  EXPECT_THAT(ErrorOf("socket: [a\nx: y\n\t# c\n"), Not(HasSubstr("a tab")));
}

TEST(YamlMessageTest, ErrorsNameLineAndKey) {
  const std::pair<const char*, const char*> kCases[] = {
      {"\nengine: 3\n", "f.yaml:2: engine: expected keys"},
      {"engine: [1]\n", "f.yaml:1: engine: expected keys"},
      {"- a\n", "f.yaml:1: expected keys"},
      {"listen: a:1\n", "f.yaml:1: listen: expected a list"},
      {"listen: [[a]]\n", "f.yaml:1: listen: expected a single value"},
      {"socket:\n\n# end\n", "f.yaml:1: socket: has no value"},
      {"socket: {a: b}\n", "f.yaml:1: socket: expected a single value"},
      {"\n\nsocket: a\nsocket: b\n", "f.yaml:4: socket: is there twice"},
      {"engine: {workers: many}\n", "f.yaml:1: engine.workers: \"many\": "},
      {"engine: {workers: -1}\n", "f.yaml:1: engine.workers: \"-1\": "},
      {"engine: {workers: 1.5}\n", "f.yaml:1: engine.workers: \"1.5\": "},
      {"engine: {workers: 4294967296}\n",
       "f.yaml:1: engine.workers: \"4294967296\": is larger"},
      {"huge_pages: maybe\n",
       "f.yaml:1: huge_pages: \"maybe\": expected one of auto, never, mount"},
      {"huge_pages: unspecified\n", "f.yaml:1: huge_pages: "},
      {"limits: {state_bytes_max: 3 GB}\n",
       "f.yaml:1: limits.state_bytes_max: \"3 GB\": expected bytes"},
      {"[a]: b\n", "f.yaml:1: a key must be a word"},
  };
  for (const auto& [text, error] : kCases) {
    EXPECT_THAT(ErrorOf(text), StartsWith(error)) << text;
  }
}

TEST(YamlMessageTest, SyntaxErrorsNameTheLine) {
  EXPECT_THAT(ErrorOf("socket: a\nengine: [1, 2\n"), StartsWith("f.yaml:"));
  EXPECT_THAT(ErrorOf("a: b: c\n"), StartsWith("f.yaml:1: "));
  EXPECT_THAT(ErrorOf("\tsocket: a\n"), StartsWith("f.yaml:1: "));
}

TEST(YamlMessageTest, ADocumentThatBeginsWithACommaEnds) {
  for (const char* text : {",", "\n,\n", "---\n, a: 1\n", "# c\n, \"a",
                           "socket: /s\n...\n, b\n"}) {
    EXPECT_THAT(ErrorOf(text), HasSubstr("a key or a value is expected here"))
        << text;
  }
  EXPECT_THAT(ErrorOf("# c\n,\n"), StartsWith("f.yaml:2: "));
  // Empty documents are no such text, however many there are.
  v1::DaemonConfig config;
  EXPECT_TRUE(
      MergeYaml("---\n---\n...\n---\nsocket: /s\n---\n", "f.yaml", &config)
          .ok());
}

TEST(YamlMessageTest, LinesOfValues) {
  v1::DaemonConfig config;
  FieldLines lines;
  ASSERT_TRUE(
      MergeYaml("socket: /a\n\nengine:\n  workers: 1\n", "f", &config, &lines)
          .ok());
  EXPECT_EQ(lines["socket"], 1);
  EXPECT_EQ(lines["engine.workers"], 4);
}

TEST(YamlMessageTest, LinesOfElements) {
  v1::DaemonConfig config;
  FieldLines lines;
  ASSERT_TRUE(MergeYaml("quotas:\n  - user: a\n    jobs_max: 1\n\n"
                        "  - group: b\nlisten: [a, b]\n",
                        "f", &config, &lines)
                  .ok());
  EXPECT_EQ(lines["quotas"], 1);
  EXPECT_EQ(lines["quotas[0]"], 2);
  EXPECT_EQ(lines["quotas[1]"], 5);
  EXPECT_EQ(lines["listen[1]"], 6);
}

TEST(YamlMessageTest, ToYamlReadsBack) {
  v1::DaemonConfig config;
  config.set_state_dir("/a \"quoted\" # path");
  config.set_socket_mode(0660);
  config.add_listen("a:1");
  config.add_listen("[::1]:2");
  config.set_huge_pages(v1::HUGE_PAGES_NEVER);
  config.mutable_engine()->set_workers(7);
  config.mutable_engine()->set_on_rank_loss(v1::RANK_LOSS_ABORT);
  config.mutable_engine()->set_pinning(v1::PINNING_NEVER);
  config.mutable_engine()->add_job_weights("a*=5");
  config.mutable_nvme()->add_directories("/disk");
  for (const char* path : {"/disk", "/other"}) {
    v1::NvmeDirectory& settings =
        *config.mutable_nvme()->add_directory_settings();
    settings.set_path(path);
    settings.set_device("/dev/d");
  }
  config.mutable_nvme()->set_io_engine(v1::IO_ENGINE_KIND_BLOCKING);
  config.mutable_nvme()->add_directory_weights(3);
  config.mutable_nvme()->add_directory_weights(4294967295);
  config.mutable_nvme()->add_directory_bytes_max(~uint64_t{0});
  config.set_lock_memory(v1::LOCK_MEMORY_NEVER);
  config.mutable_limits()->set_state_bytes_max(~uint64_t{0});
  config.mutable_metrics()->set_address("m:3");
  config.mutable_tls()->set_certificate_file("/c");
  config.mutable_access()->add_operator_groups("ops");
  config.mutable_access()->add_trainer_groups("research");
  config.mutable_access()->add_viewer_groups("4711");
  config.set_insecure_tcp(true);
  config.set_sleep_directory("/asleep");
  config.set_log_format(v1::LOG_FORMAT_JSON);
  for (const char* group : {"research", "teaching"}) {
    v1::Quota& quota = *config.add_quotas();
    quota.set_group(group);
    quota.set_state_bytes_max(~uint64_t{0});
  }
  v1::DaemonConfig read;
  ASSERT_TRUE(MergeYaml(ToYaml(config), "f", &read).ok()) << ToYaml(config);
  EXPECT_EQ(read.SerializeAsString(), config.SerializeAsString());
}

TEST(ParseByteCountTest, UnitsAndRange) {
  EXPECT_EQ(*ParseByteCount("0"), 0u);
  EXPECT_EQ(*ParseByteCount("4096"), 4096u);
  EXPECT_EQ(*ParseByteCount("1KiB"), 1024u);
  EXPECT_EQ(*ParseByteCount("3 MiB"), 3u << 20);
  EXPECT_EQ(*ParseByteCount("2TiB"), uint64_t{2} << 40);
  EXPECT_EQ(*ParseByteCount("18446744073709551615"), ~uint64_t{0});
  for (const char* bad : {"", "MiB", "-1", "+1", "1.5GiB", "1 mib", "0x10",
                          "18446744073709551616", "16777216TiB"}) {
    EXPECT_FALSE(ParseByteCount(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace optstate::config
