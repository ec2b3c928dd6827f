// The daemon's configuration. Input: the YAML text.

#include <string>
#include <vector>

#include "optstate/v1/config.pb.h"
#include "server/config/config.h"
#include "server/config/yaml_message.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

const config::ConfigEnvironment kEnvironment = {.uid = 1000,
                                                .xdg_runtime_dir = "/run/u"};

}  // namespace

std::vector<std::string> Seeds() {
  return {config::ToYaml(config::DefaultConfig(kEnvironment)),
          "state_dir: /dev/shm/x\nlisten: [\"127.0.0.1:7077\", \"[::1]:0\"]\n"
          "socket_mode: 0660\nlimits:\n  jobs_max: 10\n"
          "  state_bytes_max: 256 MiB\n",
          "nvme:\n  directories:\n  - /a\n  - /b\n  directory_weights: [1, 2]\n"
          "  host_budget_bytes: 1TiB\n  io_engine: auto\n",
          "a: &x [1, 2]\nb: *x\n---\nc: !!binary 4\n"};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate;
  using namespace optstate::fuzz;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<v1::DaemonConfig> parsed =
      config::ParseConfig(text, "fuzz.yaml", {}, kEnvironment);
  if (!parsed.ok()) return 0;
  const std::string written = config::ToYaml(*parsed);
  const absl::StatusOr<v1::DaemonConfig> again =
      config::ParseConfig(written, "written.yaml", {}, kEnvironment);
  Require(again.ok() && config::ToYaml(*again) == written,
          "a configuration that is written can be read back");
  return 0;
}
