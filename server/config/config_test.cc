#include "server/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/config/sleep_directory.h"
#include "server/config/yaml_message.h"

namespace optstate::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const ConfigEnvironment kRoot = {0, ""};

std::string ErrorOf(absl::string_view text, const ConfigFlags& flags = {}) {
  const auto config = ParseConfig(text, "f.yaml", flags, kRoot);
  EXPECT_TRUE(absl::IsInvalidArgument(config.status())) << text;
  return std::string(config.status().message());
}

void ExpectGood(absl::string_view text, const ConfigFlags& flags = {}) {
  const absl::Status status =
      ParseConfig(text, "f.yaml", flags, kRoot).status();
  EXPECT_TRUE(status.ok()) << text << status;
}

TEST(ConfigTest, DefaultPaths) {
  EXPECT_EQ(DefaultConfig(kRoot).socket(), "/run/optstate/optstated.sock");
  EXPECT_EQ(DefaultConfig(kRoot).state_dir(), "/dev/shm/optstate");
  const v1::DaemonConfig user = DefaultConfig({1000, "/run/user/1000"});
  EXPECT_EQ(user.socket(), "/run/user/1000/optstate/optstated.sock");
  EXPECT_EQ(user.state_dir(), "/dev/shm/optstate-1000");
  EXPECT_EQ(DefaultConfig({1000, ""}).socket(),
            "/tmp/optstate-1000/optstated.sock");
}

TEST(ConfigTest, DefaultsAreValid) {
  for (const uid_t uid : {uid_t{0}, uid_t{1000}}) {
    EXPECT_TRUE(ParseConfig("", "", {}, {uid, ""}).ok());
  }
}

TEST(ConfigTest, FlagsOverrideTheFile) {
  const auto config = ParseConfig(
      "socket: /file\nstate_dir: /file\nlog_level: warn\nlisten: [\"a:1\"]\n"
      "lock_memory: never\n",
      "f.yaml",
      {"/flag",
       "",
       {"127.0.0.1:2", "[::1]:3"},
       "debug",
       {"/disk"},
       "always",
       "emulated:2",
       "/asleep",
       "127.0.0.1:4",
       true,
       "json"},
      kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->state_dir(), "/flag");
  EXPECT_EQ(config->sleep_directory(), "/asleep");
  EXPECT_EQ(config->socket(), "/file");
  EXPECT_EQ(config->log_level(), "debug");
  EXPECT_EQ(config->log_format(), v1::LOG_FORMAT_JSON);
  EXPECT_THAT(config->listen(), ElementsAre("127.0.0.1:2", "[::1]:3"));
  EXPECT_TRUE(config->insecure_tcp());
  EXPECT_THAT(config->nvme().directories(), ElementsAre("/disk"));
  EXPECT_EQ(config->lock_memory(), v1::LOCK_MEMORY_ALWAYS);
  EXPECT_EQ(config->devices(), "emulated:2");
  EXPECT_EQ(config->metrics().address(), "127.0.0.1:4");
}

TEST(ConfigTest, MetricsHaveAnAddressOfTheirOwn) {
  EXPECT_EQ(DefaultConfig(kRoot).metrics().address(), "");
  for (const char* good :
       {"", "127.0.0.1:9464", "[::]:0", "unix:/run/optstate/metrics.sock"}) {
    const auto config = ParseConfig(
        absl::StrCat("metrics: {address: \"", good, "\"}"), "", {}, kRoot);
    ASSERT_TRUE(config.ok()) << good << config.status();
    EXPECT_EQ(config->metrics().address(), good);
  }
  for (const char* bad : {"9464", ":9464", "host:x", "unix:relative",
                          "unix:/a,b", "unix:/run/optstate:1"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("metrics:\n  address: \"", bad, "\"")),
                StartsWith("f.yaml:2: metrics.address: "))
        << bad;
  }
  for (const char* taken : {"unix:/run/optstate/optstated.sock", "a:1"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("listen: [\"a:1\"]\nmetrics: {address: \"",
                                     taken, "\"}")),
                HasSubstr("need an address of their own"));
  }
  ConfigFlags flags;
  flags.metrics = "nowhere";
  EXPECT_THAT(std::string(CheckFlags(flags).message()),
              StartsWith("--metrics: listen address \"nowhere\": has no port"));
}

TEST(ConfigTest, DevicesAreCudasEmulatedOnesOrNone) {
  EXPECT_EQ(DefaultConfig(kRoot).devices(), "cuda");
  for (const char* good :
       {"none", "cuda", "emulated", "emulated:1", "emulated:16"}) {
    EXPECT_TRUE(
        ParseConfig(absl::StrCat("devices: \"", good, "\""), "", {}, kRoot)
            .ok())
        << good;
  }
  for (const char* bad : {"gpu", "emulated:0", "emulated:17", "emulated:x",
                          "cuda:1", "emulated:"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("devices: \"", bad, "\"")),
                StartsWith(absl::StrCat("f.yaml:1: devices: \"", bad, "\"")));
  }
  ConfigFlags flags;
  flags.devices = "gpu";
  EXPECT_THAT(std::string(CheckFlags(flags).message()),
              StartsWith("--devices: \"gpu\""));
}

TEST(ConfigTest, LockMemoryIsOneOfThreeWords) {
  EXPECT_EQ(DefaultConfig(kRoot).lock_memory(), v1::LOCK_MEMORY_AUTO);
  EXPECT_EQ(ParseConfig("lock_memory: always", "", {}, kRoot)->lock_memory(),
            v1::LOCK_MEMORY_ALWAYS);
  EXPECT_THAT(ErrorOf("lock_memory: yes"),
              HasSubstr("expected one of auto, always, never"));
  ConfigFlags flags;
  flags.lock_memory = "sometimes";
  EXPECT_EQ(CheckFlags(flags).message(),
            "--lock-memory: must be auto, always or never");
}

TEST(ConfigTest, TheLogIsTextJsonOrLogfmt) {
  EXPECT_EQ(DefaultConfig(kRoot).log_format(), v1::LOG_FORMAT_TEXT);
  EXPECT_EQ(ParseConfig("log_format: json", "", {}, kRoot)->log_format(),
            v1::LOG_FORMAT_JSON);
  EXPECT_EQ(ParseConfig("log_format: logfmt", "", {}, kRoot)->log_format(),
            v1::LOG_FORMAT_LOGFMT);
  EXPECT_THAT(ErrorOf("log_format: xml"),
              HasSubstr("expected one of text, json, logfmt"));
  ConfigFlags flags;
  flags.log_format = "json";
  EXPECT_EQ(ParseConfig("log_format: text", "", flags, kRoot)->log_format(),
            v1::LOG_FORMAT_JSON);
  flags.log_format = "logfmt";
  EXPECT_EQ(ParseConfig("log_format: text", "", flags, kRoot)->log_format(),
            v1::LOG_FORMAT_LOGFMT);
  for (const char* wrong : {"unspecified", "LOGFMT", "log"}) {
    flags.log_format = wrong;
    EXPECT_EQ(CheckFlags(flags).message(),
              "--log-format: must be text, json or logfmt");
  }
}

TEST(ConfigTest, DirectoriesOfDisksAreAbsoluteAndDiffer) {
  EXPECT_THAT(ErrorOf("nvme: {directories: [disk]}"),
              HasSubstr("must be an absolute path"));
  for (const char* twice : {"[/a, /a]", "[/a/, /b, /c/../a]"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("nvme: {directories: ", twice, "}")),
                HasSubstr("is named twice"));
  }
  for (const char* nested : {"[/d, /d/jobs]", "[/d/e/, /f, /d]"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("nvme: {directories: ", nested, "}")),
                HasSubstr("lie one inside the other"));
  }
  EXPECT_TRUE(
      ParseConfig("nvme: {directories: [/d, /d2]}", "", {}, kRoot).ok());
  for (const char* list : {"directory_weights", "directory_bytes_max"}) {
    EXPECT_THAT(
        ErrorOf(absl::StrCat("nvme: {directories: [/a, /b], ", list, ": [1]}")),
        StartsWith(absl::StrCat("f.yaml:1: nvme.", list,
                                ": has 1 entries for 2 directories")));
  }
  for (const char* weight : {"0", "1000001"}) {
    EXPECT_THAT(
        ErrorOf(absl::StrCat("nvme: {directories: [/a], directory_weights: [",
                             weight, "]}")),
        StartsWith("f.yaml:1: nvme.directory_weights: must be from 1"));
  }
  EXPECT_TRUE(ParseConfig("nvme: {directories: [/a, /b], directory_weights: "
                          "[3, 1], directory_bytes_max: [1 TiB, 0]}",
                          "", {}, kRoot)
                  .ok());
  EXPECT_THAT(ErrorOf("nvme: {job_host_budget_bytes: 0}"),
              HasSubstr("must be positive"));
}

TEST(ConfigTest, ADirectoryMayHaveADevice) {
  const auto config = ParseConfig(
      "nvme:\n"
      "  directories: [/a, /b]\n"
      "  directory_settings:\n"
      "    - path: /b\n"
      "      device: /dev/b\n",
      "", {}, kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(config->nvme().directory_settings_size(), 1);
  EXPECT_EQ(config->nvme().directory_settings(0).path(), "/b");
  EXPECT_EQ(config->nvme().directory_settings(0).device(), "/dev/b");

  const auto error = [](const std::string& settings) {
    return ErrorOf(absl::StrCat(
        "nvme: {directories: [/a, /b], directory_settings: [", settings, "]}"));
  };
  EXPECT_THAT(error("{path: /c, device: /dev/c}"),
              HasSubstr("\"/c\" is none of nvme.directories"));
  EXPECT_THAT(error("{path: /a, device: dev}"),
              HasSubstr("must be an absolute path"));
  EXPECT_THAT(error("{path: /a}, {path: /a}"), HasSubstr("/a is named twice"));
  EXPECT_THAT(error("{path: /a, device: /d}, {path: /b, device: /d}"),
              HasSubstr("device /d is named twice"));
}

TEST(ConfigTest, ADirectoryOfTheCommandLineMayHaveADevice) {
  ConfigFlags flags;
  flags.nvme_directories = {"/c", "/b,device=/dev/b"};
  const auto config = ParseConfig(
      "nvme: {directories: [/a], directory_settings: [{path: /a, device: "
      "/dev/a}]}",
      "f.yaml", flags, kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->nvme().directories(), ElementsAre("/c", "/b"));
  ASSERT_EQ(config->nvme().directory_settings_size(), 1);
  EXPECT_EQ(config->nvme().directory_settings(0).device(), "/dev/b");
  flags.nvme_directories = {"/c,device=d"};
  EXPECT_THAT(CheckFlags(flags).message(), HasSubstr("--nvme-dir: device d"));
}

TEST(ConfigTest, JobsSleepBelowTheFirstDiskUnlessTheConfigurationSaysWhere) {
  v1::DaemonConfig config = DefaultConfig(kRoot);
  EXPECT_EQ(SleepDirectoryOf(config), "");
  config.mutable_nvme()->add_directories("/a");
  config.mutable_nvme()->add_directories("/b");
  EXPECT_EQ(SleepDirectoryOf(config), "/a/asleep");
  ConfigFlags flags;
  flags.sleep_directory = "/c";
  const auto parsed =
      ParseConfig("nvme: {directories: [/a]}", "f.yaml", flags, kRoot);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(SleepDirectoryOf(*parsed), "/c");
  flags.sleep_directory = "c";
  EXPECT_THAT(CheckFlags(flags).message(),
              HasSubstr("--sleep-dir: must be an absolute path"));
}

TEST(ConfigTest, ScrubsComeOnceAWeekAndCanBeTurnedOff) {
  const v1::NvmeSettings defaults = DefaultConfig(kRoot).nvme();
  EXPECT_EQ(defaults.scrub_interval_s(), 604800u);
  EXPECT_EQ(defaults.scrub_bytes_per_s(), uint64_t{64} << 20);
  const auto config = ParseConfig(
      "nvme: {scrub_interval_s: 0, scrub_bytes_per_s: 1 MiB}", "", {}, kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->nvme().scrub_interval_s(), 0u);
  EXPECT_EQ(config->nvme().scrub_bytes_per_s(), uint64_t{1} << 20);
  EXPECT_THAT(ErrorOf("nvme: {scrub_bytes_per_s: 0}"),
              StartsWith("f.yaml:1: nvme.scrub_bytes_per_s: must be positive"));
  EXPECT_THAT(ErrorOf("nvme: {scrub_interval_s: -1}"),
              HasSubstr("nvme.scrub_interval_s"));
}

TEST(ConfigTest, ZeroIsAValueNotADefault) {
  const auto config = ParseConfig(
      "engine: {doorbell_spin_us: 0, restarts_max: 0}\n", "f", {}, kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->engine().doorbell_spin_us(), 0u);
  EXPECT_EQ(config->engine().restarts_max(), 0u);
}

TEST(ConfigTest, ValuesThatMakeNoSense) {
  const std::pair<const char*, const char*> kCases[] = {
      {"state_dir: relative\n", "f.yaml:1: state_dir: must be an absolute"},
      {"socket: relative\n", "f.yaml:1: socket: socket path \"relative\""},
      {"socket_mode: 01777\n", "f.yaml:1: socket_mode: must be at most 0777"},
      {"log_level: loud\n", "f.yaml:1: log_level: \"loud\" is none of"},
      {"\nlisten: [\"nowhere\"]\n",
       "f.yaml:2: listen: listen address \"nowhere\": has no port"},
      {"engine:\n  subgroup_elements: 5000\n",
       "f.yaml:2: engine.subgroup_elements: must be a positive multiple"},
      {"engine: {subgroup_elements: 0}\n", "f.yaml:1: engine.subgroup_el"},
      {"engine: {workers: 5000}\n", "f.yaml:1: engine.workers: "},
      {"engine: {restart_window_s: 0}\n", "f.yaml:1: engine.restart_window"},
      {"engine: {weight: 0}\n", "f.yaml:1: engine.weight: must be from 1"},
      {"engine: {weight: 10001}\n", "f.yaml:1: engine.weight: "},
      {"engine:\n  job_weights: [a=5, b]\n",
       "f.yaml:2: engine.job_weights: \"b\": must be PATTERN=WEIGHT"},
      {"engine: {pinning: sometimes}\n", "f.yaml:1: engine.pinning: "},
      {"limits:\n\n  jobs_max: 0\n", "f.yaml:3: limits.jobs_max: "},
      {"limits: {sessions_max: 0}\n", "f.yaml:1: limits.sessions_max: "},
      {"limits: {handshake_timeout_ms: 0}\n", "f.yaml:1: limits.handshake"},
      {"limits: {rank_return_timeout_ms: 0}\n", "f.yaml:1: limits.rank_ret"},
      {"limits: {user_grpc_connections_max: 0}\n", "f.yaml:1: limits.user_gr"},
      {"limits: {operator_reserve_percent: 100}\n", "f.yaml:1: limits.operat"},
  };
  for (const auto& [text, error] : kCases) {
    EXPECT_THAT(ErrorOf(text), StartsWith(error)) << text;
  }
}

TEST(ConfigTest, ErrorsOfFlagsNameTheFlag) {
  ConfigFlags log_level;
  log_level.log_level = "loud";
  EXPECT_THAT(ErrorOf("", log_level), StartsWith("--log-level: "));
  ConfigFlags state_dir;
  state_dir.state_dir = "x";
  EXPECT_THAT(ErrorOf("", state_dir), StartsWith("--state-dir: "));
  ConfigFlags listen;
  listen.listen = {"x"};
  EXPECT_THAT(ErrorOf("", listen), StartsWith("--listen: "));
  ConfigFlags socket;
  socket.socket = "/" + std::string(200, 'x');
  EXPECT_THAT(ErrorOf("", socket), testing::AllOf(StartsWith("--socket: "),
                                                  HasSubstr("has 201 bytes")));
}

TEST(ConfigTest, TcpTakesTlsOrBeingToldThatItIsInsecure) {
  constexpr char kTls[] =
      "tls: {certificate_file: /c, key_file: /k, client_ca_file: /a}\n"
      "access: {identities_file: /i}\n";
  constexpr char kTokens[] =
      "tls: {certificate_file: /c, key_file: /k}\n"
      "access: {tokens_file: /t}\n";
  const std::string remote = "listen: [\"10.0.0.5:7600\"]\n";
  const std::string local = "listen: [\"127.0.0.1:0\"]\n";
  const std::string insecure = "insecure_tcp: true\n";
  EXPECT_THAT(ErrorOf(remote),
              testing::AllOf(StartsWith("f.yaml:1: listen: 10.0.0.5:7600"),
                             HasSubstr("(tls)"), HasSubstr("loopback")));
  EXPECT_THAT(ErrorOf(remote + insecure), HasSubstr("loopback"));
  EXPECT_THAT(ErrorOf("listen: [\"example.org:1\"]\n" + insecure),
              HasSubstr("loopback"));
  EXPECT_THAT(ErrorOf(local),
              testing::AllOf(HasSubstr("every local user"),
                             HasSubstr("insecure_tcp: true (--insecure)")));
  for (const char* host : {"127.1.2.3", "[::1]", "localhost"}) {
    const std::string text = absl::StrCat("listen: [\"", host, ":0\"]\n");
    ExpectGood(text + insecure);
  }
  ExpectGood("listen: [\"unix:/x\"]\n");
  ExpectGood(remote + kTls);
  ExpectGood(remote + kTokens);
  EXPECT_THAT(ErrorOf(remote + kTls + insecure),
              HasSubstr("insecure_tcp: cannot be had together with tls"));
  for (const char* groups : {"trainer_groups", "viewer_groups"}) {
    EXPECT_THAT(
        ErrorOf(absl::StrCat("access: {", groups, ": [root]}\n", insecure)),
        HasSubstr("insecure_tcp: would let every local user act"));
  }
  ExpectGood(absl::StrCat("access: {operator_groups: [root]}\n", insecure));
  ConfigFlags flags;
  flags.listen = {"127.0.0.1:0"};
  EXPECT_THAT(ErrorOf("", flags), StartsWith("--listen: "));
  flags.insecure_tcp = true;
  ExpectGood("", flags);
  EXPECT_THAT(ErrorOf(kTls, flags), StartsWith("--insecure: "));
}

TEST(ConfigTest, FilesOfTlsAndAccessGoTogether) {
  const std::pair<const char*, const char*> kCases[] = {
      {"tls: {certificate_file: c, key_file: /k}\n",
       "f.yaml:1: tls.certificate_file: must be an absolute path"},
      {"tls: {certificate_file: /c}\n", "tls.key_file: certificate_file and"},
      {"tls: {key_file: /c}\n", "f.yaml:1: tls.key_file: "},
      {"tls: {client_ca_file: /c}\n", "f.yaml:1: tls.client_ca_file: needs"},
      {"tls: {certificate_file: /c, key_file: /k, client_ca_file: /a}\n",
       "access.identities_file: goes together"},
      {"access: {identities_file: /i}\n",
       "f.yaml:1: access.identities_file: goes together"},
      {"access: {tokens_file: /t}\n", "f.yaml:1: access.tokens_file: is for"},
      {"tls: {certificate_file: /c, key_file: /k}\n",
       "f.yaml:1: tls.certificate_file: with neither"},
  };
  for (const auto& [text, error] : kCases) {
    EXPECT_THAT(ErrorOf(text), HasSubstr(error)) << text;
  }
}

TEST(ConfigTest, GroupsOfRolesAreLists) {
  const v1::AccessSettings defaults = DefaultConfig(kRoot).access();
  EXPECT_THAT(defaults.operator_groups(), ElementsAre());
  EXPECT_THAT(defaults.trainer_groups(), ElementsAre());
  EXPECT_THAT(defaults.viewer_groups(), ElementsAre());
  const auto config = ParseConfig(
      "access:\n"
      "  operator_groups: [ops]\n"
      "  trainer_groups: [research, \"4711\"]\n"
      "  viewer_groups:\n"
      "  - monitoring\n",
      "", {}, kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->access().operator_groups(), ElementsAre("ops"));
  EXPECT_THAT(config->access().trainer_groups(),
              ElementsAre("research", "4711"));
  EXPECT_THAT(config->access().viewer_groups(), ElementsAre("monitoring"));
  for (const char* name : {"operator", "trainer", "viewer"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("access:\n  ", name, "_groups: ops\n")),
                StartsWith(absl::StrCat("f.yaml:2: access.", name, "_groups")));
  }
}

TEST(ConfigTest, FlagsAreCheckedWithoutTheFile) {
  EXPECT_TRUE(CheckFlags({}).ok());
  ConfigFlags flags;
  flags.listen = {"unix:" + DefaultConfig(kRoot).socket()};
  EXPECT_TRUE(CheckFlags(flags).ok());
  // The file may have the certificate that TCP takes.
  flags.listen = {"10.0.0.5:7600"};
  EXPECT_TRUE(CheckFlags(flags).ok());
  flags.listen = {"nowhere"};
  const absl::Status refused = CheckFlags(flags);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), StartsWith("--listen: "));
}

TEST(ConfigTest, UnreadableFiles) {
  EXPECT_TRUE(
      absl::IsNotFound(LoadConfig("/no/such.yaml", {}, kRoot).status()));
  EXPECT_FALSE(LoadConfig(testing::TempDir(), {}, kRoot).ok());
  const std::string huge = testing::TempDir() + "/huge.yaml";
  std::ofstream(huge) << std::string(2 << 20, '#');
  EXPECT_TRUE(absl::IsResourceExhausted(LoadConfig(huge, {}, kRoot).status()));
}

std::vector<std::string> ShippedFiles() {
  std::vector<std::string> files;
  for (const auto& entry :
       std::filesystem::directory_iterator("deploy/config")) {
    if (entry.path().extension() == ".yaml") files.push_back(entry.path());
  }
  return files;
}

TEST(ShippedConfigTest, EveryFileLoads) {
  const std::vector<std::string> files = ShippedFiles();
  EXPECT_GE(files.size(), 2u);
  for (const std::string& file : files) {
    EXPECT_TRUE(LoadConfig(file, {}, kRoot).ok())
        << LoadConfig(file, {}, kRoot).status();
  }
}

void ExpectEveryKey(const google::protobuf::Descriptor& type,
                    const std::string& prefix, const FieldLines& lines) {
  for (int i = 0; i < type.field_count(); ++i) {
    const std::string path = prefix + type.field(i)->name();
    EXPECT_TRUE(lines.contains(path)) << path << " is not in optstated.yaml";
    // A list is empty there; its comment has an element.
    if (type.field(i)->message_type() == nullptr ||
        type.field(i)->is_repeated()) {
      continue;
    }
    ExpectEveryKey(*type.field(i)->message_type(), path + ".", lines);
  }
}

TEST(ShippedConfigTest, ReferenceHasEveryKeyAtItsDefault) {
  const std::string file = "deploy/config/optstated.yaml";
  const auto config = LoadConfig(file, {}, kRoot);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(ToYaml(*config), ToYaml(DefaultConfig(kRoot)));

  std::ifstream stream(file);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  v1::DaemonConfig read;
  FieldLines lines;
  ASSERT_TRUE(MergeYaml(text, file, &read, &lines).ok());
  ExpectEveryKey(*v1::DaemonConfig::descriptor(), "", lines);
}

}  // namespace
}  // namespace optstate::config
